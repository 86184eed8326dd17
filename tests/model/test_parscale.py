"""ParScale: streams and their aggregate, the cache, the directory, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ModelError, PlanError  # noqa: E402
from shoal.cost.arithmetic import activation_bytes, flops_by_op, parameters  # noqa: E402
from shoal.cost.step_cost.roofline import cache_bytes_per_token  # noqa: E402
from shoal.ir import Architecture, TrainJob  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.architecture import rebuilt  # noqa: E402
from shoal.model.attention import KVCache  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.generate import generate  # noqa: E402
from shoal.model.parscale import Aggregate, causal, use  # noqa: E402
from shoal.model.rope import tables  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402
from shoal.parallel.legal import check_split  # noqa: E402
from shoal.parallel.tensor.slices import whole_shapes  # noqa: E402
from shoal.train.zoo import random  # noqa: E402


def model(streams: Any = 1, **changes: Any) -> Transformer:
    config = {
        "vocab_size": 53,
        "hidden": 24,
        "num_layers": 3,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_hidden": 32,
        "max_position": 64,
        "initializer_range": 0.3,
        "architecture": {"streams": streams},
    }
    return random(ModelConfig(**{**config, **changes})).double().eval()


def ids(length: int = 9) -> torch.Tensor:
    return torch.randint(0, 53, (2, length), generator=torch.Generator().manual_seed(0))


def test_one_stream_is_the_base_model() -> None:
    one = model({"num": 1, "prefix": 48})
    assert one.config.architecture.name == ""
    assert [name for name, _ in one.named_parameters()] == [
        name for name, _ in Transformer(ModelConfig(**dict(one.config))).named_parameters()
    ]
    assert torch.equal(one(ids()), model()(ids()))


def test_equal_prefixes_are_one_stream_whatever_the_aggregator() -> None:
    three, two = model({"num": 3, "prefix": 4}), model({"num": 2, "prefix": 4})
    with torch.no_grad():
        for many, few in zip(three.blocks, two.blocks, strict=True):
            few.load_state_dict({**many.state_dict(), "attention.prefix": few.attention.prefix})
            for block in (many, few):
                block.attention.prefix[:, 1:] = many.attention.prefix[:, :1]
                block.attention.prefix[:, 0] = many.attention.prefix[:, 0]
        two.embed, two.norm, two.output = three.embed, three.norm, three.output
        # Two streams and three, with aggregators of their own, are the same one stream.
        assert torch.allclose(two(ids()), three(ids()), atol=1e-12)


@pytest.mark.parametrize("documents", [False, True])
def test_the_aggregate_of_what_each_stream_computes_alone(documents: bool) -> None:
    both = model({"num": 2, "prefix": 4})
    docs = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2]] * 2) if documents else None
    alone = []
    with torch.no_grad():
        for stream in range(2):
            # With equal prefixes the aggregate is the stream itself.
            one = model({"num": 2, "prefix": 4})
            for block in one.blocks:
                block.attention.prefix.copy_(block.attention.prefix[:, stream : stream + 1])
            alone.append(one.hidden(ids(), documents_BT=docs))
        assert both.aggregate is not None
        want = both.aggregate(torch.cat(alone))
        assert torch.allclose(both.hidden(ids(), documents_BT=docs), want, atol=1e-12)
    assert not torch.allclose(*alone)


def test_a_prefix_is_keys_and_values_before_the_real_ones() -> None:
    attention: Any = model({"num": 2, "prefix": 4}).blocks[0].attention
    config = model().config
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cos, sin = tables(config, 0, 5, torch.device("cpu"), torch.float64)
    mask = causal(None, 4, 5, 0, x)
    with torch.no_grad():
        got = attention(x, cos, sin, mask)
        q, k, v = attention.rotated(attention.qkv_proj(x), cos, sin)
        rows = []
        for stream in range(2):
            keys = torch.cat([attention.prefix[0, stream], k[stream]])
            values = torch.cat([attention.prefix[1, stream], v[stream]])
            out = []
            for head in range(4):
                scores = q[stream, :, head] @ keys[:, head // 2].T / 8**0.5
                scores[:, 4:] += torch.full((5, 5), float("-inf")).triu(1)
                out.append(scores.softmax(-1) @ values[:, head // 2])
            rows.append(attention.o_proj(torch.cat(out, -1)))
    assert torch.allclose(got, torch.stack(rows), atol=1e-12)


def test_cached_decoding_is_the_full_pass() -> None:
    made = model({"num": 3, "prefix": 5})
    with torch.no_grad():
        want = made(ids())
        cache = KVCache(made.config, 2, 16, dtype=torch.float64)
        parts = [made(ids()[:, a:b], cache=cache) for a, b in ((0, 4), (4, 5), (5, 9))]
    assert torch.allclose(torch.cat(parts, 1), want, atol=1e-12)


@pytest.mark.parametrize("num", [1, 2])
def test_fewer_streams_are_those_of_a_smaller_model(num: int) -> None:
    """With the first prefixes; the aggregator reads zeros in the place of the others."""
    many = model({"num": 3, "prefix": 4})
    want = model() if num == 1 else model({"num": num, "prefix": 4})
    with torch.no_grad():
        known = dict(many.named_parameters())
        for name, parameter in want.named_parameters():
            if name.endswith("prefix"):
                parameter.copy_(known[name][:, :num])
            elif name == "aggregate.up.weight":
                parameter.copy_(known[name][:, : num * 24])
            elif name.startswith("aggregate.down"):
                parameter.copy_(known[name][:num])
            else:
                parameter.copy_(known[name])
        use(many, num)
        assert torch.allclose(many(ids()), want(ids()), atol=1e-12)
        if num == 1:
            assert torch.equal(many(ids()), want(ids()))
        prompt = ids()[0].tolist()
        assert generate(many, prompt, 8) == generate(want, prompt, 8)
        use(many, 3)
        assert not torch.allclose(many(ids()), want(ids()))
    with pytest.raises(ModelError, match="1 to 3"):
        use(many, 4)


def test_no_stream_weighs_less_than_its_share_of_the_smoothing() -> None:
    made = model({"num": 4, "smoothing": 0.2})
    aggregate = made.aggregate
    assert isinstance(aggregate, Aggregate)
    with torch.no_grad():
        aggregate.down.weight.zero_()
        aggregate.down.bias.copy_(torch.tensor([50.0, 0, 0, 0]))
        streams = torch.eye(4, dtype=torch.float64).repeat_interleave(6, 1).unsqueeze(1)
        weight = aggregate(streams)[0, 0].unflatten(0, (4, 6))[:, 0]
    assert torch.allclose(weight, torch.tensor([0.85, 0.05, 0.05, 0.05], dtype=torch.float64))


def test_a_trained_model_gets_streams_and_keeps_its_weights(tmp_path: Path) -> None:
    base = model()
    made = rebuilt(base, Architecture(streams=2))
    assert torch.equal(made.blocks[1].mlp.down_proj.weight, base.blocks[1].mlp.down_proj.weight)
    prefix = made.blocks[0].attention.prefix
    assert prefix.shape == (2, 2, 48, 2, 8) and not torch.equal(prefix[:, 0], prefix[:, 1])
    huggingface.write(tmp_path / "model", made.float())
    again = huggingface.read(tmp_path / "model")
    assert again.config.architecture.streams.num == 2
    assert torch.equal(again(ids()), made(ids()))
    assert '"shoal_parscale"' in (tmp_path / "model" / "config.json").read_text()


def test_prefixes_that_begin_as_texts_are_the_context_of_their_streams() -> None:
    """A stream computes what the model does behind the stream's text; rotations are relative."""
    base = model()
    texts = torch.randint(0, 53, (2, 5), generator=torch.Generator().manual_seed(3))
    made = rebuilt(base, Architecture(streams={"num": 2, "prefix": 5}), texts_PM=texts)
    with torch.no_grad():
        want = torch.cat(
            [base.hidden(torch.cat([text.expand(2, 5), ids()], 1))[:, 5:] for text in texts]
        )
        assert made.aggregate is not None
        assert torch.allclose(made.hidden(ids()), made.aggregate(want), atol=1e-12)
    with pytest.raises(ModelError, match="2 of 5 tokens"):
        rebuilt(base, Architecture(streams={"num": 2, "prefix": 5}), texts_PM=texts[:1])
    with pytest.raises(ModelError, match="single stream"):
        rebuilt(base, Architecture(residual={"name": "ladder", "rewire": True}), texts_PM=texts)


