"""Slots on a real model: dense reads, moves of keys and values, tokens as alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ServeError  # noqa: E402
from shoal.ir import Copy, Request, SamplingParams  # noqa: E402
from shoal.model.generate import generate  # noqa: E402
from shoal.serve.cache.paged import PagedCache  # noqa: E402
from shoal.serve.engine.runner import LocalRunner  # noqa: E402

FUSED = {
    "scheduler": {"name": "temporal_fusion", "lane_tokens": 6},
    "kv": {"name": "slots", "max_len": 64, "block_size": 8},
    "kv_tokens": 5 * 64,
    "max_step_tokens": 16,
}
# With the kernel that dispatch takes, and without: dense products over the slots.
KERNELS = pytest.mark.parametrize("kernel", [{}, {"paged_attention": "torch"}], ids=["own", "sdpa"])


@pytest.mark.slow
@KERNELS
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_are_those_of_solo_runs(kernel, family, random_model, engine_for):
    model = random_model(family)
    draw = random.Random(3)
    results = [
        ([draw.randrange(160) for _ in range(draw.randrange(1, 40))], draw.randrange(1, 24))
        for _ in range(24)
    ]
    expected = [generate(model, prompt, new, eos=()) for prompt, new in results]
    engine = engine_for(model, kernel=kernel, **FUSED)
    requests = [
        Request(f"r{n}", list(prompt), len(prompt), SamplingParams(max_tokens=new))
        for n, (prompt, new) in enumerate(results)
    ]
    waiting = list(requests)
    while waiting or engine.busy:
        # They come at random while others run.
        while waiting and (not engine.busy or draw.random() < 0.15):
            engine.add(waiting.pop(0))
        engine.step()
    assert [one.tokens[one.n_prompt :] for one in requests] == expected
    assert engine.kv.stats()["slot_moves"] > 3


def test_ranks_that_get_the_same_steps_stay_equal(random_model, engine_for):
    model = random_model("llama")
    engine = engine_for(model, **FUSED)
    first = engine.runner
    second = LocalRunner(
        model,
        PagedCache(model.config, first.cache.num_blocks, 8, slot_blocks=8),
        attention=first.attention,
        prompts=first.prompts,
    )

    class Both:
        def execute(self, step):
            moved.extend(step.moves)
            # What is sent to another rank: numbers, and nothing of the books.
            sent = replace(
                step,
                chunks=tuple(
                    one._replace(request=replace(one.request, blocks=list(one.request.blocks)))
                    for one in step.chunks
                ),
            )
            outcome = second.execute(sent)
            result = first.execute(step)
            assert outcome.tokens == result.tokens
            for one, other in zip(first.cache.stores, second.cache.stores, strict=True):
                assert torch.equal(one, other)
            return result

    moved: list[Copy] = []
    engine.runner = Both()
    for n in range(12):
        engine.add(Request(f"r{n}", [n] * (n + 1), n + 1, SamplingParams(max_tokens=1 + 5 * n % 9)))
    while engine.busy:
        engine.step()
    assert moved


def test_a_move_copies_the_used_blocks_in_every_layer(random_model):
    cache = PagedCache(random_model("llama").config, 12, 4, slot_blocks=3)
    for number, store in enumerate(cache.stores):
        store.copy_(torch.randn(store.shape, generator=torch.Generator().manual_seed(number)))
    before = [store.clone() for store in cache.stores]
    cache.move((Copy(9, 3, 2),))
    for store, old in zip(cache.stores, before, strict=True):
        assert torch.equal(store[:, :, 12:20], old[:, :, 36:44])
        assert torch.equal(store[:, :, :12], old[:, :, :12])
        assert torch.equal(store[:, :, 20:], old[:, :, 20:])
    keys, values = cache.slots(1, 1, 2, 5)
    assert keys.data_ptr() == cache.stores[0][1, 0, 12].data_ptr(), "slots are read in place"
    assert torch.equal(values, cache.stores[0][1, 1, 12:36].view(2, 12, 2, 16)[:, :5])


def test_a_request_longer_than_a_slot_is_refused_when_it_comes(random_model, engine_for):
    engine = engine_for(random_model("llama"), **FUSED)
    with pytest.raises(ServeError, match="at most 64, the max_len of a slot"):
        engine.add(Request("x", [1] * 50, 50, SamplingParams(max_tokens=16)))
    assert not engine.busy
