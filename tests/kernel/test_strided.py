"""Datatypes, their canonical form, and every kernel against plain enumeration."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.claims.lab.strided.api import commit, layout_of, pack, unpack
from shoal.core.errors import KernelError
from shoal.kernel.dispatch import dispatch, kernels_of
from shoal.kernel.strided.calls import Pack, Unpack
from shoal.kernel.strided.canonical import (
    BlockList,
    StridedBlock,
    canonical,
    rewritten,
    word_bytes,
)
from shoal.kernel.strided.datatype import (
    Datatype,
    contiguous,
    from_tensor_view,
    hindexed,
    hvector,
    indexed,
    named,
    resized,
    struct,
    subarray,
    vector,
)
from shoal.kernel.strided.explain import explain, parse

QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
BACKENDS = [name for name in ("reference", "torch", "cpp") if name in kernels_of("pack")]


@st.composite
def nests(draw: Any, depth: int = 3) -> Datatype:
    """Any type of a few hundred bytes."""
    if depth == 0 or draw(st.integers(0, 4)) == 0:
        return named(draw(st.sampled_from([1, 2, 3, 4, 8, 12])))
    base = draw(nests(depth - 1))
    count = st.integers(0 if draw(st.integers(0, 9)) == 0 else 1, 4)
    kind = draw(
        st.sampled_from(
            ["contiguous", "vector", "hvector", "subarray", "resized", "indexed", "struct"]
        )
    )
    if kind == "contiguous":
        return contiguous(draw(count), base)
    if kind == "vector":
        return vector(draw(count), draw(count), draw(st.integers(-4, 6)), base)
    if kind == "hvector":
        return hvector(draw(count), draw(count), draw(st.integers(-40, 60)), base)
    if kind == "resized":
        return resized(base, draw(st.integers(-8, 8)), draw(st.integers(0, 40)))
    if kind == "subarray":
        sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        boxes = [draw(st.integers(1, n)) for n in sizes]
        starts = [draw(st.integers(0, n - box)) for n, box in zip(sizes, boxes, strict=True)]
        return subarray(sizes, boxes, starts, base, draw(st.sampled_from("CF")))
    places = draw(st.lists(st.integers(-6, 12), min_size=1, max_size=4))
    lengths = [draw(count) for _ in places]
    if kind == "indexed":
        return indexed(lengths, places, base)
    return struct(lengths, [5 * at for at in places], [base] * len(places))


def expanded(layout: StridedBlock | BlockList) -> np.ndarray:
    if isinstance(layout, BlockList):
        return np.concatenate(
            [at + np.arange(n) for at, n in zip(layout.offsets, layout.lengths, strict=True)]
        )
    array = np.zeros(1, np.int64)
    for count, stride in zip(layout.counts, layout.strides, strict=True):
        array = (np.arange(count)[:, None] * stride + array[None, :]).reshape(-1)
    return layout.start + array


def placed(datatype: Datatype, count: int, skew: int = 0) -> tuple[torch.Tensor, np.ndarray]:
    """A buffer whose offset 0 leaves room for the type, and the type's bytes in its memory."""
    offsets = datatype.typemap(count)
    low = int(min(offsets.min(initial=0), 0))
    high = int(max(offsets.max(initial=0), 0)) + 1
    memory = torch.arange(high - low + skew + 3, dtype=torch.int64).mul(37).add(11).to(torch.uint8)
    return memory[skew - low :], offsets + skew - low


@QUICK
@given(nests(), st.integers(0, 3))
def test_canonical_form_is_the_typemap(datatype: Datatype, count: int) -> None:
    offsets = datatype.typemap(count)
    layout = canonical(datatype, count)
    assert layout.size == count * datatype.size == len(offsets)
    np.testing.assert_array_equal(expanded(layout), offsets)
    if len(offsets):
        assert layout.span == (offsets.min(), offsets.max() + 1)
        assert layout.runs >= 1
    assert layout.overlaps == (len(np.unique(offsets)) < len(offsets))
    free = canonical(datatype, count, order_free=True)
    np.testing.assert_array_equal(np.sort(expanded(free)), np.sort(offsets))


@QUICK
@given(nests(), nests())
def test_equal_typemaps_have_equal_canonical_forms(a: Datatype, b: Datatype) -> None:
    """Every type, and the same bytes spelled as a list of single ones."""
    for one in (a, b):
        offsets = one.typemap()
        spelled = hindexed([1] * len(offsets), [int(at) for at in offsets], named(1))
        result, listed = canonical(one), canonical(spelled)
        if isinstance(result, StridedBlock):
            assert isinstance(listed, StridedBlock)
            assert (result.start, result.counts, result.strides) == (
                listed.start,
                listed.counts,
                listed.strides,
            )
        else:
            assert isinstance(listed, BlockList)
            assert (result.offsets, result.lengths) == (listed.offsets, listed.lengths)


