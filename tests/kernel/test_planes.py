"""Bipolar planes: exact products in every engine, and the linear layer made of them."""

from __future__ import annotations

import importlib.util
import itertools
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from shoal.core.errors import KernelError
from shoal.kernel.calls import LowbitLinearCall, MatmulPlanesCall
from shoal.kernel.dispatch import candidates, dispatch, here, kernels_of
from shoal.kernel.formats import weight_format
from shoal.kernel.planes.activations import bits_of, quantize, rounded
from shoal.kernel.planes.engines import ENGINES, bound, chosen
from shoal.kernel.planes.layout import bipolar_of, join, pack, split, unpack

SIZES = (1, 63, 64, 65, 100, 130)
quickly = settings(deadline=None, max_examples=20, derandomize=True)


def odd(rows: int, k: int, bits: int, seed: int) -> torch.Tensor:
    codes = torch.randint(0, 2**bits, (rows, k), generator=torch.Generator().manual_seed(seed))
    return 2 * codes - (2**bits - 1)


def able(call: Any) -> list[str]:
    return [name for name, kernel in kernels_of(call.op).items() if kernel.refuses(call) is None]


def expect_exact(x: torch.Tensor, w: torch.Tensor, a: int, b: int) -> None:
    call = MatmulPlanesCall(m=len(x), n=len(w), k=x.shape[1], w=b, a=a)
    planes_x, planes_w = pack(x, a), pack(w, b)
    for backend in able(call):
        if backend == "triton":
            continue
        out = kernels_of(call.op)[backend].prepare(call, planes_w)(planes_x)
        assert torch.equal(out.long(), x.long() @ w.long().T), (backend, call)


@pytest.mark.parametrize("a", range(1, 9))
def test_every_engine_is_exact_for_all_bits(a: int) -> None:
    for b in range(1, 9):
        k = SIZES[(a * 8 + b) % len(SIZES)]
        expect_exact(odd(1 + a * b % 37, k, a, 1), odd(1 + (a + 5 * b) % 41, k, b, 2), a, b)


