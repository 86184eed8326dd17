"""Norm, rotation, activation and choice: equal to their references, whatever shape and stride."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, TOLERANCE, close, made, rows, sizes, ways

from shoal.core.errors import KernelError
from shoal.kernel.calls import PointwiseCall
from shoal.kernel.dispatch import kernels_of


def both(op, call):
    kernels = kernels_of(op)
    reason = kernels["cpp"].refuses(call)
    if reason:
        pytest.skip(reason)
    return kernels["reference"], kernels["cpp"]


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(m=rows, n=sizes, way=ways, adds=st.booleans())
def test_rms_norm(dtype, m, n, way, adds):
    call = PointwiseCall("rms_norm", m, n, n, dtype)
    weight = made((n,), DTYPES[dtype], seed=1)
    x, delta = (made((m, n), DTYPES[dtype], way, seed) for seed in (2, 3))
    outs = []
    for kernel in both("rms_norm", call):
        mine = x.clone() if way == "plain" else made((m, n), DTYPES[dtype], way, 2)
        outs.append((kernel.prepare(call, weight, 1e-5)(mine, delta if adds else None), mine))
    close(outs[1][0], outs[0][0], TOLERANCE[dtype])
    close(outs[1][1], outs[0][1], 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(m=rows, f=sizes, way=ways)
def test_swiglu(dtype, m, f, way):
    call = PointwiseCall("swiglu", m, 2 * f, f, dtype)
    x = 4 * made((m, 2 * f), DTYPES[dtype], way)
    wanted, result = (kernel.prepare(call)(x) for kernel in both("swiglu", call))
    close(result, wanted, TOLERANCE[dtype])


def test_swiglu_of_large_numbers_is_finite():
    call = PointwiseCall("swiglu", 1, 8, 4, "fp32")
    x = torch.tensor([[-1e4, 1e4, -88.0, 0.0, 1.0, 1.0, 1.0, 1.0]])
    wanted, result = (kernel.prepare(call)(x) for kernel in both("swiglu", call))
    assert torch.allclose(result, wanted, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20, deadline=None)
@given(
    m=rows,
    heads=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    half=st.sampled_from([1, 5, 16, 32, 40]),
    normed=st.booleans(),
)
def test_rope(dtype, m, heads, kv_heads, half, normed):
    every = (heads + 2 * kv_heads) * 2 * half
    call = PointwiseCall("rope", m, every, every, dtype)
    angle = torch.rand(50, half) * 6
    norms = [made((2 * half,), DTYPES[dtype], seed=seed) if normed else None for seed in (1, 2)]
    position = torch.randint(0, 50, (m,), generator=torch.Generator().manual_seed(m))
    x = made((m, every), DTYPES[dtype])
    constants = (angle.cos(), angle.sin(), *norms, heads, kv_heads, 1e-5)
    outs = [kernel.prepare(call, *constants)(x.clone(), position) for kernel in both("rope", call)]
    for result, wanted in zip(outs[1], outs[0], strict=True):
        close(result, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=25, deadline=None)
@given(
    v=st.integers(1, 700),
    seed=st.integers(0, 99),
    hot=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    top_k=st.sampled_from([0, 1, 7, 300, 5000]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-9]),
)
def test_sample(dtype, v, seed, hot, top_k, top_p):
    """The same token, but where a number falls on the border of two by the last digit."""
    call = PointwiseCall("sample", 4, v, 1, dtype)
    logits = 3 * made((4, v), DTYPES[dtype], seed=seed)
    uniform = torch.rand(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    settings_ = (
        torch.full((4,), hot, dtype=torch.float64),
        torch.full((4,), top_k),
        torch.full((4,), top_p, dtype=torch.float64),
        uniform,
    )
    wanted, result = (kernel.prepare(call)(logits, *settings_) for kernel in both("sample", call))
    assert torch.equal(result, wanted)


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    n = 4000
    call = PointwiseCall("sample", n, 4, 1, "fp32")
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ones = torch.ones(n, dtype=torch.float64)
    _, cpp = both("sample", call)
    tokens = cpp.prepare(call)(
        logits.expand(n, 4), ones, torch.zeros(n, dtype=torch.int64), ones, uniform
    )
    share = torch.bincount(tokens, minlength=4) / n
    assert torch.allclose(share, torch.softmax(logits[0], -1), atol=1e-3)


def test_wrong_constants_are_named():
    call = PointwiseCall("rms_norm", 1, 8, 8, "fp32")
    _, cpp = both("rms_norm", call)
    with pytest.raises(KernelError, match=r"weight.*\[7\].*\[8\]"):
        cpp.prepare(call, torch.ones(7), 1e-5)
