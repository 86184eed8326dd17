"""The fused loss against PyTorch's, in fp64, fp32 and bf16."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from shoal.model import loss as module  # noqa: E402
from shoal.model.loss import token_loss_sum  # noqa: E402


def data(dtype, scale=1.0, count=23):
    source = torch.Generator().manual_seed(0)
    hidden = (scale * torch.randn(count, 8, generator=source)).to(dtype).requires_grad_()
    weight = torch.randn(11, 8, generator=source).to(dtype).requires_grad_()
    targets = torch.randint(0, 11, (count,), generator=source)
    targets[::5] = -100
    return hidden, weight, targets


def plain(hidden, weight, targets):
    return F.cross_entropy((hidden @ weight.T), targets, reduction="sum")


@pytest.fixture(params=[(2**24, 2**18), (11 * 7, 11 * 3)], ids=["whole", "chunks"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_ELEMENTS", request.param[0])
    monkeypatch.setattr(module, "_EXACT_ELEMENTS", request.param[1])


@pytest.mark.parametrize("scale", [1.0, 300.0], ids=["near", "hopeless"])
def test_equals_pytorch_in_fp64(chunks, scale):
    hidden, weight, targets = data(torch.float64, scale)
    expected = plain(hidden, weight, targets)
    result = token_loss_sum(hidden, weight, targets)
    assert result.item() == pytest.approx(expected.item(), rel=1e-13)
    for a, b in zip(
        torch.autograd.grad(result * 0.7, (hidden, weight)),
        torch.autograd.grad(expected * 0.7, (hidden, weight)),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)
    with torch.no_grad():
        assert token_loss_sum(hidden, weight, targets).item() == pytest.approx(
            expected.item(), rel=1e-13
        )


def test_gradcheck(chunks):
    hidden, weight, targets = data(torch.float64, count=6)
    assert torch.autograd.gradcheck(lambda h, w: token_loss_sum(h, w, targets), (hidden, weight))


def test_wide_weight_keeps_its_dtype(chunks):
    hidden, weight, targets = data(torch.float32)
    expected = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    narrow = hidden.detach().bfloat16().requires_grad_()
    loss = token_loss_sum(narrow, weight, targets)
    assert loss.dtype == torch.float32
    result = torch.autograd.grad(loss, (narrow, weight))
    assert [g.dtype for g in result] == [torch.bfloat16, torch.float32]
    for a, b in zip(result, expected, strict=True):
        assert ((a - b).norm() / b.norm()).item() < 0.01


def test_nothing_counts():
    hidden, weight, targets = data(torch.float64)
    loss = token_loss_sum(hidden, weight, torch.full_like(targets, -100))
    assert loss.item() == 0
    assert all(not g.any() for g in torch.autograd.grad(loss, (hidden, weight)))


def test_a_second_backward_pass_gives_the_same_gradients(chunks):
    hidden, weight, targets = data(torch.float64)
    loss = token_loss_sum(hidden, weight, targets) * 0.3
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(loss, (hidden, weight))
    for a, b, c in zip(first, second, kept, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("learned", [True, False])
def test_tokens_with_weights(chunks, learned):
    hidden, weight, targets = data(torch.float64)
    weights = torch.rand(23, generator=torch.Generator().manual_seed(1))
    each = F.cross_entropy(hidden @ weight.T, targets, reduction="none")
    expected = (each * weights).sum()
    with torch.set_grad_enabled(learned):
        result = token_loss_sum(hidden, weight, targets, weights)
    assert result.item() == pytest.approx(expected.item(), rel=1e-12)
    if learned:
        for a, b in zip(
            torch.autograd.grad(result, (hidden, weight)),
            torch.autograd.grad(expected, (hidden, weight)),
            strict=True,
        ):
            assert (a - b).abs().max() < 1e-12


@pytest.mark.gpu
def test_an_accelerator_holds_few_logits():
    hidden, _, targets = data(torch.float32, count=4096)
    wide = torch.randn(50_000, 8).requires_grad_()
    expected = torch.autograd.grad(token_loss_sum(hidden, wide, targets), (hidden, wide))
    there = [x.detach().cuda().requires_grad_(x.requires_grad) for x in (hidden, wide)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = torch.autograd.grad(token_loss_sum(*there, targets.cuda()), there)
    whole = 4 * len(targets) * len(wide)
    assert torch.cuda.max_memory_allocated() - before < 0.5 * whole
    for a, b in zip(found, expected, strict=True):
        assert torch.allclose(a.cpu(), b, rtol=1e-3, atol=1e-4)