def test_shapes_and_costs_know_the_streams() -> None:
    made, base = model(4), model()
    shapes = {name: tuple(p.shape) for name, p in made.named_parameters()}
    assert whole_shapes(made.config) == shapes
    shape = made.config.shape()
    assert parameters(shape) == sum(p.numel() for p in made.parameters())
    ours, theirs = flops_by_op(shape, 8), flops_by_op(base.config.shape(), 8)
    assert cache_bytes_per_token(shape, "fp32") == 4 * cache_bytes_per_token(
        base.config.shape(), "fp32"
    )
    assert activation_bytes(shape, 8, 2) == 4 * activation_bytes(base.config.shape(), 8, 2)
    assert ours["linear"] > 4 * theirs["linear"] and ours["logits"] == theirs["logits"]


def test_bad_input() -> None:
    for wrong in (0, -1, 1000, {"num": 2, "prefix": 0}, {"num": 2, "smoothing": 1.5}):
        with pytest.raises((ConfigError, ValueError)):
            Architecture(streams=wrong)
    with pytest.raises(ModelError, match="one of them"):
        model(2, architecture={"streams": 2, "residual": "ladder"})
    job = TrainJob(model="shoal-0.3m", parallel={"tp": 2}, architecture={"streams": 2})
    with pytest.raises(PlanError, match=r"parallel\.tp"):
        check_split(job, model(2).config.shape())
