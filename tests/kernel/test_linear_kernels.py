"""Products of a few rows with a matrix: equal to the reference, and the same in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import DTYPES, TOLERANCE, close, made, rows, sizes, ways

from shoal.core.errors import KernelError
from shoal.kernel.calls import LinearCall, PointwiseCall
from shoal.kernel.dispatch import kernels_of

KERNELS = kernels_of("linear")
PACKED = pytest.mark.parametrize("backend", ["packed", "amx"])


def usable(backend: str, dtype: str = "bf16") -> None:
    reason = KERNELS[backend].refuses(LinearCall(1, 8, 8, dtype))
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["cpp", "packed", "amx", "torch"])
@settings(max_examples=25, deadline=None)
@given(m=rows, n=sizes, k=sizes, way=ways)
def test_equals_the_reference(backend, dtype, m, n, k, way):
    usable(backend, dtype)
    call = LinearCall(m, n, k, dtype)
    weight, bias = made((n, k), DTYPES[dtype], way, 1), made((n,), DTYPES[dtype], "plain", 2)
    x = made((m, k), DTYPES[dtype], way, 3)
    for add in (None, bias):
        wanted = KERNELS["reference"].prepare(call, weight, add)(x)
        close(KERNELS[backend].prepare(call, weight, add)(x), wanted, TOLERANCE[dtype])


@PACKED
@settings(max_examples=25, deadline=None)
@given(m=rows, f=sizes, k=sizes, way=ways)
def test_gates_of_packed_weights_are_those_of_two_kernels(backend, m, f, k, way):
    usable(backend)
    weight, bias = made((2 * f, k), torch.bfloat16, way, 1), made((2 * f,), torch.bfloat16, way, 2)
    x = made((m, k), torch.bfloat16, way, 3)
    swiglu = kernels_of("swiglu")["cpp"].prepare(PointwiseCall("swiglu", m, 2 * f, f))
    call = LinearCall(m, 2 * f, k, gated=True)
    for add in (None, bias):
        plain = KERNELS[backend].prepare(LinearCall(m, 2 * f, k), weight, add)(x)
        gated = KERNELS[backend].prepare(call, weight, add)(x)
        assert torch.equal(gated, swiglu(plain))
        close(gated, KERNELS["reference"].prepare(call, weight, add)(x), TOLERANCE["bf16"])


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_others_do_not_gate(backend):
    usable(backend)
    assert "does not support gated" in KERNELS[backend].refuses(LinearCall(1, 8, 8, gated=True))


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("reference", "fp32"),
        ("reference", "bf16"),
        ("cpp", "fp32"),
        ("cpp", "bf16"),
        ("packed", "bf16"),
        ("amx", "bf16"),
    ],
)
def test_a_row_has_the_same_bits_in_any_company_and_with_any_threads(backend, dtype):
    usable(backend, dtype)
    n, k = 77, 515
    run = KERNELS[backend].prepare(LinearCall(1, n, k, dtype), made((n, k), DTYPES[dtype]))
    x = made((75, k), DTYPES[dtype], seed=5)
    whole = run(x)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for first, last in ((0, 1), (3, 10), (0, 6), (17, 23), (2, 34), (5, 70), (64, 75)):
                assert torch.equal(run(x[first:last]), whole[first:last])
    finally:
        torch.set_num_threads(threads)


@PACKED
@pytest.mark.parametrize(("n", "k"), [(32, 32), (33, 40), (96, 65), (7, 256)])
def test_what_was_packed_can_be_had_back(backend, n, k):
    usable(backend)
    weight = torch.randn(n, k).bfloat16()
    call = LinearCall(4, n, k)
    ready = KERNELS[backend].prepare(call, weight, torch.randn(n))
    assert torch.equal(KERNELS[backend].unpack(call, ready), weight)


@pytest.mark.parametrize(
    ("backend", "dtype"), [("cpp", "fp32"), ("packed", "bf16"), ("amx", "bf16")]
)
def test_leading_dimensions_are_kept(backend, dtype):
    usable(backend, dtype)
    run = KERNELS[backend].prepare(LinearCall(1, 5, 8, dtype), made((5, 8), DTYPES[dtype]))
    assert run(torch.ones(2, 3, 8, dtype=DTYPES[dtype])).shape == (2, 3, 5)


@PACKED
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 64, 64), (40, 700, 96), (96, 1050, 4160), (7, 64, 4160), (205, 70, 9280)]
)
def test_many_panels_equal_the_reference(backend, m, n, k):
    usable(backend)
    weight, x = made((n, k), torch.bfloat16, seed=1), made((m, k), torch.bfloat16, seed=2)
    call = LinearCall(m, n, k)
    wanted = KERNELS["reference"].prepare(call, weight)(x)
    close(KERNELS[backend].prepare(call, weight)(x), wanted, TOLERANCE["bf16"])


@PACKED
def test_what_lies_beside_the_rows_does_not_get_into_the_sums(backend):
    usable(backend)
    x = torch.full((4, 40), float("nan"), dtype=torch.bfloat16)
    x[1] = 1
    out = KERNELS[backend].prepare(LinearCall(4, 33, 40), torch.ones(33, 40, dtype=torch.bfloat16))(
        x
    )
    assert torch.equal(out[1], torch.full((33,), 40.0, dtype=torch.bfloat16))
    assert bool(out[[0, 2, 3]].isnan().all())


@pytest.mark.parametrize("backend", ["cpp"])
def test_constants_that_are_not_what_the_call_says(backend):
    usable(backend)
    call = LinearCall(1, 5, 8, "fp32")
    with pytest.raises(KernelError, match=r"weight.*\[5, 7\].*expected torch.float32 \[5, 8\]"):
        KERNELS[backend].prepare(call, torch.ones(5, 7))
    with pytest.raises(KernelError, match=r"weight.*bfloat16.*expected torch.float32"):
        KERNELS[backend].prepare(call, torch.ones(5, 8, dtype=torch.bfloat16))


def test_what_cannot_run_says_why(monkeypatch):
    from shoal.kernel import base

    call = LinearCall(1, 5, 8, "bf16")
    assert "takes fp32, bf16" in str(KERNELS["cpp"].refuses(LinearCall(1, 5, 8, "fp64")))
    assert "runs on cpu only" in str(KERNELS["cpp"].refuses(LinearCall(1, 5, 8, "bf16", "cuda")))
    monkeypatch.setattr(base, "cpu_flags", lambda: frozenset({"avx2"}))
    with pytest.raises(KernelError, match=r"avx512f.*choose another"):
        KERNELS["cpp"].prepare(call, torch.ones(5, 8, dtype=torch.bfloat16))
    monkeypatch.setattr(base, "cpu_flags", lambda: KERNELS["cpp"].needs)
    monkeypatch.setattr(base, "compiler", lambda: None)
    assert "needs a C++ compiler" in str(KERNELS["cpp"].refuses(call))
