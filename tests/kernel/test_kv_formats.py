"""Formats of the cache: codes mean what the paper says, to the last bit."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from shoal.core.errors import KernelError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.kernel.kv import bfp, common, kv_format  # noqa: E402
from shoal.kernel.kv.bfp import BfpKVFormat  # noqa: E402

NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
    st.sampled_from([0.0, -0.0, 1.0, 1.9999999, 2.0, 7.5, -3.5, 2.0**-126, 2.0**-127, 3.4e38]),
    st.integers(-300, 300).map(lambda n: n / 16),
)


def oracle(numbers, bits):
    """Mantissas and exponent of one block, in exact arithmetic."""
    most = max(abs(Fraction(x)) for x in numbers)
    if most < Fraction(2) ** -126:
        return [0] * len(numbers), -127
    e = math.frexp(float(most))[1] - 1
    step = Fraction(2) ** (e - (bits - 2))
    limit = 2 ** (bits - 1) - 1
    return [max(-limit, min(limit, round(Fraction(x) / step))) for x in numbers], e


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from([12, 16]), st.sampled_from([2, 8, 32]))
def test_block_floats_are_exact(data, bits, block):
    rows = data.draw(st.integers(1, 3))
    numbers = data.draw(st.lists(NUMBERS, min_size=rows * block, max_size=rows * block))
    x = torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1)
    form = BfpKVFormat(bits=bits, block=block)
    codes, exponents = form.encode(x)
    decoded = form.decode(codes, exponents).flatten().tolist()
    for row in range(rows):
        part = slice(row * block, (row + 1) * block)
        wanted, e = oracle(x.flatten()[part].tolist(), bits - 8)
        assert int(exponents.flatten()[row]) == e + 127
        exact = [q * Fraction(2) ** (e - (bits - 10)) for q in wanted]
        # In fp32, where the smallest steps are below what it can hold exactly.
        assert decoded[part] == torch.tensor([float(q) for q in exact]).tolist()


@pytest.mark.parametrize("text", ["bfp12-b32", "bfp16-b16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_and_plain_code_agree(text, dtype, monkeypatch):
    form = kv_format(text)
    x = (torch.randn(5, 3, 64) * torch.exp(3 * torch.randn(64))).to(dtype)
    x[2, 1] = 0
    fast = form.encode(x), form.decode(*form.encode(x))
    monkeypatch.setattr(common, "fast", lambda _: False)
    monkeypatch.setattr("shoal.core.native.compiler", lambda: None)
    slow = form.encode(x), form.decode(*form.encode(x))
    for a, b in zip(fast[0], slow[0], strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert torch.equal(fast[1], slow[1])
    assert bfp is not None


@pytest.mark.parametrize("text", ["int8", "bfp12-b32"])
def test_heads_of_a_wider_row(text):
    row = torch.randn(5, 7, 64)
    for part in (row[:, 2:6], row[:, ::2], row.transpose(0, 1)):
        expected = kv_format(text).encode(part.contiguous())
        for a, b in zip(kv_format(text).encode(part), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("compiled", [True, False])
def test_rows_go_to_their_slots(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(common, "compiler", lambda: None)
    put = common.writer(torch.device("cpu"))
    store, wide = torch.zeros(12, 2, 8, dtype=torch.bfloat16), torch.randn(3, 5, 8).bfloat16()
    for rows in (wide[:, 1:3], wide[:, ::4], wide[:0, :2]):
        slots = torch.tensor([11, 0, 7])[: len(rows)]
        put(store, slots, rows)
        assert torch.equal(store[slots], rows)
    assert not store[[1, 2, 3, 4, 5, 6, 8, 9, 10]].any()
    with pytest.raises((KernelError, IndexError), match=r"slot 12 of token 1|out of"):
        put(store, torch.tensor([0, 12]), wide[:2, :2])


@pytest.mark.parametrize("text", ["plain", "int8", "bfp12-b32", "bfp16-b64"])
def test_layout_is_what_is_stored(text):
    form = kv_format(text)
    x = torch.randn(7, 2, 128)
    stored = form.encode(x)
    names = {"fp32": torch.float32, "int8": torch.int8, "uint8": torch.uint8}
    assert [(part.shape[-1], part.dtype) for part in stored] == [
        (width, names[kind]) for width, kind in form.layout(128, "fp32")
    ]
    assert sum(part.nbytes for part in stored) == 14 * form.token_bytes(128, dtype_bytes=4)
    error = (form.decode(*stored) - x).abs().max() / x.abs().max()
    assert error <= {"plain": 0, "int8": 0.005, "bfp12-b32": 0.13, "bfp16-b64": 0.01}[text]


def test_bytes_by_count():
    assert BfpKVFormat(bits=12, block=32).token_bytes(128, dtype_bytes=2) * 8 / 128 == 4.25
    assert BfpKVFormat(bits=16, block=32).token_bytes(128, dtype_bytes=2) * 8 / 128 == 8.25
    assert BfpKVFormat(bits=12, block=64).token_bytes(128, dtype_bytes=2) * 8 / 128 == 4.125
    assert kv_format("int8").token_bytes(128, dtype_bytes=2) == 132
    assert kv_format("plain").token_bytes(128, dtype_bytes=2) == 256


def test_chosen_by_name():
    assert str(table("kv_format").build({"name": "bfp", "bits": 16, "block": 64})) == "bfp16-b64"
    assert str(table("kv_format").build("int8")) == "int8"


@pytest.mark.parametrize("text", ["int8", "bfp12-b32"])
@pytest.mark.parametrize("compiled", [True, False])
def test_bad_input_is_named(text, compiled, monkeypatch):
    x = torch.zeros(2, 1, 64)
    x[1, 0, 5] = float("inf")
    if not compiled:
        monkeypatch.setattr(common, "fast", lambda _: False)
    with pytest.raises(KernelError, match=r"\[1, 0, 5\]: expected finite"):
        kv_format(text).encode(x)
    with pytest.raises(KernelError, match="a power of two from 2 to 1024"):
        BfpKVFormat(block=24)
    with pytest.raises(KernelError, match=r"12 \(mantissas of 4 bits\) or 16"):
        BfpKVFormat(bits=8)
    with pytest.raises(KernelError, match="do not divide heads of 80; the nearest block is 16"):
        BfpKVFormat(block=32).encode(torch.zeros(1, 1, 80))