def spellings() -> list[list[Datatype]]:
    """Objects, each described in at least five ways."""
    f32 = named("float32")
    row = contiguous(16, f32)
    plane = subarray([8, 16], [8, 5], [0, 3], f32)
    box = subarray([4, 8, 16], [2, 3, 5], [1, 2, 3], f32)
    return [
        [
            contiguous(64, f32),
            named(256),
            vector(8, 8, 8, f32),
            hvector(16, 4, 16, f32),
            subarray([64], [64], [0], f32),
            vector(4, 1, 1, row),
            indexed([32, 32], [0, 32], f32),
            resized(contiguous(256, named(1)), 0, 300),
        ],
        [
            vector(8, 5, 16, f32),
            hvector(8, 5, 64, f32),
            subarray([8, 16], [8, 5], [0, 0], f32),
            subarray([16, 8], [5, 8], [0, 0], f32, "F"),
            contiguous(8, resized(contiguous(5, f32), 0, 64)),
            hvector(2, 1, 256, hvector(4, 20, 64, named(1))),
            indexed([5] * 8, [16 * i for i in range(8)], f32),
        ],
        [
            box,
            hindexed([1], [0], box),
            struct([1], [0], [subarray([16, 8, 4], [5, 3, 2], [3, 2, 1], f32, "F")]),
            hindexed(
                [1], [4 * (128 + 32 + 3)], hvector(2, 1, 512, hvector(3, 1, 64, contiguous(5, f32)))
            ),
            hindexed([1, 1], [4 * 163, 4 * 163 + 512], hvector(3, 5, 64, f32)),
            contiguous(1, vector(1, 1, 7, box)),
        ],
        [
            # The outer stride is the smaller one.
            hvector(3, 1, 4, hvector(4, 1, 64, f32)),
            struct([1] * 3, [0, 4, 8], [hvector(4, 1, 64, f32)] * 3),
            hvector(1, 1, 9, hvector(3, 1, 4, hvector(2, 1, 128, hvector(2, 1, 64, f32)))),
            hvector(3, 1, 4, hvector(4, 4, 64, named(1))),
            indexed([1] * 12, [16 * j + i for i in range(3) for j in range(4)], f32),
        ],
        [
            plane,
            hindexed([1], [12], vector(8, 5, 16, f32)),
            hindexed([4, 4], [12, 268], resized(contiguous(5, f32), 0, 64)),
            hindexed([5] * 8, [12 + 64 * i for i in range(8)], f32),
            subarray([8, 64], [8, 20], [0, 12], named(1)),
            subarray([2, 4, 16], [2, 4, 5], [0, 0, 3], f32),
        ],
    ]


@pytest.mark.parametrize("objects", spellings(), ids=range(len(spellings())))
def test_spellings_of_one_object_are_one_block(objects: list[Datatype]) -> None:
    results = [canonical(spelled) for spelled in objects]
    assert len(objects) >= 5
    assert all(isinstance(layout, StridedBlock) for layout in results)
    assert len({(f.start, f.counts, f.strides) for f in results}) == 1  # type: ignore[union-attr]


def test_order_is_kept_unless_it_is_free() -> None:
    a = hvector(3, 1, 4, hvector(4, 1, 64, named(4)))
    b = hvector(4, 1, 64, hvector(3, 1, 4, named(4)))
    assert canonical(a) != canonical(b)
    assert canonical(a).counts == (4, 4, 3)  # type: ignore[union-attr]
    free = canonical(a, order_free=True)
    assert isinstance(free, StridedBlock)
    assert (free.counts, free.strides) == ((12, 4), (1, 64))
    backwards = canonical(hvector(4, 1, -8, named(8)), order_free=True)
    assert isinstance(backwards, StridedBlock)
    assert (backwards.start, backwards.counts) == (-24, (32,))


def test_rules_are_told() -> None:
    datatype = hvector(2, 1, 128, hvector(1, 1, 0, vector(2, 4, 16, named(4))))
    _, steps = rewritten(datatype)
    assert [step.rule for step in steps] == [
        "given",
        "elide",
        "elide",
        "elide",
        "elide",
        "flatten",
        "fold",
    ]


def test_words() -> None:
    block = StridedBlock(32, (48, 3), (1, 96), 300)
    assert [word_bytes(block), word_bytes(block, 8), word_bytes(block, largest=4)] == [16, 8, 4]


