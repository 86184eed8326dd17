"""4-bit products: every engine equals its reference, row by row the same in any company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import KernelError
from shoal.kernel.calls import LowbitLinearCall
from shoal.kernel.dispatch import candidates, dispatch, kernels_of
from shoal.kernel.formats import weight_format
from shoal.kernel.lowbit import marlin_cpu
from shoal.kernel.lowbit.marlin import blocks, quantize_rows
from shoal.kernel.lowbit.marlin_cpu import W4A8, W4A16, segment_of
from shoal.kernel.native.tiles import has_tiles
from shoal.kernel.protocols import PackedMatrix

FORMATS = ("int4-g128", "int4-g32", "int4-g96", "int4-channel", "int4-2:4", "int4-g64-2:4")
ENGINES = ["lowbit", "lowbit_amx"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def call_of(
    packed: PackedMatrix, m: int = 1, dtype: str = "bf16", activations: str = ""
) -> LowbitLinearCall:
    bits = weight_format(packed.format).bits
    return LowbitLinearCall(m, *packed.shape, packed.format, bits, dtype, "cpu", activations)  # type: ignore[arg-type]


def packed_of(n: int, k: int, text: str, seed: int = 0) -> PackedMatrix:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return weight_format(text).quantize(weight)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    reason = W4A16().refuses(call_of(packed_of(32, 128, "int4-g128")))
    if reason is not None:
        pytest.skip(f"this CPU {reason}")
    if request.param == "lowbit_amx" and not has_tiles():
        pytest.skip("this CPU has no tiles")
    monkeypatch.setattr(marlin_cpu, "library", lambda: request.param)
    yield request.param


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Mean error, of the mean magnitude."""
    difference = (found.double() - wanted.double()).abs().mean()
    return float(difference / wanted.double().abs().mean().clamp(min=1e-30))


