"""Attention and loss of training in C++: gradients next to those of fp64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.errors import KernelError
from shoal.kernel.fused.causal import causal, takes
from shoal.kernel.fused.cpp_training import loss_gradient, runs_here
from shoal.kernel.native.tiles import has_tiles

pytestmark = pytest.mark.skipif(not runs_here(), reason="no compiler, or no BF16 in AVX-512")


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm().clamp(min=1e-9))


# One block and less; blocks, panels and chunks that end in the middle; more keys than a chunk.
@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "length", "dim"),
    [(2, 4, 2, 7, 64), (1, 3, 1, 64, 32), (2, 2, 2, 97, 96), (1, 4, 2, 300, 64)],
)
def test_attention_and_its_gradients(
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    dim: int,
    tiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if tiles and not has_tiles():
        pytest.skip("no matrix tiles")
    monkeypatch.setattr("shoal.kernel.fused.causal.has_tiles", lambda: tiles)
    random = torch.Generator().manual_seed(length)
    # As projections give them: slices of one buffer, heads behind tokens.
    every = torch.randn(batch, length, heads + 2 * kv_heads, dim, generator=random).bfloat16()
    sides = [x.transpose(1, 2) for x in every.split([heads, kv_heads, kv_heads], 2)]
    grad = torch.randn(batch, heads, length, dim, generator=random).bfloat16()
    wide = [x.double().requires_grad_() for x in sides]
    exact = F.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(exact, wide, grad.double())
    threads = torch.get_num_threads()
    seen = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            own = [x.detach().requires_grad_() for x in sides]
            out = causal(*own)
            seen.append([out.detach(), *torch.autograd.grad(out, own, grad)])
    finally:
        torch.set_num_threads(threads)
    for result, target in zip(seen[0], [exact.detach(), *wanted], strict=True):
        assert result.shape == target.shape
        assert relative(result, target) < 0.004
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_what_attention_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.empty(1, 4, 8, 64).bfloat16(), torch.empty(1, 2, 8, 64).bfloat16()
    assert takes(q, k)
    assert not takes(q.float(), k.float())
    assert not takes(q[..., :48], k[..., :48])
    assert not takes(q[:, :, :4], k)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert not takes(q, k)  # a thread would have nothing to do


@pytest.mark.parametrize("weighted", [False, True])
def test_logits_become_the_gradient_of_their_loss(weighted: bool) -> None:
    random = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(40, 1003, generator=random)).bfloat16()
    targets = torch.randint(0, 1003, (40,), generator=random)
    targets[::7] = -100
    weights = torch.rand(40, generator=random) if weighted else None
    wide = logits.double().requires_grad_()
    exact = F.cross_entropy(wide, targets, reduction="none")
    if weights is not None:
        exact = exact * weights
    (wanted,) = torch.autograd.grad(exact.sum(), wide)
    losses = loss_gradient(logits, targets, weights)
    torch.testing.assert_close(losses.double(), exact.detach(), rtol=1e-5, atol=1e-5)
    assert relative(logits, wanted) < 0.004
    assert not logits[::7].any()


@pytest.mark.parametrize("wrong", [8, -1, -101])
def test_a_target_that_is_no_column_is_refused(wrong: int) -> None:
    logits, targets = torch.zeros(2, 8).bfloat16(), torch.tensor([1, wrong])
    with pytest.raises(KernelError, match=f"target {wrong}: expected 0 to 7, or -100"):
        loss_gradient(logits, targets, None)
    assert not logits.any()
