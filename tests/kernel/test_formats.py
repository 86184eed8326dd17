"""Weight formats: bit streams, what codes mean, storage, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from shoal.core.errors import KernelError  # noqa: E402
from shoal.kernel.calls import LowbitLinearCall  # noqa: E402
from shoal.kernel.dispatch import kernels_of  # noqa: E402
from shoal.kernel.formats import bipolar, floating, weight_format  # noqa: E402
from shoal.kernel.formats.bits import pack, row_bytes, unpack  # noqa: E402
from shoal.kernel.protocols import PackedMatrix  # noqa: E402

FLOATS = [(x, y) for x in range(1, 8) for y in range(7) if 3 <= 1 + x + y <= 8]
TEXTS = [
    *(f"int{n}-g8" for n in range(2, 9)),
    *(f"uint{n}-g16" for n in range(1, 9)),
    *(f"float{1 + x + y}_e{x}m{y}-g8" for x, y in FLOATS),
    *(f"bipolar{n}-g8" for n in range(1, 9)),
    *(f"bfp{n}-g8" for n in range(2, 9)),
    "int4-channel",
    "int4-g8-2:4",
    "int3-channel-2:4",
    "float3_e1m1-channel",
    "nf4-g8",
]


def matrix(n: int, k: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=25, deadline=None)
@given(bits=st.integers(1, 8), n=st.integers(1, 3), k=st.integers(1, 40), seed=st.integers(0, 99))
def test_streams_are_dense_and_exact(bits, n, k, seed):
    source = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (n, k), generator=source, dtype=torch.uint8)
    stream = pack(codes, bits)
    assert stream.shape == (n, -(-k * bits // 8)) == (n, row_bytes(k, bits))
    assert torch.equal(unpack(stream, bits, k), codes)
    # The definition, as one long number of the row.
    for row, stored in zip(codes.tolist(), stream.tolist(), strict=True):
        number = sum(code << (bits * place) for place, code in enumerate(row))
        assert number.to_bytes(len(stored), "little") == bytes(stored)


def test_streams_refuse():
    with pytest.raises(KernelError, match=r"largest is 9, which 3 bits cannot hold"):
        pack(torch.tensor([1, 9], dtype=torch.uint8), 3)
    with pytest.raises(KernelError, match="1 to 8"):
        pack(torch.zeros(4, dtype=torch.uint8), 9)
    with pytest.raises(KernelError, match="uint8"):
        pack(torch.zeros(4), 4)
    with pytest.raises(KernelError, match="rows of 2 bytes for 5 codes of 3 bits"):
        unpack(torch.zeros(3, dtype=torch.uint8), 3, 5)


def test_maxima_of_small_floats():
    expected = {(2, 1): 6, (3, 2): 28, (2, 3): 7.5, (3, 1): 24, (1, 1): 3, (4, 3): 448}
    for (x, y), most in expected.items():
        assert floating.magnitudes(x, y)[-1] == most


@pytest.mark.parametrize(("x", "y"), [*FLOATS, (1, 0)])
def test_every_code_of_a_small_float(x, y):
    """Against the definition in rational numbers; nearest, ties to even, saturating."""
    known = floating.magnitudes(x, y)
    bias = 2 ** (x - 1) - 1
    for code, value in enumerate(known):
        e, m = divmod(code, 2**y)
        scale = Fraction(2) ** ((e or 1) - bias - y)
        assert Fraction(value) == scale * (m if e == 0 else m + 2**y)
    codes = torch.arange(len(known), dtype=torch.uint8)
    exact = torch.tensor(known)
    assert torch.equal(floating.codes_of(exact, x, y), codes)
    between = (exact[1:].double() + exact[:-1].double()).div(2).float()
    even = torch.tensor([code if code % 2 == 0 else code + 1 for code in range(len(known) - 1)])
    assert torch.equal(floating.codes_of(between, x, y).long(), even)
    largest = torch.tensor([known[-1] * 3, -known[-1] * 3])
    top = len(known) - 1
    assert floating.codes_of(largest, x, y).tolist() == [top, top + 2 ** (x + y)]


@pytest.mark.parametrize(
    ("x", "y", "dtype"), [(4, 3, "float8_e4m3fn"), (5, 2, "float8_e5m2")], ids=str
)
def test_8_bit_floats_are_those_of_torch(x, y, dtype):
    theirs = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).float()
    ours = torch.tensor(floating.values(x, y))
    assert torch.equal(theirs.isnan(), ours.isnan() | (x == 5) & theirs.isnan())
    finite = theirs.isfinite()
    assert torch.equal(theirs[finite], ours[finite])
    inside = matrix(1, 4000)[0] * theirs[finite].max() / 5
    inside = inside.clamp(-theirs[finite].max(), theirs[finite].max())
    rounded = inside.to(getattr(torch, dtype))
    assert torch.equal(floating.codes_of(inside, x, y), rounded.view(torch.uint8))


@pytest.mark.parametrize("text", TEXTS)
def test_quantize_stores_and_reads_back(text):
    fmt = weight_format(text)
    assert str(fmt) == text
    weight = matrix(5, 48)
    weight[2] = 0
    packed = fmt.quantize(weight)
    assert packed.format == text
    assert packed.shape == (5, 48)
    kept = 24 if fmt.keeps_half else 48
    assert packed.tensors["codes"].shape == (5, row_bytes(kept, fmt.code_bits))
    again = fmt.dequantize(packed)
    assert again.dtype == torch.float32
    # What is stored is stored again as it is: every kept value is a code's.
    codes, grid = fmt.unpack(packed), fmt.grid_of(packed)
    keep = None
    if fmt.keeps_half:
        keep = fmt.halve(weight)
        assert torch.equal((again != 0) & ~keep, torch.zeros_like(keep))
        codes = torch.zeros(5, 48, dtype=torch.uint8).masked_scatter(keep, codes)
    stored = fmt.pack(codes, grid, keep)
    assert all(torch.equal(stored.tensors[name], t) for name, t in packed.tensors.items())
    if not text.startswith("bipolar"):
        assert not again[2].any()
    # No other code of the group lies nearer.
    group = fmt.group_of(48)
    # Mantissas are symmetric: the code of -2^(N-1) is never taken.
    all_codes = torch.arange(int(text.startswith("bfp")), 2**fmt.code_bits, dtype=torch.uint8)
    wide = {name: t.repeat_interleave(group, 1)[..., None] for name, t in grid.items()}
    means = fmt.decode(all_codes.expand(5, 48, -1), wide)
    best = (means - weight[..., None]).abs().nan_to_num(nan=torch.inf).amin(-1)
    seen = keep if keep is not None else torch.ones_like(weight, dtype=torch.bool)
    error = (again - weight).abs()[seen]
    assert bool((error <= best[seen] * (1 + 1e-5) + 1e-6).all())


def test_sizes_are_as_said():
    weight = matrix(64, 1024)
    for text, bits in {
        "int4-g128": 4.125,
        "int4-2:4": 3.125,
        "uint3-g64": 3.375,
        "float3_e1m1-g128": 3.125,
        "bipolar2-g128": 2.125,
        "bfp8-g32": 8.25,
        "bfp4-g32": 4.25,
    }.items():
        fmt = weight_format(text)
        assert fmt.bits == bits
        assert fmt.quantize(weight).nbytes * 8 == bits * weight.numel()
    assert weight_format("int4-channel").bits == 4


def test_int4_is_as_marlin_defines_it():
    weight = matrix(3, 256)
    packed = weight_format("int4-g128").quantize(weight)
    scale = (weight.view(3, 2, 128).abs().amax(-1) * 2 / 15).half()
    assert torch.equal(packed.tensors["scales"], scale)
    columns = scale.float().repeat_interleave(128, 1)
    codes = (torch.round(weight / columns) + 8).clamp(0, 15)
    assert torch.equal(weight_format("int4-g128").dequantize(packed), (codes - 8) * columns)
    low, high = packed.tensors["codes"] & 15, packed.tensors["codes"] >> 4
    assert torch.equal(torch.stack((low, high), -1).flatten(1).float(), codes)


def test_affine_has_a_code_for_zero():
    fmt = weight_format("uint4-g32")
    weight = matrix(4, 64).abs() + 1
    weight[:, ::2] = 0
    assert not fmt.dequantize(fmt.quantize(weight))[:, ::2].any()


def test_bipolar_values():
    codes = torch.arange(8, dtype=torch.uint8)
    assert bipolar.meant(codes, 3).tolist() == [-7, -5, -3, -1, 1, 3, 5, 7]
    planes = [sum((2 * (u >> i & 1) - 1) << i for i in range(3)) for u in range(8)]
    assert planes == bipolar.meant(codes, 3).tolist()
    assert torch.equal(bipolar.codes_of(bipolar.meant(codes, 3), 3), codes)
    for wrong in (2, 9, -9):
        with pytest.raises(KernelError, match=rf"bipolar3\[1\] = {wrong}: expected odd integers"):
            bipolar.codes_of(torch.tensor([1, wrong]), 3)


def test_bfp_blocks_share_an_exponent():
    fmt = weight_format("bfp4-g4")
    weight = torch.tensor([[1.0, 0.5, -1.9, 0.1, 0, 0, 0, 0]])
    packed = fmt.quantize(weight)
    assert packed.tensors["exponents"].tolist() == [[0, -127]]
    # Steps of 2^(0 - 2); -1.9 is beyond the largest, 7 steps.
    assert fmt.dequantize(packed).tolist() == [[1, 0.5, -1.75, 0, 0, 0, 0, 0]]
    tiny = fmt.quantize(torch.full((1, 4), 1e-40))
    assert fmt.dequantize(tiny).isfinite().all()


def test_scales_keep_small_groups_and_refuse_large_ones():
    fmt = weight_format("int4-g8")
    packed = fmt.quantize(torch.full((1, 8), 1e-9))
    assert float(packed.tensors["scales"]) > 0
    with pytest.raises(KernelError, match="larger than 65504"):
        fmt.quantize(torch.full((1, 8), 1e9))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("int9-g128", "'9' is not a width; expected 1 to 8 bits"),
        ("int-g128", "not a width"),
        ("nt4-g128", "did you mean 'int'"),
        ("int4-g0", "'g0': expected g and a number"),
        ("int4-g64-g32", "expected one of -gN and -channel"),
        ("uint4-2:4", "-2:4 with int only"),
        ("float4-g8", "such as float4_e2m1-g128"),
        ("float4_e2m2-g8", "did you mean 'float5_e2m2'"),
        ("float9_e5m3-g8", "e4m3"),
        ("bfp1-g8", "bfp2"),
        ("", "expected one of int, uint"),
    ],
)
def test_texts_that_name_nothing(text, said):
    with pytest.raises(KernelError, match=said.replace("(", r"\(")):
        weight_format(text)


def test_bad_matrices():
    fmt = weight_format("int4-g128")
    with pytest.raises(KernelError, match=r"K = 200 .* multiple of 128; nearest 128 and 256"):
        fmt.quantize(matrix(2, 200))
    with pytest.raises(KernelError, match=r"K = 6 .* multiple of 4"):
        weight_format("int4-channel-2:4").quantize(matrix(2, 6))
    with pytest.raises(KernelError, match="group of a multiple of 4"):
        weight_format("int4-g6-2:4").quantize(matrix(2, 12))
    bad = matrix(2, 128)
    bad[1, 7] = torch.nan
    with pytest.raises(KernelError, match=r"weight\[1, 7\] = nan|weight\[1, 0, 7\] = nan"):
        fmt.quantize(bad)
    with pytest.raises(KernelError, match="a matrix"):
        fmt.quantize(torch.ones(128))
    packed = fmt.quantize(matrix(2, 128))
    packed.tensors["scales"][1, 0] = torch.inf
    with pytest.raises(KernelError, match=r"scales\[1, 0\] = inf"):
        fmt.dequantize(packed)
    with pytest.raises(KernelError, match="expected int4-g128 with codes, scales"):
        fmt.dequantize(PackedMatrix("int4-g128", (2, 128), {"codes": packed.tensors["codes"]}))
    short = {**packed.tensors, "codes": packed.tensors["codes"][:, :3]}
    with pytest.raises(KernelError, match=r"codes is torch.uint8 \[2, 3\]: expected"):
        fmt.dequantize(PackedMatrix("int4-g128", (2, 128), short))


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_reference_is_a_product_with_the_meant_weights(dtype):
    fmt = weight_format("uint3-g8")
    packed = fmt.quantize(matrix(6, 24))
    reference = kernels_of("linear_lowbit")["reference"]
    call = LowbitLinearCall(2, 6, 24, "uint3-g8", fmt.bits, dtype=dtype)
    kind = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    x, bias = matrix(2, 24, seed=1).to(kind), matrix(1, 6, seed=2)[0]
    out = reference.prepare(call, packed, bias)(x)
    wide = torch.promote_types(kind, torch.float32)
    expected = x.to(wide) @ fmt.dequantize(packed).to(wide).T + bias.to(wide)
    assert out.dtype == kind
    torch.testing.assert_close(out, expected.to(kind))
    with pytest.raises(KernelError, match="expected uint3-g8"):
        reference.prepare(call, weight_format("uint3-g4").quantize(matrix(6, 24)))
    wrong = LowbitLinearCall(2, 6, 25, "uint3-g8", fmt.bits, dtype=dtype)
    assert "nearest 24 and 32" in reference.refuses(wrong)
