"""Operators of training: results and gradients equal the reference, whatever shape and stride."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DTYPES, TOLERANCE, close, made, rows, sizes, ways

from shoal.core.errors import KernelError
from shoal.kernel.calls import PointwiseCall
from shoal.kernel.dispatch import kernels_of

BACKENDS = ("torch", "cpp")


def prepared(op, backend, dtype, *constants, width=8):
    call = PointwiseCall(op, 4, 2 * width, width, dtype, gradient=True)
    kernel = kernels_of(op)[backend]
    reason = kernel.refuses(call)
    if reason:
        pytest.skip(reason)
    return kernel.prepare(call, *constants)


def passed(run, inputs, grads):
    """Results, and gradients of the inputs that want one."""
    leaves = [x if x is None or not wants else x.detach().requires_grad_() for x, wants in inputs]
    result = run(*leaves)
    result = result if isinstance(result, tuple) else (result,)
    wanted = [leaf for leaf, (_, wants) in zip(leaves, inputs, strict=True) if wants]
    wanted = [leaf for leaf in wanted if leaf is not None]
    return result, torch.autograd.grad(result, wanted, grads)


# Of rounding in several operators, each of which writes its result in bf16.
# The interpreter of Triton cuts off what does not fit into bf16.
ROUNDINGS = {"torch": 4, "cpp": 1, "triton": 2}
EPS = 1e-5


def terms(x, weight, grad):
    """How large the terms are whose difference is the gradient of a norm's input."""
    scale = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS).max()
    return float(scale * grad.double().abs().max() * weight.double().abs().max())


def compare(op, backend, dtype, constants, inputs, grads, least=0.0):
    """A backend in its type against the reference in fp64; ``least`` is a size of gradients."""
    run = prepared(op, backend, dtype, *constants)
    exact = prepared(op, "reference", "fp64", *constants)
    wide = [(None if x is None else x.double(), wants) for x, wants in inputs]
    result, found_grads = passed(run, inputs, grads)
    wanted, wanted_grads = passed(exact, wide, [g.double() for g in grads])
    leaves = [x for x, wants in inputs if wants and x is not None]
    for mine, right in zip(result, wanted, strict=True):
        assert mine.dtype == DTYPES[dtype]
        close(mine, right.to(mine.dtype), ROUNDINGS[backend] * TOLERANCE[dtype])
    for mine, right, leaf in zip(found_grads, wanted_grads, leaves, strict=True):
        assert mine.dtype == leaf.dtype and mine.shape == leaf.shape
        size = max(least, float(right.abs().max()))
        error = float((mine.double() - right).abs().max())
        assert error <= 2 * ROUNDINGS[backend] * TOLERANCE[dtype] * size


def check_rms_norm(backend, dtype, m, n, way):
    x, weight = made((m, n), DTYPES[dtype], way, 2), made((n,), torch.float32, seed=1)
    grad = made((m, n), DTYPES[dtype], way, 3)
    inputs = [(x, True), (weight, True)]
    compare("rms_norm", backend, dtype, (EPS,), inputs, [grad], terms(x, weight, grad))


def check_swiglu(backend, dtype, m, f, way):
    x, grad = 3 * made((m, 2 * f), DTYPES[dtype], way, 2), made((m, f), DTYPES[dtype], way, 3)
    compare("swiglu", backend, dtype, (), [(x, True)], [grad])


def check_rope(backend, dtype, batch, length, heads, kv_heads, half, normed, way, heads_first):
    type_, dim = DTYPES[dtype], 2 * half
    qkv = made((batch, length, heads + 2 * kv_heads, dim), type_, way, 2)
    angle = torch.rand(length, half, generator=torch.Generator().manual_seed(7)) * 6
    norms = [made((dim,), torch.float32, seed=s) if normed else None for s in (3, 4)]
    grads = [made((batch, length, n, dim), type_, way, n) for n in (heads, kv_heads, kv_heads)]
    if heads_first:
        grads = [g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads]
    inputs = [(qkv, True), (angle.cos(), False), (angle.sin(), False), *((n, True) for n in norms)]
    least = 0.0
    if normed:
        turned = zip(norms, grads[:2], strict=True)
        least = max(terms(qkv[:, :, :-kv_heads], n, 2 * g) for n, g in turned)
    compare("rope", backend, dtype, (heads, kv_heads, EPS), inputs, grads, least)


