"""Rows by expert and back: equal to indexing and adding, values and gradients."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from shoal.model.permutation import RoutingPermutation  # noqa: E402


def scattered(x_ND, weight_NK, expert_NK, keep_NK):
    """The same with scattered sums, choice by choice."""
    out_ND = torch.zeros_like(x_ND)
    rows = []
    for expert in range(8):
        for token, choice in ((expert_NK == expert) & keep_NK).nonzero().tolist():
            row_D = x_ND[token] * (expert + 1)
            rows.append(row_D)
            out_ND = out_ND.index_add(
                0, torch.tensor([token]), (row_D * weight_NK[token, choice])[None]
            )
    return rows, out_ND


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 9),
    choices=st.integers(1, 3),
    kept=st.sampled_from([None, 0.0, 0.4, 1.0]),
    seed=st.integers(0, 999),
)
def test_equal_scattered_sums(tokens, choices, kept, seed):
    torch.manual_seed(seed)
    x_ND = torch.randn(tokens, 5, dtype=torch.float64, requires_grad=True)
    weight_NK = torch.rand(tokens, choices, dtype=torch.float64, requires_grad=True)
    expert_NK = torch.stack([torch.randperm(8)[:choices] for _ in range(tokens)])
    keep_NK = None if kept is None else torch.rand(tokens, choices) < kept
    every = torch.ones(tokens, choices, dtype=torch.bool)
    wanted_rows, wanted = scattered(x_ND, weight_NK, expert_NK, every if kept is None else keep_NK)
    at = RoutingPermutation(expert_NK, 8, keep_NK)
    assert int(at.counts_E.sum()) == len(wanted_rows)
    scale_M = torch.arange(1, 9).repeat_interleave(at.counts_E)[:, None]
    rows_MD = at.permute(x_ND) * scale_M
    result = at.unpermute(rows_MD, weight_NK)
    if wanted_rows:
        assert torch.equal(rows_MD, torch.stack(wanted_rows))
    torch.testing.assert_close(result, wanted, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        again = RoutingPermutation(expert_NK, 8, keep_NK)
        assert torch.equal(again.unpermute(again.permute(x_ND) * scale_M, weight_NK), result)
    grad_ND = torch.randn_like(x_ND)
    mine = torch.autograd.grad(result, (x_ND, weight_NK), grad_ND)
    if not wanted_rows:
        assert not any(bool(one.any()) for one in mine)
        return
    for one, other in zip(
        mine, torch.autograd.grad(wanted, (x_ND, weight_NK), grad_ND), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_sums_of_small_floats_are_of_large_ones():
    """A token's sum is rounded once, however many choices it has."""
    tokens, choices = 64, 8
    torch.manual_seed(0)
    expert_NK = torch.stack([torch.randperm(16)[:choices] for _ in range(tokens)])
    at = RoutingPermutation(expert_NK, 16)
    rows_MD = torch.randn(tokens * choices, 32).bfloat16()
    weight_NK = torch.rand(tokens, choices).bfloat16().float()
    result = at.unpermute(rows_MD, weight_NK)
    assert result.dtype == torch.bfloat16
    exact = at.unpermute(rows_MD.double(), weight_NK)
    # One bit of eight, of the sum and of what cancels in it.
    size = at.unpermute(rows_MD.double().abs(), weight_NK)
    assert bool(((result.double() - exact).abs() <= exact.abs() / 256 + size * 1e-6).all())


def test_gradients_stop_where_none_is_needed():
    expert_NK = torch.tensor([[0, 1], [1, 2]])
    x_ND, weight_NK = torch.ones(2, 3), torch.ones(2, 2, requires_grad=True)
    at = RoutingPermutation(expert_NK, 3)
    assert not at.permute(x_ND).requires_grad
    at.unpermute(at.permute(x_ND), weight_NK).sum().backward()
    assert weight_NK.grad.tolist() == [[3.0, 3.0], [3.0, 3.0]]
    fixed = at.unpermute(at.permute(x_ND.requires_grad_()), weight_NK.detach())
    fixed.sum().backward()
    assert x_ND.grad.tolist() == [[2.0] * 3] * 2
