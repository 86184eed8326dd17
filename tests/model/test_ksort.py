"""K-sort changes no score, whatever the heads, biases, norms and positions."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, KernelError, ModelError  # noqa: E402
from shoal.kernel.calls import PagedAttentionCall as Call  # noqa: E402
from shoal.kernel.dispatch import dispatch  # noqa: E402
from shoal.kernel.kv import kv_format  # noqa: E402
from shoal.kernel.kv.ksort import channel_order, rotary, score_error  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.attention import KVCache  # noqa: E402
from shoal.model.ksort import captured, channel_sizes, coded, ksort  # noqa: E402
from shoal.model.kv_report import kv_report  # noqa: E402
from shoal.model.rope import tables_at  # noqa: E402


def tokens(config, length=40, rows=1, seed=1):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (rows, length), generator=source)


@pytest.mark.parametrize("mode", ["pairs", "free"])
@pytest.mark.parametrize("by", ["weight", "calibration"])
def test_scores_and_logits_stay(config, make, mode, by):
    ids = tokens(config)
    model, other = make(config), make(config)
    ksort(other, mode=mode, by=by, tokens_BT=ids)
    group = config.num_heads // config.num_kv_heads
    scores = []
    with torch.no_grad():
        for each in (model, other):
            with captured(each) as seen:
                logits = each(ids)
            scores.append(
                [torch.einsum("tkgd,skd->kgts", q.unflatten(1, (-1, group)), k) for q, k in seen]
            )
            if each is model:
                before = logits
        assert (logits - before).abs().max() < 1e-4
        for a, b in zip(*scores, strict=True):
            assert (a - b).abs().max() < 1e-5 * max(1.0, float(a.abs().max()))
        assert not torch.equal(model.blocks[0].attention.qkv_proj.weight,
                               other.blocks[0].attention.qkv_proj.weight)  # fmt: skip
        # With a cache, token by token.
        cache = KVCache(config, 1, 40)
        pieces = [other(part, cache=cache) for part in ids.split([16, 1, 1, 22], 1)]
        assert (torch.cat(pieces, 1) - before).abs().max() < 1e-4


def test_any_positions(config, make):
    """Far places, in any order, through the rotation of tokens side by side."""
    model, other = make(config), ksort(make(config))
    place = torch.tensor([5, 100_000, 17, 99_999, 0])
    qkv = torch.randn(5, config.hidden)
    group = config.num_heads // config.num_kv_heads
    scores = []
    for each in (model, other):
        attention = each.blocks[1].attention
        cos, sin = tables_at(place.double(), *(x if isinstance(x, float) else x.double()
                             for x in each.unstretched), torch.float64)  # fmt: skip
        attention.double()
        with torch.no_grad():
            q, k, v = attention.rotated(attention.qkv_proj(qkv.double())[None], cos, sin)
        scores.append(torch.einsum("tkgd,skd->kgts", q[0].unflatten(1, (-1, group)), k[0]))
    torch.testing.assert_close(*scores, rtol=1e-9, atol=1e-9)
    assert v.shape == (1, 5, config.num_kv_heads, config.head_dim)


def test_pairs_stay_neighbours_and_large_come_first():
    size = torch.rand(3, 16) + 0.01
    order = channel_order(size)
    partner, pair, sign = rotary(order)
    assert torch.equal(partner, (torch.arange(16) ^ 1).expand(3, 16))
    assert torch.equal(pair[:, ::2], pair[:, 1::2])
    assert torch.equal(sign, torch.tensor([-1.0, 1.0]).repeat(8).expand(3, 16))
    joint = torch.hypot(*size.chunk(2, -1)).gather(-1, pair[:, ::2])
    assert (joint.diff(dim=-1) <= 1e-6).all()
    assert all(sorted(row) == list(range(16)) for row in order.tolist())
    free = channel_order(size, "free")
    assert (size.gather(-1, free).diff(dim=-1) <= 0).all()
    partner, pair, sign = rotary(free)
    there = free.gather(-1, partner)
    assert torch.equal((free - there).abs(), torch.full((3, 16), 8))


def test_outliers_lose_less_when_sorted(config, make):
    """Half of the loss goes, unless a block is a whole head: then the codes are the same."""
    source = torch.Generator().manual_seed(0)
    size = torch.exp(torch.randn(2, 64, generator=source)).repeat(1, 2)
    q = torch.randn(64, 4, 128, generator=source) / size.repeat_interleave(2, 0)
    k = torch.randn(128, 2, 128, generator=source) * size
    order = channel_order(size)
    low, high = kv_format("bfp12-b32"), kv_format("bfp16-b32")
    plain, few = score_error(high, q, k), score_error(low, q, k)
    assert (few - score_error(low, q, k, order)) / (few - plain) > 0.5
    whole = kv_format("bfp12-b128")
    assert score_error(whole, q, k) == pytest.approx(score_error(whole, q, k, order), rel=1e-5)
    after = whole.decode(*whole.encode(k.gather(-1, order.expand_as(k))))
    assert torch.equal(whole.decode(*whole.encode(k)).gather(-1, order.expand_as(k)), after)


def test_sizes_by_weight_are_those_of_keys(config, make):
    """Of normed inputs of unit variance, with biases, gains and norms of keys."""
    model = make(config)
    with captured(model) as seen, torch.no_grad():
        model(tokens(config, length=128, rows=8))
    for (_, k), size in zip(seen, channel_sizes(model), strict=True):
        pair = [torch.hypot(*x.chunk(2, -1)) for x in (k.square().mean(0).sqrt(), size)]
        assert torch.corrcoef(torch.stack([x.flatten() for x in pair]).log())[0, 1] > 0.5


def test_report(config, make):
    model = make(config)
    result = kv_report(model, blocks=(8, 16, 32))
    assert result.keys == "normal numbers"
    rows = {(row.format, row.order): row for row in result.rows}
    assert rows["plain", "none"].shrinks == 1
    assert rows["plain", "none"].mean_error == 0
    low, high = rows["bfp12-b8", "none"], rows["bfp16-b8", "none"]
    assert low.mean_error > 4 * high.mean_error
    assert high.token_bytes / low.token_bytes == pytest.approx(9 / 5)
    assert ("whole head" in result.note) == (config.head_dim in (16, 32))
    text = kv_report(model, tokens_BT=tokens(config, 64), by="calibration", blocks=(8,))
    assert text.keys == "64 tokens of text"
    assert "<svg" in text.picture([0])
    with torch.no_grad(), coded(model, kv_format("int8"), kv_format("int8")):
        ids = tokens(config)
        near = model(ids)
    with torch.no_grad():
        assert 0 < (near - model(ids)).norm() / near.norm() < 0.1


def test_served_from_pages_of_block_floats(config, make):
    """Sorted keys through a paged cache and its attention: the logits of the plain model."""
    from shoal.serve.cache.attention import PagedAttention, RequestContext
    from shoal.serve.cache.paged import PagedCache

    model, ids = make(config), tokens(config)
    form = kv_format("bfp16-b16")
    with torch.no_grad():
        wanted = model.hidden(ids)[0]
        ksort(model)
        cache = PagedCache(config, 8, 8, form=form)
        call = Call(1, 40, config.num_heads, config.num_kv_heads, config.head_dim, 8, "fp32",
                    str(form))  # fmt: skip
        kernel = dispatch(call).prepare(call)
        place = torch.arange(40)
        for part in place.split([25, 1, 14]):
            context = RequestContext(int(part[0]), len(part), [5, 2, 7, 1, 0])
            slots = torch.tensor(context.blocks)[part // 8] * 8 + part % 8
            mixer = PagedAttention(cache, [context], slots, torch.float32, kernel, exact=True)
            result = model.flat(ids[0, part], part, mixer)
            # As much as 8 bits of keys, values and queries cost.
            assert (result - wanted[part]).norm() < 0.05 * wanted[part].norm()


def test_bad_input_is_named(config, make, tmp_path):
    model = ksort(make(config))
    with pytest.raises(ModelError, match="sort it when it is loaded"):
        huggingface.write(tmp_path / "out", model)
    with pytest.raises(ModelError, match="layer 0 are sorted already"):
        ksort(model)
    with pytest.raises(ModelError, match="no text; give tokens, or sort by weight"):
        ksort(make(config), by="calibration")
    with pytest.raises((KernelError, ConfigError), match=r"ksort\.mode"):
        ksort(make(config), mode="thirds")
    packed = make(config)
    packed.blocks[1].attention.qkv_proj = torch.nn.Identity()
    with pytest.raises(ModelError, match=r"layer 1: projection.*before weights are packed"):
        ksort(packed)
    with pytest.raises(ConfigError, match="a divisor of heads"):
        kv_report(make(config), blocks=(7,))
    with pytest.raises(KernelError, match="even number"):
        channel_order(torch.ones(1, 3))
    with pytest.raises(KernelError, match="finite and not negative"):
        channel_order(torch.tensor([[1.0, -1.0]]))