@pytest.mark.parametrize("backend", BACKENDS)
@settings(QUICK, max_examples=20)
@given(datatype=nests(), count=st.integers(0, 3), skew=st.integers(0, 5))
def test_packs_and_unpacks_what_the_typemap_says(
    backend: str, datatype: Datatype, count: int, skew: int
) -> None:
    check(backend, datatype, count, skew)


def check(backend: str, datatype: Datatype, count: int, skew: int) -> None:
    buffer, offsets = placed(datatype, count, skew)
    layout = canonical(datatype, count)
    if kernels_of("pack")[backend].refuses(Pack(layout)) is not None:
        return
    memory = torch.empty(0, dtype=torch.uint8).set_(buffer.untyped_storage())
    wanted = memory[torch.from_numpy(offsets)]
    packed = pack(buffer, datatype, count=count, backend=backend)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed, wanted)
    askew = torch.zeros(len(wanted) + 1, dtype=torch.uint8)[1:]
    assert torch.equal(pack(buffer, datatype, count=count, out=askew, backend=backend), wanted)
    if layout.overlaps:
        with pytest.raises(KernelError, match="twice"):
            unpack(packed, buffer, datatype, count=count, backend=backend)
        return
    before = memory.clone()
    fresh = torch.arange(len(wanted), dtype=torch.int64).mul(91).to(torch.uint8)
    unpack(fresh, buffer, datatype, count=count, backend=backend)
    before[torch.from_numpy(offsets)] = fresh
    assert torch.equal(memory, before)
    unpack(wanted, buffer, datatype, count=count, backend=backend)
    assert torch.equal(pack(buffer, datatype, count=count, backend=backend), wanted)


@pytest.mark.parametrize(
    "length",
    [
        1,
        2,
        3,
        4,
        5,
        7,
        8,
        9,
        15,
        16,
        17,
        31,
        32,
        33,
        48,
        63,
        64,
        65,
        100,
        128,
        191,
        1000,
        1023,
        1024,
        5000,
    ],
)
def test_cpp_blocks_of_every_length(length: int) -> None:
    """Two, three and four dimensions, on both sides of every limit of the C++."""
    for counts in ((7,), (3, 5, 2)) if length > 200 else ((7,), (40, 3), (3, 5, 2)):
        datatype, stride = named(length), length + 3
        for count in counts:
            datatype = hvector(count, 1, stride, datatype)
            stride = stride * count + 5
        check("cpp", datatype, 1, length % 3)


@pytest.mark.parametrize("item", [1, 2, 4, 8, 16])
def test_cpp_transposed(item: int) -> None:
    """Neighbours in memory are packed far apart: tiles, and their ragged ends."""
    for rows, columns in ((70, 35), (9, 70)):
        whole = hvector(rows, 1, item * (columns + 9), hvector(columns, 1, item, named(item)))
        turned = hvector(columns, 1, item, hvector(rows, 1, item * (columns + 9), named(item)))
        assert canonical(whole) != canonical(turned)
        check("cpp", hvector(3, 1, item * 7000, turned), 1, 1)
        check(
            "cpp",
            hvector(
                columns,
                1,
                item,
                hvector(2, 1, item * 7000, hvector(rows, 1, item * (columns + 9), named(item))),
            ),
            1,
            0,
        )


@pytest.mark.parametrize("block", [4, 24, 200, 3000])
def test_cpp_large_results_pass_the_caches(block: int) -> None:
    """The road past the caches and several threads, at addresses of every kind."""
    count = 5 * 2**20 // block
    memory = torch.randint(0, 256, (count * (block + 4) + 64,), dtype=torch.uint8)
    view = memory[5:].as_strided((count, block), (block + 4, 1))
    wanted = view.clone().view(-1)
    out = torch.zeros(wanted.numel() + 7, dtype=torch.uint8)[7:]
    assert torch.equal(pack(view, out=out, backend="cpp"), wanted)
    target = torch.zeros_like(memory)
    unpack(out, target[5:].as_strided((count, block), (block + 4, 1)), backend="cpp")
    assert torch.equal(target[5:].as_strided((count, block), (block + 4, 1)).reshape(-1), wanted)
    assert int(target.count_nonzero()) == int(wanted.count_nonzero())