@st.composite
def cases(draw: st.DrawFn) -> tuple[PackedMatrix, torch.Tensor, torch.Tensor | None, str]:
    text = draw(st.sampled_from(FORMATS))
    group = weight_format(text).group
    step = group or 4
    k = step * draw(st.integers(1, max(1, 700 // step)))
    n, m = draw(st.integers(1, 100)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    packed = packed_of(n, k, text, seed=draw(st.integers(0, 99)))
    random = torch.Generator().manual_seed(m)
    # A view into a larger tensor: rows apart, and the first at an odd address.
    x = torch.randn(m, k + 5, generator=random).to(DTYPES[dtype])[:, 3 : k + 3]
    bias = torch.randn(n, generator=random) if draw(st.booleans()) else None
    return packed, x, bias, dtype


def check_w4a16(case: tuple[PackedMatrix, torch.Tensor, torch.Tensor | None, str]) -> None:
    packed, x, bias, dtype = case
    call = call_of(packed, len(x), dtype)
    wide = call_of(packed, len(x), "fp64")
    wanted = kernels_of("linear_lowbit")["reference"].prepare(wide, packed, bias)(x.double())
    result = W4A16().prepare(call, packed, bias)(x)
    assert result.dtype == x.dtype
    assert result.shape == wanted.shape
    close(result, wanted.to(x.dtype))


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Sums are right to fp32's rounding; bf16 results may fall to either neighbour."""
    if found.dtype == torch.float32:
        assert apart(found, wanted) < 3e-6
    else:
        size = float(wanted.float().abs().mean())
        torch.testing.assert_close(found, wanted, rtol=2**-7, atol=1e-3 * size)


@pytest.mark.parametrize("library", ENGINES)
def test_w4a16_equals_the_reference(library: str) -> None:
    if W4A16().refuses(call_of(packed_of(32, 128, "int4-g128"))) is not None:
        pytest.skip("this CPU cannot")
    if library == "lowbit_amx" and not has_tiles():
        pytest.skip("this CPU has no tiles")

    @settings(max_examples=15, deadline=None)
    @given(cases())
    def check(case: tuple[PackedMatrix, torch.Tensor, torch.Tensor | None, str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(marlin_cpu, "library", lambda: library)
            check_w4a16(case)
            check_w4a8(case)

    check()


def check_w4a8(case: tuple[PackedMatrix, torch.Tensor, torch.Tensor | None, str]) -> None:
    packed, x, bias, dtype = case
    call = call_of(packed, len(x), dtype, "int8")
    wanted = kernels_of("linear_lowbit")["integer"].prepare(call, packed, bias)(x)
    result = W4A8().prepare(call, packed, bias)(x)
    close(result, wanted)


@pytest.mark.parametrize("text", ["nf4-g64", "nf4-channel"])
@pytest.mark.parametrize("m", [1, 5, 33])
def test_nf4_is_looked_up_as_int4_is(engine: str, text: str, m: int) -> None:
    packed = packed_of(70, 192, text)
    x = torch.randn(m, 192, generator=torch.Generator().manual_seed(m)).bfloat16()
    result = W4A16().prepare(call_of(packed, m), packed)(x)
    wanted = x.double() @ weight_format(text).dequantize(packed).double().T
    assert apart(result, wanted) < 4e-3  # numbers and results are bf16
    assert "less precise" in (W4A16().refuses(call_of(packed, m, "fp32")) or "")
    assert "are not integers" in (W4A8().refuses(call_of(packed, m, activations="int8")) or "")


@pytest.mark.parametrize("text", ["int4-g128", "int4-g32", "int4-2:4", "int4-channel"])
@pytest.mark.parametrize("m", [1, 2, 3, 7, 16, 19, 50])
def test_w4a8_sums_are_exact_integers(engine: str, text: str, m: int) -> None:
    """With rows whose codes are themselves and scales of 1, nothing is rounded."""
    packed = packed_of(72, 512, text)
    ones = {"scales": torch.ones_like(packed.tensors["scales"])}
    packed = PackedMatrix(packed.format, packed.shape, {**packed.tensors, **ones})
    x = torch.randint(-127, 128, (m, 512), generator=torch.Generator().manual_seed(m)).float()
    x[:, ::32] = 127.0
    exact = x.double() @ weight_format(text).dequantize(packed).double().T
    result = W4A8().prepare(call_of(packed, m, "fp32", "int8"), packed)(x)
    assert torch.equal(result.double(), exact)


@pytest.mark.parametrize("activations", ["", "int8"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_row_has_the_same_bits_in_any_company(engine: str, activations: str, dtype: str) -> None:
    packed = packed_of(45, 1536, "int4-g128")
    call = call_of(packed, 40, dtype, activations)
    run = dispatch(call, wanted="cpp_w4a8" if activations else "cpp_w4a16").prepare(call, packed)
    x = torch.randn(70, 1536, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    whole = run(x)
    for first, last in ((0, 1), (3, 5), (10, 14), (20, 27), (30, 45), (1, 34), (5, 70)):
        assert torch.equal(run(x[first:last]), whole[first:last])


@pytest.mark.parametrize("activations", ["", "int8"])
def test_threads_change_no_bit(engine: str, activations: str) -> None:
    """Threads begin inside slices of outputs here: 3 slices of 5 chunks."""
    packed = packed_of(90, 5120, "int4-g128")
    call = call_of(packed, 4, "fp32", activations)
    run = dispatch(call, wanted="cpp_w4a8" if activations else "cpp_w4a16").prepare(call, packed)
    x = torch.randn(4, 5120, generator=torch.Generator().manual_seed(2))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 4, 7, 16):
            torch.set_num_threads(threads)
            results.append(run(x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_torch_products_are_right_after_tiles(engine: str) -> None:
    packed = packed_of(64, 256, "int4-g128")
    run = W4A16().prepare(call_of(packed), packed)
    a = torch.randn(64, 64).bfloat16()
    before = a @ a
    run(torch.randn(8, 256).bfloat16())
    assert torch.equal(a @ a, before)


def test_shapes_of_rows(engine: str) -> None:
    packed = packed_of(40, 256, "int4-g128")
    run = W4A16().prepare(call_of(packed), packed)
    x = torch.randn(2, 3, 256).bfloat16()
    assert run(x).shape == (2, 3, 40)
    assert torch.equal(run(x).view(6, 40), run(x.view(6, 256)))
    assert run(x[0, 0]).shape == (40,)
    assert run(x[:0]).shape == (0, 3, 40)


def test_special_rows(engine: str) -> None:
    packed = packed_of(40, 256, "int4-g128")
    x = torch.randn(4, 256)
    x[1, 7], x[2, 9], x[3] = float("nan"), float("inf"), 0.0
    for activations, kernel in (("", W4A16()), ("int8", W4A8())):
        out = kernel.prepare(call_of(packed, 4, "fp32", activations), packed)(x)
        assert torch.isfinite(out[0]).all()
        assert out[1].isnan().all()
        assert not torch.isfinite(out[2]).any()
        assert (out[3] == 0).all()


def test_blocks_are_made_once() -> None:
    packed = packed_of(40, 256, "int4-g128")
    if W4A16().refuses(call_of(packed)) is not None:
        pytest.skip("this CPU cannot")
    first = blocks(packed)
    assert blocks(packed) is first
    packed.tensors["codes"].zero_()
    assert blocks(packed) is not first
    # 4 bits a code, 16 for each scale, and 24 outputs to fill a slice.
    assert first.memory.numel() == 64 * (256 * 4 // 8 + 2 * 2)
    half = blocks(packed_of(32, 256, "int4-2:4"))
    assert half.memory.numel() == 32 * (256 * 3 // 8 + 2 * 2)


def test_rows_are_quantized_to_nearest() -> None:
    codes, scale = quantize_rows(torch.tensor([[127.0, -63.5, 0.5, 1.5] + [0.0] * 30]), 32)
    assert codes.shape == (1, 2, 32)
    assert codes[0, 0, :4].tolist() == [127, -64, 0, 2]
    assert scale.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("k", "group", "segment"),
    [(512, 128, 128), (512, 512, 256), (1024, 512, 256), (288, 96, 32), (192, 64, 64), (7, 7, 32)],
)
def test_segments(k: int, group: int, segment: int) -> None:
    assert segment_of(k, group) == segment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int4-g48", "groups of 48 of K = 768 weights: expected a multiple of 32; nearest 32 or"),
        ("int4-g100", r"K = 768 weights: expected a multiple of 100; nearest 700 and 800"),
        ("int3-g128", "int4 with groups, channels or 2:4 only"),
        ("uint4-g128", "int4 with groups, channels or 2:4 only"),
    ],
)
def test_formats_that_it_refuses(text: str, message: str) -> None:
    call = LowbitLinearCall(1, 64, 768, text, 4.125)
    if "avx512" in (W4A16().refuses(call) or ""):
        pytest.skip("this CPU cannot")
    with pytest.raises(KernelError, match=message):
        W4A16().prepare(call)


def test_bad_constants_are_named() -> None:
    packed = packed_of(40, 256, "int4-g128")
    kernel = W4A16()
    if kernel.refuses(call_of(packed)) is not None:
        pytest.skip("this CPU cannot")
    with pytest.raises(KernelError, match=r"given int4-g128 \[40, 256\]: expected .* \[41, 256\]"):
        kernel.prepare(LowbitLinearCall(1, 41, 256, "int4-g128", 4.125), packed)
    with pytest.raises(KernelError, match=r"bias = .*\[3\].*expected .*\[40\]"):
        kernel.prepare(call_of(packed), packed, torch.zeros(3))
    with pytest.raises(KernelError, match=r"rows are torch.float32 \[2, 256\].*bfloat16"):
        kernel.prepare(call_of(packed), packed)(torch.zeros(2, 256))
    with pytest.raises(KernelError, match=r"rows are .*\[2, 128\].*expected .*256"):
        kernel.prepare(call_of(packed), packed)(torch.zeros(2, 128).bfloat16())
    packed.tensors["scales"][3, 1] = float("nan")
    with pytest.raises(KernelError, match=r"scales\[3, 1\] = nan"):
        kernel.prepare(call_of(packed), packed)


def test_rounded_rows_are_computed_only_where_the_call_says_so() -> None:
    packed = packed_of(64, 256, "int4-g128")
    plain, rounded = call_of(packed), call_of(packed, activations="int8")
    assert "does not allow" in (W4A8().refuses(plain) or "")
    assert "does not round" in (W4A16().refuses(rounded) or W4A16().refuses(plain) or "")
    assert {name for name, _ in candidates(rounded)} <= {"cpp_w4a8", "integer"}
    assert not {"cpp_w4a8", "integer"} & {name for name, _ in candidates(plain)}


@pytest.mark.parametrize("backend", ["torch", "dequantised", "cpp_w4a16"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_peers_compute_the_same(backend: str, dtype: str) -> None:
    packed = packed_of(64, 256, "int4-g128")
    call = call_of(packed, 5, dtype)
    kernel = kernels_of("linear_lowbit")[backend]
    if kernel.refuses(call) is not None:
        pytest.skip(f"{backend} cannot")
    x, bias = torch.randn(5, 256).to(DTYPES[dtype]), torch.randn(64)
    wanted = kernels_of("linear_lowbit")["reference"].prepare(call, packed, bias)(x)
    result = kernel.prepare(call, packed, bias)(x)
    assert result.dtype == x.dtype
    # PyTorch rounds scales, or weights, to bf16.
    assert apart(result, wanted) < (6e-3 if dtype == "bf16" else 1e-5)
    assert kernel.prepare(call, packed)(x.view(5, 1, 256)).shape == (5, 1, 64)


def test_the_peer_says_what_it_cannot() -> None:
    peer = kernels_of("linear_lowbit")["torch"]
    assert "groups of 32, 64" in (
        peer.refuses(LowbitLinearCall(1, 64, 768, "int4-channel", 4.0)) or ""
    )
    assert "nearest 48" in (peer.refuses(LowbitLinearCall(1, 40, 256, "int4-g128", 4.125)) or "")
    assert "groups only" in (peer.refuses(LowbitLinearCall(1, 64, 256, "int4-2:4", 3.125)) or "")
