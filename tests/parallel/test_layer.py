"""Layers on several ranks give what one process gives; so do heads; strangers are refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.claims.lab.thread_ranks import run_ranks  # noqa: E402
from shoal.core.errors import ModelError  # noqa: E402
from shoal.model.attention import attend  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.parallel.tensor.layer import LayerRanks, cut, meet  # noqa: E402
from shoal.serve.decode.draft.fuzzy import FuzzyModel  # noqa: E402
from shoal.train.zoo import random  # noqa: E402

DEEP = {
    "vocab_size": 61, "hidden": 24, "num_layers": 7, "num_heads": 6, "num_kv_heads": 3,
    "head_dim": 4, "ffn_hidden": 29, "max_position": 64, "initializer_range": 0.2,
}  # fmt: skip
TOKENS, PLACES = torch.tensor([5, 9, 2, 40]), torch.arange(4)


def mixer(layer, q, k, v):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attend(q, k, v, None, causal=True)[0].transpose(0, 1)


def model_of(**fields):
    config = ModelConfig(**{**DEEP, **fields}, family="llama", tied=True)
    return random(config, seed=3).to(torch.float64).requires_grad_(False)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("groups", [(1, 2, 3, 1), (1, 5, 1)])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_give_what_one_process_gives(world, groups, full):
    wanted = FuzzyModel(model_of(), groups, full=full).flat(TOKENS, PLACES, mixer)
    layers = []

    def work(comm):
        part = model_of()
        cut(part, comm.rank, comm.world, "layers")
        layers.append(part.config.num_layers)
        return LayerRanks(part, comm, "layers", groups, full=full).flat(TOKENS, PLACES, mixer)

    for result in run_ranks(world, work):
        torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)
    assert sum(layers) == 7


@pytest.mark.parametrize("share", ["layers", "heads"])
def test_the_exact_model_by_ranks(share):
    whole = model_of(attention_bias=True)
    wanted = whole.logits(whole.flat(TOKENS, PLACES, mixer))

    def work(comm):
        part = model_of(attention_bias=True)
        cut(part, comm.rank, comm.world, share)
        ranks = LayerRanks(part, comm, share)
        scores = ranks.logits(ranks.flat(TOKENS, PLACES, mixer))
        return scores, part.config.num_kv_heads

    (scores, first), (_, second) = run_ranks(2, work)
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-12)
    assert (first, second) == ((1, 2) if share == "heads" else (3, 3))


def test_stale_layers_meet_less_often():
    def met(share, groups, full=False):
        def work(comm):
            part = model_of()
            cut(part, comm.rank, comm.world, share)
            program = LayerRanks(part, comm, share, groups, full=full)
            times, steps = 0, program.program(part.embed(TOKENS), PLACES, mixer)
            while True:
                try:
                    meet(comm, next(steps))
                except StopIteration:
                    return times
                times += 1

        return run_ranks(2, work)[0]

    assert met("heads", None) == 14
    assert met("layers", (1, 5, 1)) == 3 + 7
    assert met("layers", (1, 5, 1), full=True) == 3 + 3


def test_what_cannot_be_shared_is_named():
    with pytest.raises(ModelError, match="ranks = 8: expected 1 to 7"):
        cut(model_of(), 0, 8, "layers")
    with pytest.raises(ModelError, match="ranks = 4: expected 1 to 3"):
        cut(model_of(), 0, 4, "heads")
    with pytest.raises(ModelError, match="ranks = 0"):
        cut(model_of(), 0, 0, "layers")
    config = ModelConfig(**{**DEEP, "num_experts": 4, "top_k": 2}, family="mixtral")
    with pytest.raises(ModelError, match="realise: fused"):
        cut(random(config), 0, 2, "layers")