@settings(QUICK, max_examples=20)
@given(st.data())
def test_tensor_views(data: Any) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.bool]))
    whole = torch.randint(0, 2, shape).to(dtype)
    view = whole[
        tuple(
            slice(data.draw(st.integers(0, n - 1)), None, data.draw(st.integers(1, 3)))
            for n in shape
        )
    ]
    view = view.permute(data.draw(st.permutations(range(len(shape)))))
    for backend in BACKENDS:
        packed = pack(view, backend=backend).view(dtype).view(view.shape)
        assert torch.equal(packed, view)
        other = torch.zeros_like(whole).as_strided(view.shape, view.stride(), view.storage_offset())
        unpack(packed.view(-1), other, backend=backend)
        assert torch.equal(other, view)
    assert canonical(from_tensor_view(view)).size == view.numel() * view.element_size()
    whole_type = from_tensor_view(view, whole)
    assert torch.equal(pack(whole, whole_type).view(dtype).view(view.shape), view)


def test_views_are_one_block_however_they_are_cut() -> None:
    x = torch.zeros(4, 6, 8)
    assert layout_of(x) == layout_of(x.view(24, 8))
    assert layout_of(x).counts == (768,)  # type: ignore[union-attr]
    assert layout_of(x[:, 2]).counts == (32, 4)  # type: ignore[union-attr]
    assert layout_of(x[:, :, 3]).counts == (4, 24)  # type: ignore[union-attr]
    assert layout_of(x[1:3, 2:4, 3:6]).counts == (12, 2, 2)  # type: ignore[union-attr]
    assert layout_of(x[:0]).size == 0
    assert layout_of(torch.zeros(3, 1).expand(3, 4)).overlaps
    assert layout_of(x.permute(2, 1, 0), order_free=True).counts == (768,)  # type: ignore[union-attr]


def test_bad_input() -> None:
    x, f32 = torch.zeros(4, 4), named("float32")
    with pytest.raises(KernelError, match="another storage"):
        from_tensor_view(torch.zeros(3), x)
    with pytest.raises(KernelError, match="not a negative extent"):
        resized(f32, 0, -4)
    with pytest.raises(KernelError, match="did you mean 'float32'"):
        named("float23")
    with pytest.raises(KernelError, match="expected 0 or more"):
        vector(-1, 1, 1, f32)
    with pytest.raises(KernelError, match=r"box inside 0 \.\. 4"):
        subarray([4], [3], [2], f32)
    with pytest.raises(KernelError, match="equally many"):
        subarray([4, 4], [3], [0], f32)
    with pytest.raises(KernelError, match="C or F"):
        subarray([4], [3], [0], f32, "Z")
    with pytest.raises(KernelError, match="equally many"):
        struct([1], [0, 4], [f32])
    with pytest.raises(KernelError, match="at least 1 byte"):
        named(0)
    with pytest.raises(KernelError, match=r"0 \.\. 72 of a buffer .*within 0 \.\. 64"):
        pack(x, contiguous(18, f32))
    with pytest.raises(KernelError, match=r"-4 \.\. 4 of a buffer"):
        pack(x, hvector(2, 1, -4, f32))
    with pytest.raises(KernelError, match="64 bytes"):
        pack(x, out=torch.zeros(63, dtype=torch.uint8))
    with pytest.raises(KernelError, match="64 bytes"):
        unpack(torch.zeros(32, dtype=torch.uint8)[::2], x)
    with pytest.raises(KernelError, match="twice"):
        unpack(torch.zeros(48, dtype=torch.uint8), torch.zeros(3, 1).expand(3, 4))
    with pytest.raises(KernelError, match="without a type"):
        pack(x, count=2)
    with pytest.raises(KernelError, match="did you mean 'cpp'"):
        pack(x, backend="cppp")
    deep = f32
    with pytest.raises(KernelError, match="nested types"):
        for _ in range(200):
            deep = hvector(1, 1, 1, deep)
    many = hindexed([1, 2], [0, 9], named(1))
    with pytest.raises(KernelError, match="irregular blocks"):
        canonical(contiguous(2**20, many))
    with pytest.raises(KernelError, match=r"2\^62"):
        contiguous(2**40, contiguous(2**40, f32))


def test_nothing_is_packed_of_nothing() -> None:
    x = torch.arange(8)
    for datatype in (
        contiguous(0, named(4)),
        vector(0, 3, 4, named(4)),
        indexed([], [], named(4)),
        struct([0, 0], [0, 9], [named(4)] * 2),
    ):
        for backend in BACKENDS:
            assert pack(x, datatype, backend=backend).numel() == 0
            unpack(torch.empty(0, dtype=torch.uint8), x, datatype, backend=backend)
    assert pack(x, named(8), count=0).numel() == 0
    assert torch.equal(x, torch.arange(8))


