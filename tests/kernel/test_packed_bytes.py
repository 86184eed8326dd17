"""Products with 8-bit weights in panels: what the codes mean, and the same bits in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shoal.core.errors import KernelError
from shoal.core.native import compiler, cpu_flags
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.formats import weight_format
from shoal.kernel.lowbit.packed import PackedBytes
from shoal.kernel.lowbit.reference import ReferenceLowbitLinear

pytestmark = pytest.mark.skipif(
    compiler() is None or not cpu_flags() >= PackedBytes.needs, reason="no compiler or no VBMI"
)

FORMAT = weight_format("int8-channel")


def call_of(m: int, n: int, k: int) -> LowbitLinearCall:
    return LowbitLinearCall(m, n, k, "int8-channel", FORMAT.bits)


@settings(deadline=None, max_examples=40)
@given(
    m=st.integers(1, 30),
    n=st.integers(1, 150),
    k=st.integers(1, 130),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
@example(m=110, n=33, k=4200, bias=True, seed=0)  # a panel that is cut, in two groups of rows
def test_products_are_those_of_the_codes(m: int, n: int, k: int, bias: bool, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=random)
    weight[0] = 0.0
    packed = FORMAT.quantize(weight)
    given_bias = torch.randn(n, generator=random) if bias else None
    x = torch.randn(m, k, generator=random).bfloat16()
    result = PackedBytes().prepare(call_of(m, n, k), packed, given_bias)(x)
    wanted = ReferenceLowbitLinear().prepare(call_of(m, n, k), packed, given_bias)(x)
    assert result.dtype == torch.bfloat16
    assert result.shape == (m, n)
    torch.testing.assert_close(result, wanted, rtol=1e-2, atol=2e-4 * k**0.5)


def test_every_code_is_exact() -> None:
    # One input at a time: code - 128, times a power of two, leaves nothing to round.
    k, n = 32, 256
    packed = FORMAT.pack(
        torch.arange(n, dtype=torch.uint8).view(n, 1).expand(n, k).contiguous(),
        {"scales": torch.full((n, 1), 0.5, dtype=torch.float16)},
    )
    x = torch.eye(k)[:4].bfloat16()
    result = PackedBytes().prepare(call_of(4, n, k), packed)(x)
    assert torch.equal(result.float(), (torch.arange(n) - 128.0).mul(0.5).expand(4, n))


def test_a_row_has_the_same_bits_in_any_company() -> None:
    random = torch.Generator().manual_seed(3)
    n, k = 300, 4224
    run = PackedBytes().prepare(call_of(1, n, k), FORMAT.quantize(torch.randn(n, k)))
    x = torch.randn(110, k, generator=random).bfloat16()
    every, threads = run(x), torch.get_num_threads()
    for m in (1, 2, 3, 4, 12, 13, 97):
        assert torch.equal(run(x[:m]), every[:m]), m
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(run(x), every)
    finally:
        torch.set_num_threads(threads)


def test_what_it_does_not_read_is_refused() -> None:
    for text in ("int8-g128", "int4-channel", "uint8-channel"):
        call = LowbitLinearCall(1, 64, 128, text, 8.0)
        assert PackedBytes().refuses(call) == "reads int8-channel only"
    run = PackedBytes().prepare(call_of(1, 64, 128), FORMAT.quantize(torch.randn(64, 128)))
    with pytest.raises(KernelError, match=r"expected torch.bfloat16 \[..., 128\]"):
        run(torch.randn(1, 128))