@quickly
@given(
    m=st.integers(1, 40),
    n=st.integers(1, 70),
    k=st.sampled_from(SIZES),
    a=st.integers(1, 8),
    b=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_every_engine_is_exact(m: int, n: int, k: int, a: int, b: int, seed: int) -> None:
    expect_exact(odd(m, k, a, seed), odd(n, k, b, seed + 100), a, b)


@pytest.mark.parametrize(("a", "b"), [(1, 1), (2, 3), (8, 8)])
def test_planes_of_ones_and_zeros(a: int, b: int) -> None:
    for k, top_x, top_w in itertools.product((1, 65), (1, -1), (1, -1)):
        x = torch.full((5, k), top_x * (2**a - 1))
        w = torch.full((33, k), top_w * (2**b - 1))
        expect_exact(x, w, a, b)


def test_constant_planes_are_left_out() -> None:
    from shoal.kernel.planes.native import weights

    if ENGINES["popcnt"].refuses():
        pytest.skip("no vpopcntq")
    codes = (torch.arange(40 * 70).view(40, 70) % 4 * 2 + 64 + 1).to(torch.uint8)
    held = weights(codes, 8, 3, tiles=True)
    assert (held.job.w, held.job.low, held.job.rest) == (2, 1, 64 + 1 - 128 - 32 - 16 - 8)
    expect_exact(odd(6, 70, 3, 0), 2 * codes.long() - 255, 3, 8)
    expect_exact(odd(6, 70, 3, 0), torch.full((40, 70), 5), 3, 3)


def test_sums_beyond_32_bits() -> None:
    k = bound(8, 8)
    assert 255 * 255 * k >= 2**31 > 255 * 255 * (k - 1)
    for length, dtype in ((k, torch.int64), (k - 1, torch.int32)):
        x, w = torch.full((2, length), 255), torch.full((3, length), -255)
        call = MatmulPlanesCall(m=2, n=3, k=length, w=8, a=8)
        for backend in able(call):
            if backend == "triton":
                continue
            out = kernels_of(call.op)[backend].prepare(call, pack(w, 8))(pack(x, 8))
            assert out.dtype == dtype
            assert out.unique().tolist() == [-255 * 255 * length], backend
    expect_exact(odd(3, k + 77, 8, 3), odd(5, k + 77, 8, 4), 8, 8)


def test_strided_planes_and_other_numbers_of_rows() -> None:
    call = MatmulPlanesCall(m=4, n=20, k=100, w=2, a=3)
    x, w = odd(24, 100, 3, 5), odd(20, 100, 2, 6)
    for backend in able(call):
        if backend == "triton":
            continue
        run = kernels_of(call.op)[backend].prepare(call, pack(w, 2))
        for rows in (x[::2], x[:1], x[:7], x.flip(0)):
            assert torch.equal(run(pack(rows, 3)).long(), rows @ w.T)
        assert torch.equal(run(pack(x, 3)[::3]).long(), x[::3] @ w.T)


def test_layout_round_trips() -> None:
    for bits, k in itertools.product(range(1, 9), SIZES):
        codes = torch.randint(0, 2**bits, (3, k)).to(torch.uint8)
        assert torch.equal(join(split(codes, bits), k), codes)
        assert torch.equal(unpack(pack(odd(3, k, bits, k), bits), k), odd(3, k, bits, k))


def test_integer_codes_are_bipolar_codes() -> None:
    codes = torch.arange(16)
    scale, zero = torch.tensor(0.25), torch.tensor(-1.5)
    ours, offset = bipolar_of(scale, zero, 4)
    assert torch.equal(ours * (2 * codes - 15) + offset, scale * codes + zero)
    # Symmetric around 0: no offset. Two's complement is half a step off.
    assert bipolar_of(scale, -scale * 7.5, 4)[1] == 0
    assert bipolar_of(scale, -scale * 8, 4)[1] == -scale / 2


def test_bad_input_is_named() -> None:
    with pytest.raises(KernelError, match=r"bipolar3\[0, 1\] = 4: expected odd integers"):
        pack(torch.tensor([[1, 4]]), 3)
    with pytest.raises(KernelError, match=r"= 9: expected odd"):
        pack(torch.tensor([[1, 9]]), 3)
    with pytest.raises(KernelError, match="1 to 8"):
        split(torch.zeros(1, 1, dtype=torch.uint8), 9)
    with pytest.raises(KernelError, match="which does not fit in 2 bits"):
        split(torch.full((1, 1), 4, dtype=torch.uint8), 2)
    with pytest.raises(KernelError, match="nearest w = 8 and a = 1"):
        dispatch(MatmulPlanesCall(m=1, n=1, k=1, w=9, a=0))
    call = MatmulPlanesCall(m=1, n=4, k=65, w=2, a=2)
    with pytest.raises(KernelError, match=r"planes of w: torch.int64 \[4, 2, 1\].*\[4, 2, 2\]"):
        kernels_of(call.op)["reference"].prepare(call, pack(odd(4, 64, 2, 0), 2))
    run = dispatch(call).prepare(call, pack(odd(4, 65, 2, 0), 2))
    with pytest.raises(KernelError, match=r"planes of x"):
        run(pack(odd(1, 65, 3, 0), 3))
    for text in ("bipolar9", "int8", "bipolar"):
        with pytest.raises(KernelError, match="bipolar1 to bipolar8"):
            bits_of(text)


def test_engines_cross_over_by_the_units_of_the_machine() -> None:
    call = MatmulPlanesCall(m=256, n=512, k=512, w=1, a=1)
    assert {name.removeprefix("cpp_") for name, _ in candidates(call)} >= {
        engine.name for engine in ENGINES.values() if engine.refuses() is None
    }
    every = {name: engine.cycles for name, engine in ENGINES.items()}
    # Zen 5: two counts a cycle beside four additions; no matrix tiles.
    units = {"popcount": 1024.0, "dot_int8": 256.0, "tile_int8": 1.0, "clock": 4e9}
    for w, a, best in ((1, 1, "popcnt"), (2, 2, "popcnt"), (4, 4, "vnni"), (1, 8, "vnni")):
        cycles = {name: of(256, 512, 512, w, a, units) for name, of in every.items()}
        assert min(cycles, key=cycles.__getitem__) == best, (w, a)
    if not any(e.refuses() is None for e in ENGINES.values()):
        pytest.skip("no engine runs here")
    few = chosen(1, 4096, 4096, 2, 8, 4096, here())
    assert few is None or few.name == "gemv" or few.tiles


FORMATS = (
    "bipolar2-g64",
    "bipolar3-channel",
    "bipolar8-g128",
    "int4-g64",
    "uint3-g16",
    "int8-channel",
)


def layer(text: str, n: int, k: int, seed: int = 0) -> Any:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return weight_format(text).quantize(weight)


@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_linear_equals_its_reference(text: str, dtype: str) -> None:
    kernel = kernels_of("linear_lowbit")["bipolar"]
    for (m, n, k), a in zip(((1, 40, 128), (5, 33, 256), (33, 17, 128)), (8, 1, 4), strict=True):
        call = LowbitLinearCall(
            m, n, k, text, weight_format(text).bits, dtype, activations=f"bipolar{a}"
        )  # type: ignore[arg-type]
        if kernel.refuses(call):
            pytest.skip(str(kernel.refuses(call)))
        packed = layer(text, n, k)
        torch_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).to(torch_dtype)
        bias = torch.linspace(-1, 1, n)
        out = kernel.prepare(call, packed, bias)(x)
        codes, scale = quantize(x, a)
        meant = (2.0 * codes.double() - (2**a - 1)) * scale[:, None].double()
        expected = meant @ weight_format(text).dequantize(packed).double().T + bias
        limit = 1e-5 if dtype == "fp32" else 8e-3
        assert out.dtype == torch_dtype
        assert (out - expected).abs().max() <= limit * expected.abs().max()


