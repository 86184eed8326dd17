"""Attention without a softmax beside operators of torch."""

from __future__ import annotations

import pytest
import torch

from shoal.kernel.fused.cpp_training import runs_here
from shoal.kernel.fused.pointwise import TIMES, pointwise, pointwise_reference

needs_vectors = pytest.mark.skipif(not runs_here(), reason="no compiler, or no AVX-512")


def given(batch, length, heads, dim, timed, dtype=torch.float32):
    torch.manual_seed(length)
    whole = torch.randn(batch, length, 3 * heads * dim, dtype=dtype, requires_grad=True)
    position = (torch.randn(length + 2, dtype=dtype)).requires_grad_()
    time = torch.randn(TIMES, dtype=dtype, requires_grad=True) if timed else None
    buckets = torch.randint(0, TIMES, (batch, length, length), dtype=torch.uint8) if timed else None
    return whole, position, buckets, time


def parts(whole, heads):
    return (one.view(*whole.shape[:2], heads, -1) for one in whole.chunk(3, dim=-1))


@needs_vectors
@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize(
    ("length", "dim"), [(1, 1), (5, 7), (32, 16), (33, 25), (63, 25), (130, 40)]
)
def test_results_and_gradients_are_those_of_torch(length, dim, timed):
    whole, position, buckets, time = given(3, length, 2, dim, timed)
    leaves = [one for one in (whole, position, time) if one is not None]
    found = []
    for threads, way in ((1, pointwise), (2, pointwise), (1, pointwise_reference)):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        out = way(*parts(whole, 2), position, 1 / 50, buckets, time)
        weight = torch.cos(torch.arange(out.numel()).view(out.shape).float())
        found.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
        torch.set_num_threads(before)
    for one, two, right in zip(*found, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-5)


@needs_vectors
def test_weights_far_from_zero_are_finite():
    q = torch.full((1, 4, 1, 4), 30.0)
    for sign in (1, -1):
        out = pointwise(sign * q, q, q, torch.zeros(4), 1.0)
        torch.testing.assert_close(
            out, pointwise_reference(sign * q, q, q, torch.zeros(4), 1.0), rtol=1e-5, atol=1e-30
        )


def test_gradients_by_differences():
    whole, position, buckets, time = given(2, 5, 2, 3, True, torch.float64)

    def run(whole, position, time):
        return pointwise(*parts(whole, 2), position, 0.2, buckets, time)

    assert torch.autograd.gradcheck(run, (whole, position, time))
