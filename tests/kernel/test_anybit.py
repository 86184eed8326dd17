"""Products with weights of any type: equal to what the codes mean, in every shape."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import KernelError
from shoal.core.native import compiler, cpu_flags
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.formats import weight_format
from shoal.kernel.lowbit.anybit import Anybit, type_of
from shoal.kernel.lowbit.reference import ReferenceLowbitLinear

pytestmark = pytest.mark.skipif(
    compiler() is None or not cpu_flags() >= Anybit.needs, reason="no compiler or no AVX-512"
)


def call_of(m: int, n: int, k: int, text: str, dtype: str = "bf16") -> LowbitLinearCall:
    return LowbitLinearCall(m, n, k, text, weight_format(text).bits, dtype)  # type: ignore[arg-type]


def check(m: int, n: int, k: int, text: str, dtype: str, seed: int, strided: bool = False) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(n, k, generator=random)
    packed = weight_format(text).quantize(weight)
    call = call_of(m, n, k, text, dtype)
    bias = torch.randn(n, generator=random) if seed % 2 else None
    run = Anybit().prepare(call, packed, bias)
    reference = ReferenceLowbitLinear().prepare(call, packed, bias)
    x = torch.randn(m, 2 * k if strided else k, generator=random)
    x = (x[:, ::2] if strided else x).to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    result, wanted = run(x), reference(x)
    assert result.dtype == x.dtype
    assert result.shape == (m, n)
    scale = float(wanted.float().abs().max()) + 1e-6
    tolerance = 1e-2 if dtype == "bf16" else 1e-5
    assert float((result - wanted).abs().max()) / scale < tolerance


# Few types, so that few are compiled; every type is in a test that soaks.
@settings(deadline=None, max_examples=20)
@given(
    m=st.integers(1, 9),
    n=st.integers(1, 70),
    groups=st.integers(1, 3),
    text=st.sampled_from(["int3-g16", "uint5-g32", "int3-channel"]),
    seed=st.integers(0, 99),
    strided=st.booleans(),
)
def test_products_are_those_of_the_codes(
    m: int, n: int, groups: int, text: str, seed: int, strided: bool
) -> None:
    group = weight_format(text).group
    check(m, n, groups * group if group else 13 * groups, text, "bf16", seed, strided)


@pytest.mark.parametrize("text", ["float6_e3m2-g64"])
def test_fp32_rows_lose_nothing(text: str) -> None:
    check(5, 33, 128, text, "fp32", 1)


@pytest.mark.soak
@pytest.mark.parametrize(
    "text",
    [
        *(f"int{bits}-g128" for bits in range(1, 9)),
        *(f"uint{bits}-g64" for bits in range(1, 9)),
        *("float3_e1m1-g128", "float4_e2m1-g32", "float5_e3m1-g8", "float8_e4m3-channel"),
        *("float7_e2m4-g128", "float8_e5m2-g128"),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_format(text: str, dtype: str) -> None:
    check(3, 40, 256, text, dtype, 2)
    check(7, 65, 128, text, dtype, 3)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    k, text = 96, "int3-g16"
    packed = weight_format(text).quantize(torch.randn(48, k))
    run = Anybit().prepare(call_of(1, 48, k, text), packed)
    x = torch.randn(11, k).bfloat16()
    together = run(x)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for row in range(11):
            assert torch.equal(run(x[row : row + 1]), together[row : row + 1])
    finally:
        torch.set_num_threads(threads)
    assert run(x.view(1, 11, k)).shape == (1, 11, 48)


def test_weights_take_as_many_bytes_as_they_have_bits() -> None:
    text, n, k = "int3-channel", 64, 160
    packed = weight_format(text).quantize(torch.randn(n, k))
    tiles = Anybit().prepare(call_of(1, n, k, text), packed).constants[0]  # type: ignore[attr-defined]
    assert tiles.numel() == n * k * 3 // 8


@pytest.mark.parametrize(
    ("text", "k", "message"),
    [
        ("int4-g20", 40, "multiple of 8; nearest to 20 is 24"),
        ("int4-2:4", 128, "no type"),
        ("bipolar2-g128", 128, "no type"),
        ("int4-g128", 100, "nearest"),
        ("float2_e1m0-g8", 8, "no type"),
    ],
)
def test_refusals(text: str, k: int, message: str) -> None:
    call = LowbitLinearCall(1, 8, k, text, 4.0)
    reason = Anybit().refuses(call)
    assert reason is not None
    assert re.search(message, reason)


def test_bad_input() -> None:
    call = call_of(1, 8, 16, "int3-g16")
    packed = weight_format("int3-g16").quantize(torch.randn(8, 16))
    with pytest.raises(KernelError, match="expected"):
        Anybit().prepare(call_of(1, 9, 16, "int3-g16"), packed)
    with pytest.raises(KernelError, match="bias"):
        Anybit().prepare(call, packed, torch.full((8,), float("nan")))
    run = Anybit().prepare(call, packed)
    with pytest.raises(KernelError, match=r"expected .*bfloat16 .*16"):
        run(torch.zeros(1, 16))
    with pytest.raises(KernelError, match="16"):
        run(torch.zeros(1, 17, dtype=torch.bfloat16))
    packed.tensors["scales"][0] = float("inf")
    with pytest.raises(KernelError, match="scales"):
        Anybit().prepare(call, packed)
    assert type_of(weight_format("uint3-g8")) is not None
