"""The transformer against plain formulas: cache, documents, reduced precision, gradients."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from shoal.core.errors import ModelError  # noqa: E402
from shoal.model.attention import KVCache, attend, document_mask  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.norm import rms_norm  # noqa: E402
from shoal.model.rope import rotate, rotate_split  # noqa: E402


def tokens(config, length=40, rows=2, seed=1):
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, config.vocab_size, (rows, length), generator=source)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def test_cache_equals_full_pass(config, make):
    model, ids = make(config), tokens(config)
    cache = KVCache(config, 2, 40)
    with torch.no_grad():
        full = model(ids)
        pieces = [model(part, cache=cache) for part in ids.split([16, 1, 1, 7, 15], 1)]
    assert cache.length == 40
    assert (torch.cat(pieces, 1) - full).abs().max() < 2e-5
    with pytest.raises(ValueError, match="41 tokens in a cache for 40"):
        cache.append(0, full.new_zeros(2, 1, 2, config.head_dim), full)


def test_documents_equal_separate_passes(config, make):
    model, ids = make(config), tokens(config, rows=1)
    lengths = [11, 1, 28]
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    with torch.no_grad():
        packed = model(ids, documents_BT=documents)
        separate = torch.cat([model(part) for part in ids.split(lengths, 1)], 1)
    assert (packed - separate).abs().max() < 5e-5


@pytest.mark.parametrize("documents", [False, True])
def test_loss_and_recompute_equal_plain(config, make, documents):
    model, ids = make(config, dtype=torch.float64), tokens(config)
    targets = ids.roll(-1, 1).clone()
    targets[0, 5:9] = -100
    places = (torch.arange(40) // 13).expand(2, 40) if documents else None

    def gradients(loss):
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    plain, expected = gradients(
        F.cross_entropy(
            model(ids, documents_BT=places).flatten(0, 1), targets.flatten(), reduction="sum"
        )
    )
    for recompute in (False, True):
        loss, result = gradients(
            model.loss_sum(ids, targets, documents_BT=places, recompute=recompute)
        )
        assert loss.item() == pytest.approx(plain.item(), rel=1e-12)
        for a, b in zip(result, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        assert model.loss_sum(ids, targets, documents_BT=places).item() == pytest.approx(
            plain.item(), rel=1e-12
        )


@pytest.mark.parametrize("way", ["autocast", "cast"])
def test_bf16_is_near_fp32(config, make, way):
    model, ids = make(config.model_copy(update={"initializer_range": 0.05})), tokens(config)
    targets = ids.roll(-1, 1)
    exact = model.loss_sum(ids, targets)
    exact.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if way == "cast":
        model = model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        assert model.hidden(ids).dtype == torch.bfloat16
        loss = model.loss_sum(ids, targets)
    assert loss.dtype == torch.float32
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)
    # A token near the border between two experts may change sides.
    worst = 0.4 if config.num_experts else 0.06
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == parameter.dtype
        assert relative(parameter.grad, expected[name]) < worst, name


def test_experts_equal_a_loop_over_tokens():
    from shoal.model.feedforward import Experts

    config = ModelConfig(
        vocab_size=8,
        hidden=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        ffn_hidden=24,
        family="mixtral",
        num_experts=5,
        top_k=3,
    )
    layer = Experts(config).double()
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(generator=source)
        x = torch.randn(2, 6, 16, dtype=torch.float64, generator=source)
        result = layer(x)
        for row, out in zip(x.flatten(0, 1), result.flatten(0, 1), strict=True):
            p = torch.softmax(layer.router(row).float(), -1)
            weight, chosen = p.topk(3)
            total = torch.zeros(16, dtype=torch.float64)
            for w, e in zip(weight / weight.sum(), chosen, strict=True):
                gate, up = (layer.gate_up_proj[e] @ row).chunk(2)
                total += w * (layer.down_proj[e] @ (F.silu(gate) * up))
            assert torch.allclose(out, total, rtol=1e-5, atol=1e-5)
        assert torch.equal(layer(x), result)


def test_rms_norm_and_its_gradient():
    source = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=source, requires_grad=True)
    w = torch.randn(8, dtype=torch.float64, generator=source, requires_grad=True)
    assert torch.allclose(rms_norm(x, w, 1e-5), F.rms_norm(x, (8,), w, 1e-5))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, w))
    # Not contiguous, as heads of a fused projection are.
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x[:, 1:3], w, 1e-5), (x, w))


def test_rotation_and_its_gradient():
    source = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, 3, 5, 4, dtype=torch.float64, generator=source, requires_grad=True)
    angle = torch.randn(3, 1, 2, dtype=torch.float64, generator=source)
    cos, sin = angle.cos(), angle.sin()
    q, k, v = rotate_split(qkv, cos, sin, 3, 1)
    assert torch.allclose(q, rotate(qkv[:, :, :3], cos, sin))
    assert torch.allclose(k, rotate(qkv[:, :, 3:4], cos, sin))
    assert torch.equal(v, qkv[:, :, 4:])
    assert torch.autograd.gradcheck(lambda x: rotate_split(x, cos, sin, 3, 1), (qkv,))


@pytest.mark.parametrize("masked", [False, True])
def test_attention_gradient_in_bf16(masked, monkeypatch):
    from shoal.model import attention

    source = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 20, 16, generator=source).bfloat16().requires_grad_()
    k, v = (torch.randn(3, 2, 20, 16, generator=source).bfloat16().requires_grad_() for _ in "kv")
    grad = torch.randn(3, 4, 20, 16, generator=source)
    places = torch.stack([torch.arange(20) // size for size in (7, 20, 3)])
    mask = document_mask(places, torch.bfloat16) if masked else None
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(
        *wide,
        attn_mask=None if mask is None else mask.double(),
        is_causal=not masked,
        enable_gqa=True,
    )
    expected = torch.autograd.grad(exact, wide, grad.double())
    # All sequences at a time and one by one; all queries at a time and in blocks.
    for limit, block in ((2**25, 128), (4 * 20 * 20, 128), (2**25, 7)):
        monkeypatch.setattr(attention, "_MAX_SCORES", limit)
        monkeypatch.setattr(attention, "_QUERY_BLOCK", block)
        out = attend(q, k, v, mask, causal=not masked)
        assert relative(out, exact) < 0.01
        result = torch.autograd.grad(out, (q, k, v), grad.bfloat16())
        for a, b in zip(result, expected, strict=True):
            assert relative(a, b) < 0.02


@pytest.mark.parametrize("block", [128, 7])
def test_attention_gradient_behind_a_prefix_in_bf16(monkeypatch, block):
    from shoal.model import attention

    source = torch.Generator().manual_seed(1)
    q = torch.randn(3, 4, 20, 16, generator=source).bfloat16().requires_grad_()
    k, v = (torch.randn(3, 2, 25, 16, generator=source).bfloat16().requires_grad_() for _ in "kv")
    grad = torch.randn(3, 4, 20, 16, generator=source)
    mask = torch.full((20, 25), float("-inf")).triu_(6)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(*wide, attn_mask=mask.double(), enable_gqa=True)
    expected = torch.autograd.grad(exact, wide, grad.double())
    monkeypatch.setattr(attention, "_QUERY_BLOCK", block)
    out = attend(q, k, v, mask.bfloat16(), causal=True)
    assert "_Attend" in type(out.grad_fn).__name__
    assert relative(out, exact) < 0.01
    result = torch.autograd.grad(out, (q, k, v), grad.bfloat16())
    for a, b in zip(result, expected, strict=True):
        assert relative(a, b) < 0.02


@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_all_to_all_is_differentiated(monkeypatch, masked):
    from shoal.model import attention

    source = torch.Generator().manual_seed(2)
    q = torch.randn(2, 4, 20, 16, generator=source).bfloat16().requires_grad_()
    k, v = (torch.randn(2, 2, 20, 16, generator=source).bfloat16().requires_grad_() for _ in "kv")
    grad = torch.randn(2, 4, 20, 16, generator=source)
    places = torch.stack([torch.arange(20) // size for size in (7, 3)])
    mask = document_mask(places, torch.bfloat16, causal=False) if masked else None
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    exact = F.scaled_dot_product_attention(
        *wide, attn_mask=None if mask is None else mask.double(), enable_gqa=True
    )
    expected = torch.autograd.grad(exact, wide, grad.double())
    for block in (128, 7):
        monkeypatch.setattr(attention, "_QUERY_BLOCK", block)
        out = attend(q, k, v, mask, causal=False)
        assert relative(out, exact) < 0.01
        result = torch.autograd.grad(out, (q, k, v), grad.bfloat16())
        for a, b in zip(result, expected, strict=True):
            assert relative(a, b) < 0.02


def test_every_token_of_a_masked_diffusion_model_sees_all_others(make):
    config = ModelConfig(
        family="mdlm", vocab_size=20, hidden=16, num_layers=1, num_heads=2, num_kv_heads=1,
        head_dim=8, ffn_hidden=24, max_position=32, mask_token_id=19, initializer_range=0.3,
    )  # fmt: skip
    model = make(config, dtype=torch.float64)
    ids = torch.randint(0, 19, (1, 9), generator=torch.Generator().manual_seed(1))
    first = model(ids)[0, 0]
    changed = ids.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 19
    assert not torch.equal(model(changed)[0, 0], first)
    documents = torch.tensor([[0] * 5 + [1] * 4])
    alone = model(ids[:, :5])[0]
    together = model(ids, documents_BT=documents)[0, :5]
    assert (alone - together).abs().max() < 1e-12
    with pytest.raises(ModelError, match="cache = 'of a model whose tokens see all others'"):
        model(ids, cache=KVCache(config, 1, 16, dtype=torch.float64))


def test_too_long_and_two_masks(config, make):
    model = make(config)
    with pytest.raises(ModelError, match=r"sequence length = 129: expected at most max_position"):
        model(tokens(config, 129))
    with pytest.raises(ModelError, match="documents and a cache"):
        model(tokens(config), documents_BT=tokens(config), cache=KVCache(config, 2, 40))