HEADS = {
    "batch": st.integers(1, 3),
    "length": st.sampled_from([1, 5, 40]),
    "heads": st.integers(1, 4),
    "kv_heads": st.integers(1, 2),
    "half": st.sampled_from([1, 5, 16, 24]),
    "normed": st.booleans(),
    "way": ways,
    "heads_first": st.booleans(),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(m=st.one_of(rows, st.just(70)), n=sizes, way=ways)
def test_rms_norm(backend, dtype, m, n, way):
    check_rms_norm(backend, dtype, m, n, way)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(m=rows, f=sizes, way=ways)
def test_swiglu(backend, dtype, m, f, way):
    check_swiglu(backend, dtype, m, f, way)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=20, deadline=None)
@given(st.fixed_dictionaries(HEADS))
def test_rope(backend, dtype, drawn):
    check_rope(backend, dtype, **drawn)


def test_the_twin_on_a_gpu():
    """Interpreted; more shapes, types and several blocks of rows below."""
    check_rms_norm("triton", "bf16", 3, 40, "strided")
    check_swiglu("triton", "bf16", 3, 33, "plain")
    check_rope("triton", "fp32", 1, 3, 1, 1, 5, True, "plain", True)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(st.sampled_from(["fp32", "bf16"]), rows, sizes, ways, st.fixed_dictionaries(HEADS))
def test_the_twin_on_a_gpu_in_any_shape(dtype, m, n, way, drawn):
    check_rms_norm("triton", dtype, m, n, way)
    check_swiglu("triton", dtype, m, n, way)
    check_rope("triton", dtype, **drawn)


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_threads(dtype):
    type_ = DTYPES[dtype]
    x, weight, grad = made((300, 96), type_), made((96,), torch.float32), made((300, 96), type_)
    qkv, table = made((2, 150, 6, 32), type_), torch.rand(150, 16)
    grads = [made((2, 150, n, 32), type_, seed=n) for n in (2, 2, 2)]
    norm, rope = prepared("rms_norm", "cpp", dtype, 1e-5), prepared("rope", "cpp", dtype, 2, 2, 0.1)
    gate = prepared("swiglu", "cpp", dtype)
    heads = [(qkv, True), (table, False), (table, False), *2 * [(torch.ones(32), True)]]
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(
                [
                    passed(norm, [(x, True), (weight, True)], [grad])[1],
                    passed(gate, [(x, True)], [grad[:, :48]])[1],
                    passed(rope, heads, grads)[1],
                ]
            )
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert all(map(torch.equal, mine, theirs))


def test_a_share_of_the_rows_has_the_same_bits():
    """What a replica of a data-parallel run computes of its rows."""
    x, weight, grad = made((64, 40), torch.float32), torch.ones(40), made((64, 40), torch.float32)
    run = prepared("rms_norm", "cpp", "fp32", 1e-5)
    (whole,), (whole_x, _) = passed(run, [(x, True), (weight, True)], [grad])
    (part,), (part_x, _) = passed(run, [(x[7:20], True), (weight, True)], [grad[7:20]])
    assert torch.equal(part, whole[7:20]) and torch.equal(part_x, whole_x[7:20])


def test_a_type_that_it_does_not_take_is_named():
    run = prepared("swiglu", "cpp", "fp32")
    with pytest.raises(KernelError, match=r"float64.*fp32 and bf16.*torch"):
        run(torch.ones(1, 4, dtype=torch.float64))


def test_no_kernel_of_training_serves():
    call = PointwiseCall("swiglu", 1, 8, 4, "fp32")
    with pytest.raises(KernelError, match="for training alone"):
        kernels_of("swiglu")["torch"].prepare(call)
