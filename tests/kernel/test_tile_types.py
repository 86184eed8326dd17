"""Types of 1 to 8 bits against exact fractions, PyTorch's own small floats, and the formats."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from shoal.core.errors import KernelError
from shoal.kernel.formats.floating import values as format_values
from shoal.kernel.tile.types import NARROW, TileType, tile_type

FLOATS = [dtype for dtype in NARROW if dtype.kind == "float"]


def rational(dtype: TileType, code: int) -> Fraction | None:
    """What a code means, by the definition; None where it is no number."""
    x, y = dtype.exponent, dtype.mantissa
    sign, power, rest = code >> (x + y), (code >> y) % 2**x, code % 2**y
    if (x == 5 and power == 31) or ((x, y) == (4, 3) and code % 128 == 127):
        return None
    bias = 2 ** (x - 1) - 1
    if power == 0:
        size = Fraction(rest, 2**y) * Fraction(2) ** (1 - bias)
    else:
        size = (1 + Fraction(rest, 2**y)) * Fraction(2) ** (power - bias)
    return -size if sign else size


def test_all_types_are_there() -> None:
    assert len(NARROW) == 8 + 8 + sum(bits - 1 for bits in range(3, 9))
    assert all(tile_type(str(dtype)) == dtype for dtype in NARROW)
    assert tile_type("e3m2") == tile_type("float6_e3m2") == TileType("float", 6, 3, 2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_code_of_a_float_means_its_fraction(dtype: TileType) -> None:
    for code, value in enumerate(dtype.values()):
        exact = rational(dtype, code)
        assert (not np.isfinite(value)) if exact is None else Fraction(float(value)) == exact
    assert np.array_equal(
        dtype.values(), format_values(dtype.exponent, dtype.mantissa), equal_nan=True
    )


@pytest.mark.parametrize(
    ("name", "largest"),
    [("e2m1", 6), ("e3m2", 28), ("e2m3", 7.5), ("e3m1", 24), ("e1m1", 3), ("e4m3", 448)],
)
def test_largest(name: str, largest: float) -> None:
    assert tile_type(name).largest == largest
    assert tile_type("int5").largest == 15
    assert tile_type("uint8").largest == 255


@pytest.mark.parametrize(
    ("name", "peer"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_torch_reads_the_same(name: str, peer: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(
        tile_type(name).values(), codes.view(peer).double().numpy(), equal_nan=True
    )
    x = torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 8
    assert np.array_equal(tile_type(name).encode(x.numpy()), x.to(peer).view(torch.uint8).numpy())


def test_ocp_fp4() -> None:
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert tile_type("e2m1").values().tolist() == [*positive, *(-x for x in positive)]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_encoding_is_nearest_even_and_saturates(dtype: TileType) -> None:
    values = dtype.values()
    good = np.isfinite(values)
    codes = np.arange(len(values))[good]
    back = dtype.encode(values[good])
    assert np.array_equal(values[back], values[good])
    assert np.array_equal(back, codes)
    assert dtype.values()[dtype.encode(np.array([1e30]))[0]] == dtype.largest
    known = np.unique(values[good])
    for low, high in pairwise(known):
        chosen = int(dtype.encode(np.array([(low + high) / 2]))[0])
        assert values[chosen] in (low, high)
        if dtype.kind == "float" and low * high != 0:
            assert chosen % 2 == 0
        assert values[dtype.encode(np.array([low * 0.51 + high * 0.49]))[0]] == low


def test_packed_size_is_what_the_bits_are() -> None:
    assert [tile_type(f"uint{n}").packed_bytes(11) for n in range(1, 9)] == [
        2, 3, 5, 6, 7, 9, 10, 11,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["uint9", "int0", "e8m0", "float4_e3m2", "e1m0", "half", "float8_e0m7", ""]
)
def test_no_such_type(name: str) -> None:
    with pytest.raises(KernelError, match="expected"):
        tile_type(name)


def test_what_has_no_code() -> None:
    with pytest.raises(KernelError, match="NaN"):
        tile_type("e2m1").encode(np.array([1.0, np.nan]))
    with pytest.raises(KernelError, match="no table"):
        tile_type("bf16").values()