def test_explains_what_it_is_told() -> None:
    explanation = explain("subarray([256, 512, 1024], [47, 13, 100], [0, 0, 0], float32)")
    assert "flatten" not in explanation
    assert "400 x 13 x 47 at strides 1, 4,096, 2,097,152 (3-D)" in explanation
    assert "16 bytes divide" in explanation
    assert "244,400 over an extent" in explanation
    explanation = explain("float32[256, 256, 256][:, 0, ::2]")
    assert "4 x 128 x 256 at strides 1, 8, 262,144" in explanation
    assert "elide" in explain("hvector(1, 1, 9, contiguous(3, float))", count=2)
    assert "contains a byte twice" in explain("hvector(4, 1, 2, float32)")
    assert "in any order" in explain("hvector(3, 1, 4, hvector(4, 1, 64, float))")
    assert "list of 2 irregular blocks" in explain("indexed([1, 2], [0, 4], byte)")
    assert "0 over an extent of 0" in explain("contiguous(0, byte)")


def test_parses_slices_as_numpy_does() -> None:
    whole = np.arange(6 * 7 * 8, dtype=np.int32).reshape(6, 7, 8)
    memory = torch.from_numpy(whole)
    for text in ("[1]", "[:, -2]", "[1:5:2, ::3, 7]", "[2, 3, 4]", "[::-1, 2:, ::-3]", "[4:2]"):
        result = pack(memory, parse(f"int32[6, 7, 8]{text}")).view(torch.int32).numpy()
        np.testing.assert_array_equal(result, eval(f"whole{text}").reshape(-1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vector(1, 2", "not an expression"),
        ("vectr(1, 2, 3, byte)", "did you mean 'vector'"),
        ("vector(1, 2, byte)", r"vector\(count, length, stride, base\)"),
        ("vector(1, 2, 3, 4)", "base to be a type"),
        ("vector(1, 2.5, 3, byte)", "a constructor"),
        ("__import__('os').system('true')", "a constructor"),
        ("[1, 2]", "expected a type"),
        ("float32[2, 3][0, 0, 0]", "at most 2 indices"),
        ("float32[2, 3][5]", "size 2"),
        ("float32[2, 3][::0]", "other than 0"),
        ("flot[2]", "one of byte"),
        ("subarray(3, [1], [0], byte)", r"sizes to be a Sequence"),
        ("float32[-1]", "sizes of 0 or more"),
        ("(" * 5000, "not an expression"),
    ],
)
def test_text_that_is_no_type(text: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        parse(text)


def test_estimates_know_blocks_from_bytes() -> None:
    call, tiny = Pack(canonical(named(2**20))), Pack(canonical(hvector(2**18, 1, 512, named(4))))
    kernel = dispatch(call)
    assert call.moved_bytes == 2**21
    assert tiny.moved_bytes == 2**20 + 64 * 2**18
    from shoal.kernel.dispatch import here

    assert kernel.estimate(tiny, here()).step_s.value > kernel.estimate(call, here()).step_s.value
    assert dispatch(Unpack(canonical(named(8)))).op == "unpack"


def test_triton_refuses_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for op, call in (("pack", Pack(canonical(named(8)))), ("unpack", Unpack(canonical(named(8))))):
        reason = kernels_of(op)["triton"].refuses(call)
        assert reason is not None
        wanted = "Triton" if importlib.util.find_spec("triton") is None else "GPU"
        assert wanted in reason


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("skew", [0, 1])
def test_every_second_word(dtype: torch.dtype, skew: int) -> None:
    """Packed a register at a time, up to the last word of the memory and not beyond."""
    for count in (1, 7, 8, 9, 16, 17, 33, 200):
        whole = torch.arange(skew + 2 * count - 1, dtype=dtype)
        result = pack(whole[skew::2], backend="cpp")
        assert torch.equal(result.view(dtype), whole[skew::2].contiguous())


def test_a_committed_type_packs_what_has_its_strides() -> None:
    x = torch.arange(2 * 6 * 8, dtype=torch.float32).view(2, 6, 8)
    ready = commit(x[0, :, 1:3])
    for view in (x[0, :, 1:3], x[1, :, 5:7]):
        out = torch.zeros(view.numel() * 4, dtype=torch.uint8)
        assert torch.equal(ready(view), pack(view))
        assert torch.equal(ready(view, out).view(torch.float32), view.reshape(-1))
    with pytest.raises(KernelError, match="the memory of the buffer"):
        ready(x[1, 5:, 7:])
    with pytest.raises(KernelError, match="48 bytes"):
        ready(x[0, :, 1:3], torch.zeros(47, dtype=torch.uint8))