def test_linear_rows_have_the_same_bits_in_any_company() -> None:
    kernel = kernels_of("linear_lowbit")["bipolar"]
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(7))
    for text in ("bipolar2-g64", "uint4-channel"):
        bits = weight_format(text).bits
        call = LowbitLinearCall(1, 50, 256, text, bits, "fp32", activations="bipolar8")
        if kernel.refuses(call):
            pytest.skip(str(kernel.refuses(call)))
        run = kernel.prepare(call, layer(text, 50, 256))
        whole = run(x)
        for rows in (1, 3, 4, 9, 17, 40):
            assert torch.equal(run(x[:rows]), whole[:rows])
        many = kernel.prepare(
            LowbitLinearCall(512, 50, 256, text, bits, "fp32", activations="bipolar1"),
            layer(text, 50, 256),
        )
        assert torch.equal(many(x[3:5]), many(x)[3:5])
        assert torch.equal(run(x.view(7, 10, 256)).view(70, 50), whole)


def test_linear_says_what_it_takes() -> None:
    kernel = kernels_of("linear_lowbit")["bipolar"]

    def refused(text: str, activations: str = "bipolar8", k: int = 128) -> str:
        call = LowbitLinearCall(1, 8, k, text, 4, "fp32", activations=activations)
        return kernel.refuses(call) or ""

    if kernel.refuses(LowbitLinearCall(1, 8, 128, "int4-g64", 4, "fp32", activations="bipolar8")):
        pytest.skip("no engine runs here")
    assert "bipolar1 to bipolar8" in refused("int4-g64", "bipolar9")
    assert "bipolar1 to bipolar8" in refused("int4-g64", "")
    assert "bipolar, int, uint" in refused("float4_e2m1-g64")
    assert "multiple of 16, not 8; nearest 16" in refused("int4-g8")
    call = LowbitLinearCall(1, 8, 128, "int4-g64", 4, "fp32", activations="bipolar8")
    run = kernel.prepare(call, layer("int4-g64", 8, 128))
    with pytest.raises(KernelError, match=r"expected torch.float32 \[..., 128\]"):
        run(torch.zeros(2, 64))
    with pytest.raises(KernelError, match=r"expected int4-g64 \[8, 128\]"):
        kernel.prepare(call, layer("int4-g64", 9, 128))
    out = run(torch.tensor([0.0, float("inf"), float("nan")])[:, None].repeat(1, 128))
    assert torch.equal(out[0], torch.zeros(8))
    assert out[1:].isnan().all()


def test_rounded_activations() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    errors = [float((rounded(x, bits) - x).square().mean()) for bits in range(1, 9)]
    assert errors == sorted(errors, reverse=True)
    # Of a normal distribution, one and two bits leave at best 36.3 % and 11.9 %.
    assert errors[0] == pytest.approx(0.363, abs=0.01)
    assert errors[1] == pytest.approx(0.119, abs=0.01)
    assert rounded(torch.zeros(2, 4), 8).abs().max() == 0


def test_triton_program(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for a, b, k in ((1, 2, 65), (8, 8, 100)):
        call = MatmulPlanesCall(m=5, n=18, k=k, w=b, a=a)
        x, w = odd(5, k, a, 1), odd(18, k, b, 2)
        out = kernels_of(call.op)["triton"].prepare(call, pack(w, b))(pack(x, a))
        assert torch.equal(out.long(), x @ w.T)
