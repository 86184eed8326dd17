"""Which boxes a rank holds: they tile every parameter, and lead back to it."""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from shoal.core.boxes import Box, uncovered  # noqa: E402
from shoal.ir.job import Parallel  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.initialise import empty  # noqa: E402
from shoal.parallel.tensor.slices import slices, take, whole_shapes  # noqa: E402

BASE = {
    "vocab_size": 10,
    "hidden": 6,
    "num_layers": 2,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 2,
    "ffn_hidden": 12,
}
CONFIGS = [
    ModelConfig(**BASE, family="llama", tied=True),
    ModelConfig(**BASE, family="llama", attention_bias=True, output_bias=True, ffn_bias=True),
    ModelConfig(**BASE, family="qwen3", qk_norm=True),
    ModelConfig(**BASE, family="mixtral", num_experts=3, top_k=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_shapes_are_those_of_the_model(config):
    expected = {name: tuple(p.shape) for name, p in empty(config).named_parameters()}
    assert whole_shapes(config) == expected


@pytest.mark.parametrize("vocab", ["tp", "none"])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_ranks_tile_every_parameter(config, tp, vocab):
    ranks = [slices(config, Parallel(tp=tp, vocab=vocab), rank) for rank in range(tp)]
    for name, shape in whole_shapes(config).items():
        parts = [rank[name] for rank in ranks]
        boxes = [box for part in parts for box in part.boxes]
        assert not uncovered(Box.whole(shape), boxes)
        volume = sum(box.volume for box in boxes)
        assert volume == Box.whole(shape).volume * (tp if parts[0].replicated else 1)
        assert len({part.local_shape for part in parts}) == 1


def test_a_fused_projection_is_three_boxes():
    part = slices(CONFIGS[0], Parallel(tp=4), 1)["blocks.1.attention.qkv_proj.weight"]
    # 8 heads, 4 and 4 key/value heads of 2 dimensions.
    assert [str(box) for box in part.boxes] == ["[4:8, 0:6]", "[18:20, 0:6]", "[26:28, 0:6]"]
    whole = torch.arange(32 * 6.0).view(32, 6)
    assert torch.equal(take(whole, part), whole[[4, 5, 6, 7, 18, 19, 26, 27]])
    assert torch.equal(take(whole.view(-1), part), take(whole, part))


def test_padding_of_the_vocabulary_is_zero_and_nobodys():
    part = slices(CONFIGS[0], Parallel(tp=4), 3)["embed.weight"]
    assert (part.padding, part.local_shape) == (2, (3, 6))
    whole = torch.ones(10, 6)
    assert take(whole, part).sum(1).tolist() == [6.0, 0.0, 0.0]
    assert part.find(Box((1, 0), (2, 6))) == []


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_box_of_the_local_tensor_leads_back_to_the_whole(data):
    config = data.draw(st.sampled_from(CONFIGS))
    tp = data.draw(st.sampled_from([1, 2, 4]))
    parts = slices(config, Parallel(tp=tp), data.draw(st.integers(0, tp - 1)))
    part = parts[data.draw(st.sampled_from(sorted(parts)))]
    whole = torch.randperm(Box.whole(part.shape).volume).view(part.shape).float() + 1
    local = take(whole, part)
    offset = tuple(data.draw(st.integers(0, n)) for n in local.shape)
    shape = tuple(
        data.draw(st.integers(0, n - o)) for n, o in zip(local.shape, offset, strict=True)
    )
    box = Box(offset, shape)
    everywhere, origin = Box.whole(local.shape), Box.whole(part.shape)
    seen = torch.zeros_like(local)
    for here, there in part.find(box):
        assert torch.equal(local[here.slices(everywhere)], whole[there.slices(origin)])
        seen[here.slices(everywhere)] += 1
    wanted = torch.zeros_like(local)
    wanted[box.slices(everywhere)] = 1
    assert torch.equal(seen, wanted * (local != 0))


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=range(len(CONFIGS)))
def test_what_is_partial_is_whole_on_every_rank(config, sp):
    parts = slices(config, Parallel(tp=2, sp=sp), 0)
    partial = {re.sub(r"^blocks\.\d+\.", "", name) for name, part in parts.items() if part.partial}
    assert all(part.replicated for part in parts.values() if part.partial)
    norms = {"attention_norm.weight", "mlp_norm.weight", "norm.weight"}
    assert norms <= partial if sp else not norms & partial
    assert ("attention.q_norm.weight" in partial) == config.qk_norm
    assert ("mlp.router.weight" in partial) == (config.num_experts > 0)
    assert ("attention.o_proj.bias" in partial) == (sp and config.output_bias)
