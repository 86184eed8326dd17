"""Programs: the interpreter against NumPy, C++ against the interpreter, and what is refused."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.claims.lab.tile_interpreter import interpret
from shoal.core.errors import KernelError
from shoal.core.native import compiler, cpu_flags
from shoal.kernel import tile
from shoal.kernel.formats.bits import pack, row_bytes
from shoal.kernel.tile import ir
from shoal.kernel.tile.build import Builder
from shoal.kernel.tile.cuda import cuda_source
from shoal.kernel.tile.host import NEEDS, build_host, host_source
from shoal.kernel.tile.programs import lowbit_matmul, lowbit_pack, stream_copy
from shoal.kernel.tile.types import NARROW, tile_type

native = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
recipe = pytest.mark.skipif(
    compiler() is None or not cpu_flags() >= NEEDS, reason="no compiler or no AVX-512"
)


def run_host(program: ir.TileProgram, pointers: dict[str, torch.Tensor], **scalars: int) -> None:
    function = build_host([program], name="test")[program.name]
    function(*(pointers[p.name].data_ptr() for p in program.pointers), *scalars.values())


@tile.kernel
def chain(k: Builder, *, ops: tuple[str, ...] = ("add",), rows: int = 4, columns: int = 16) -> None:
    """Element by element, one operation after the other, then sums of the rows."""
    x, y = k.pointer("x", "fp32"), k.pointer("y", "fp32")
    (block,) = k.grid(2)
    source = k.view_global(x, (2, rows, columns))
    target = k.view_global(y, (2, rows, 1))
    value = k.load(source, (block, 0, 0), (rows, columns))
    for number, op in enumerate(ops):
        other = k.register("fp32", (1, columns), fill=number + 1.0)
        value = k.elementwise(op, value, other if number % 2 else number + 2.0)
    k.store(target, (block, 0, 0), k.reduce(value, 1))


NUMPY = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "div": np.divide,
}


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.sampled_from(sorted(NUMPY)), max_size=4),
    st.integers(1, 5),
    st.sampled_from([3, 8, 20]),
    st.integers(0, 99),
)
def test_interpreter_is_numpy(ops: list[str], rows: int, columns: int, seed: int) -> None:
    program = chain.trace(ops=tuple(ops), rows=rows, columns=columns)
    x = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(seed))
    y = torch.zeros(2, rows, 1)
    interpret(program, {"x": x, "y": y})
    wanted = x.numpy()
    for number, op in enumerate(ops):
        other = np.full((1, columns), number + 1.0) if number % 2 else number + 2.0
        wanted = NUMPY[op](wanted, np.asarray(other, dtype=np.float32))
    assert np.allclose(y.numpy(), wanted.sum(-1, keepdims=True), rtol=1e-4, atol=1e-4)


@tile.kernel
def reviewed(k: Builder, *, source: str = "uint3", count: int = 64, goal: str = "int32") -> None:
    """Bytes viewed as narrow codes, and what these mean."""
    x, y = k.pointer("x", "uint8"), k.pointer("y", goal)
    (block,) = k.grid(1)
    size = count * tile_type(source).bits // 8
    raw = k.load(k.view_global(x, (1, size)), (block, 0), (1, size))
    spread = tile.spatial(1, 8) * tile.local(1, count // 8)
    codes = k.view(raw, source, (1, count), layout=spread)
    k.store(k.view_global(y, (1, count)), (0, 0), k.cast(codes, goal))


@pytest.mark.parametrize("name", ["uint1", "int3", "uint5", "int8", "e2m1", "e3m3", "e5m2"])
def test_view_reads_the_dense_stream_of_each_thread(name: str) -> None:
    dtype = tile_type(name)
    program = reviewed.trace(source=name, goal="fp32")
    stream = torch.randint(0, 256, (8 * dtype.bits,), dtype=torch.uint8)
    y = torch.empty(64)
    interpret(program, {"x": stream, "y": y})
    load = next(one for one in ir.walk(program.body) if isinstance(one, ir.LoadGlobal))
    table = load.out.held.table()[..., -1]
    mine = stream.numpy()[table]
    bits = np.unpackbits(mine, axis=-1, bitorder="little").reshape(64, dtype.bits)
    codes = bits @ (1 << np.arange(dtype.bits))
    assert np.array_equal(y.numpy(), dtype.values()[codes].astype(np.float32), equal_nan=True)


def sample(weight: str, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [n, k] that are numbers, and their bit streams."""
    dtype = tile_type(weight)
    good = np.flatnonzero(np.isfinite(dtype.values()))
    picks = np.random.default_rng(seed).integers(0, len(good), (n, k))
    codes = torch.from_numpy(good[picks].astype(np.uint8))
    return codes, pack(codes, dtype.bits)


def packed_tiles(
    weight: str, stream: torch.Tensor, n: int, k: int, host: bool
) -> tuple[torch.Tensor, int]:
    program = lowbit_pack.trace(weight=weight)
    steps, bits = -(-k // 16), tile_type(weight).bits
    tiles = torch.full((-(-n // 32) * steps * 64 * bits,), 255, dtype=torch.uint8)
    given = {"codes": stream, "tiles": tiles}
    scalars = {"n": n, "k": k, "row_bits": 8 * row_bytes(k, bits), "steps": steps}
    if host:
        run_host(program, given, **scalars)
    else:
        interpret(program, given, scalars)
    return tiles, steps


def product_of(
    weight: str, n: int, k: int, x: torch.Tensor, *, host: bool, unpack: Any = "recipe"
) -> torch.Tensor:
    _, stream = sample(weight, n, k)
    tiles, steps = packed_tiles(weight, stream, n, k, host=False)
    program = lowbit_matmul.trace(weight=weight, rows=2, out="fp32")
    columns = -(-n // 32) * 32
    y = torch.zeros(x.shape[0], n)
    pointers = {
        "x": torch.nn.functional.pad(x, (0, steps * 16 - k)).bfloat16().contiguous(),
        "tiles": tiles,
        "scales": torch.full((columns,), 0.5, dtype=torch.float16),
        "bias": torch.full((columns,), 3.0),
        "y": y,
    }
    scalars = {"m": x.shape[0], "n": n, "k": steps * 16, "groups": 1, "steps": steps}
    if host:
        function = build_host([program], name="test", unpack=unpack)[program.name]
        function(*(pointers[p.name].data_ptr() for p in program.pointers), *scalars.values())
    else:
        interpret(program, pointers, scalars)
    return y


@pytest.mark.parametrize("weight", ["uint3", "e2m3"])
def test_packing_is_dense_and_the_product_that_of_the_codes(weight: str) -> None:
    n, k = 33, 24
    codes, stream = sample(weight, n, k)
    tiles, steps = packed_tiles(weight, stream, n, k, host=False)
    assert tiles.numel() == 64 * steps * 16 * tile_type(weight).bits // 8
    x = torch.randint(-2, 3, (2, k), generator=torch.Generator().manual_seed(1)).float()
    wanted = x.double().numpy() @ tile_type(weight).values()[codes.numpy()].T * 0.5 + 3
    assert np.array_equal(product_of(weight, n, k, x, host=False).numpy(), wanted)


@pytest.mark.parametrize(
    ("target", "warps", "stages", "split"),
    [("cuda", 1, 0, 1), ("cuda", 2, 3, 2), ("host", 1, 2, 2)],
)
def test_the_program_is_the_same_on_every_machine(
    target: str, warps: int, stages: int, split: int
) -> None:
    """Tensor core or vector lanes, through shared memory or not, in one part or two."""
    weight, n, k, rows = "uint3", 32, 96, 16
    codes, stream = sample(weight, n, k)
    shape: Any = {"weight": weight, "step": 32, "columns": 32, "target": target, "warps": warps}
    tiles = torch.zeros(n * k * 3 // 8, dtype=torch.uint8)
    interpret(
        lowbit_pack.trace(**shape),
        {"codes": stream, "tiles": tiles},
        {"n": n, "k": k, "row_bits": 3 * k, "steps": 3},
    )
    program = lowbit_matmul.trace(rows=rows, out="fp32", stages=stages, split=split, **shape)
    x = torch.randint(-2, 3, (rows, k), generator=torch.Generator().manual_seed(4))
    y = torch.zeros(split, rows, n)
    pointers = {
        "x": x.bfloat16(),
        "tiles": tiles,
        "scales": torch.tensor([0.5, 1.0, 2.0]).half().repeat_interleave(n),
        "bias": torch.zeros(n),
        "y": y,
    }
    interpret(program, pointers, {"m": rows, "n": n, "k": k, "groups": 3, "steps": 1})
    scale = np.array([0.5, 1.0, 2.0]).repeat(32)
    wanted = x.double().numpy() @ (codes.numpy() * scale).T
    assert np.array_equal(y.sum(0).numpy(), wanted)


@native
@pytest.mark.parametrize("weight", ["uint3"])
def test_cpp_packs_as_the_interpreter(weight: str) -> None:
    _, stream = sample(weight, 33, 24)
    one, _ = packed_tiles(weight, stream, 33, 24, host=False)
    other, _ = packed_tiles(weight, stream, 33, 24, host=True)
    assert torch.equal(one, other)


@recipe
@pytest.mark.parametrize(
    ("weight", "unpack"), [("uint5", "recipe"), ("e3m2", "recipe"), ("int7", "generic")]
)
def test_cpp_multiplies_as_the_interpreter(weight: str, unpack: Any) -> None:
    x = torch.randint(-2, 3, (4, 24), generator=torch.Generator().manual_seed(2)).float()
    result = product_of(weight, 40, 24, x, host=True, unpack=unpack)
    assert torch.equal(result, product_of(weight, 40, 24, x, host=False))


@recipe
@pytest.mark.soak
@pytest.mark.parametrize("weight", [str(dtype) for dtype in NARROW])
def test_every_type_through_one_kernel(weight: str) -> None:
    """A product with the identity is every weight, exactly."""
    x = torch.eye(32)
    result = product_of(weight, 32, 32, x, host=True)
    codes, _ = sample(weight, 32, 32)
    wanted = tile_type(weight).values()[codes.numpy()].T.astype(np.float32) * 0.5 + 3
    assert np.array_equal(result.numpy(), wanted.astype(np.float32))
    assert torch.equal(result, product_of(weight, 32, 32, x, host=False))


@tile.kernel
def everything(k: Builder, *, goal: str = "int5", dtype: str = "e3m2") -> None:
    """Most instructions once."""
    x, y = k.pointer("x", "fp32"), k.pointer("y", "fp32")
    count = k.scalars("count")[0]
    (block,) = k.grid(2)
    rows, columns = 4, 16
    source = k.view_global(x, (8, columns))
    target = k.view_global(y, (8, columns))
    first = k.load(source, (block * rows, 0), (rows, columns), masked=True)
    buffer = k.shared("fp32", (rows, columns), swizzle=(2, 0, 4))
    k.store(buffer, (0, 0), first)
    k.sync()
    turned = k.load(
        buffer, (0, 0), (rows, columns), layout=tile.column_spatial(1, 8) * tile.local(4, 2)
    )
    k.free(buffer)

    def half(i: ir.Expr, a: ir.Register, b: ir.Register) -> tuple[ir.Register, ir.Register]:
        return b, k.add(a, k.mul(b, 0.5))

    a, b = k.loop(count, turned, k.mul(turned, 2.0))(half)

    def one(n: ir.Expr, a: ir.Register) -> tuple[ir.Expr, ir.Register]:
        return n + 2, k.sub(a, 1.0)

    _, a = k.loop_while(lambda n, a: n < 5, ir.number(0), a)(one)
    small = k.cast(k.cast(a, goal), "fp32")
    float_ = k.cast(k.cast(b, dtype), "fp32")
    out = k.branch(
        block.equals(0), lambda: k.add(small, float_), lambda: k.elementwise("max", small, float_)
    )
    half_ = k.cast(k.cast(out, "fp16"), "fp32")
    top = k.reduce(half_, 0, "max")
    left = k.cast(k.reduce(k.mul(half_, 1.0), 1), "fp32")
    k.store(target, (block * rows, 0), k.add(k.add(half_, top), left))


@native
def test_cpp_is_the_interpreter_on_most_instructions() -> None:
    program = everything.trace()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(3)) * 3
    one, other = torch.zeros(8, 16), torch.zeros(8, 16)
    interpret(program, {"x": x, "y": one}, {"count": 3})
    run_host(program, {"x": x, "y": other}, count=3)
    assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)
    assert one.abs().sum() > 0


def test_copies_through_shared_memory_arrive() -> None:
    program = stream_copy.trace(stages=3)
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(16, 256)
    interpret(program, {"x": x, "y": y}, {"m": 16, "n": 256})
    assert torch.equal(x, y)
    if compiler() is not None:
        again = torch.zeros(16, 256)
        run_host(program, {"x": x, "y": again}, m=16, n=256)
        assert torch.equal(x, again)


def test_shared_memory_is_used_again_when_freed() -> None:
    def write(k: Builder) -> None:
        k.grid(1)
        one = k.shared("fp32", (64,))
        two = k.shared("fp32", (64,))
        k.free(one)
        three = k.shared("fp32", (32,))
        k.free(two)
        k.free(three)

    program = tile.kernel(write).trace()
    addresses = [one.out.address for one in program.body if isinstance(one, ir.AllocShared)]
    assert addresses == [0, 256, 0]
    assert program.shared_bytes == 512


def test_loads_take_the_longest_vector() -> None:
    def write(k: Builder, *, row: int) -> None:
        (b,) = k.grid(1)
        x = k.view_global(k.pointer("x", "fp32"), (8, row))
        layout = tile.spatial(8, 1) * tile.local(1, 8)
        tile_ = k.load(x, (0, b * 8), (8, 8), layout=layout)
        k.store(x, (0, b * 8), tile_)

    def vector(row: int) -> int:
        program = tile.kernel(write).trace(row=row)
        return next(one.vector for one in program.body if isinstance(one, ir.LoadGlobal))

    assert [vector(row) for row in (64, 66, 67)] == [16, 8, 4]


def test_dead_code_is_dropped() -> None:
    def write(k: Builder) -> None:
        (b,) = k.grid(1)
        x = k.view_global(k.pointer("x", "fp32"), (8, 8))
        unused = k.add(k.load(x, (b, 0), (8, 8)), 1.0)
        k.cast(unused, "bf16")

    program = tile.kernel(write).trace()
    assert [type(one).__name__ for one in program.body] == ["BlockIndices", "GlobalView"]


def bad(what: str) -> None:
    def write(k: Builder) -> None:
        (b,) = k.grid(1)
        x = k.view_global(k.pointer("x", "fp32"), (8, 64))
        rows = tile.spatial(8, 1) * tile.local(1, 64)
        if what == "view":
            value = k.load(x, (b, 0), (8, 64), layout=rows)
            seen = k.view(value, "fp32", (8, 32), layout=tile.spatial(8, 1) * tile.local(1, 32))
            k.store(x, (0, 0), seen)
        elif what == "bits":
            value = k.register("uint3", (8, 1), layout=tile.spatial(8, 1))
            k.store(x, (0, 0), k.view(value, "uint3", (8, 1), layout=tile.spatial(8, 1)))
        elif what == "threads":
            k.store(
                x,
                (b, 0),
                k.register("fp32", (16, 4), layout=tile.spatial(16, 1) * tile.local(1, 4)),
            )
        elif what == "budget":
            k.shared("fp32", (1 << 20,))
        elif what == "freed":
            buffer = k.shared("fp32", (8, 64))
            k.free(buffer)
            k.store(x, (b, 0), k.load(buffer, (0, 0), (8, 64)))
        elif what == "type":
            k.store(x, (b, 0), k.cast(k.load(x, (b, 0), (8, 64)), "bf16"))
        elif what == "narrow":
            y = k.view_global(k.pointer("y", "uint3"), (8, 64))
            k.store(y, (b, 0), k.cast(k.load(x, (b, 0), (8, 64)), "uint3"))
        elif what == "dot":
            a = k.cast(k.load(x, (b, 0), (8, 12)), "bf16")
            w = k.cast(k.load(x, (b, 0), (12, 8)), "bf16")
            k.store(x, (b, 0), k.dot(a, w, k.register("fp32", (8, 8))))
        elif what == "layouts":
            a = k.load(x, (b, 0), (8, 64), layout=rows)
            c = k.load(x, (b, 0), (8, 64), layout=tile.spatial(1, 8) * tile.local(8, 8))
            k.store(x, (b, 0), k.add(a, c))
        elif what in ("uncommitted", "pending", "unsynced", "overwritten"):
            buffer = k.shared("fp32", (8, 64))
            k.copy_async(buffer, (0, 0), x, (b, 0), (8, 64))
            if what != "uncommitted":
                k.commit()
            if what != "pending":
                k.wait(0)
            if what not in ("unsynced", "uncommitted"):
                k.sync()
            value = k.load(buffer, (0, 0), (8, 64))
            if what == "overwritten":
                k.store(buffer, (0, 0), k.add(value, 1.0))
            k.store(x, (b, 0), value)

    tile.kernel(write).trace()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("view", "2048 bits in each of 8 threads and .* 1024"),
        ("bits", "multiple of 8"),
        ("threads", "16 threads and a block has 8"),
        ("budget", "4194304 bytes of shared memory"),
        ("freed", "freed"),
        ("type", "same type"),
        ("narrow", "View it as uint8"),
        ("dot", "nearest"),
        ("layouts", "every thread to hold"),
        ("uncommitted", "not committed"),
        ("pending", "before a copy into it has finished"),
        ("unsynced", "Sync first"),
        ("overwritten", "still be read"),
    ],
)
def test_wrong_programs_are_refused(what: str, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        bad(what)


def test_interpreter_tells_slots_apart() -> None:
    """What the verifier cannot know: the slot that is read is the one that is being filled."""

    def write(k: Builder, *, ahead: int) -> None:
        (b,) = k.grid(1)
        x = k.view_global(k.pointer("x", "fp32"), (1, 64))
        buffer = k.shared("fp32", (2, 8))

        def one(i: ir.Expr) -> None:
            k.copy_async(buffer, (i % 2, 0), x, (b, i * 8), (1, 8))
            k.commit()
            k.wait(1)
            k.sync()
            k.store(x, (b, 0), k.load(buffer, ((i + ahead) % 2, 0), (1, 8)))

        k.loop(2)(one)

    with pytest.raises(KernelError, match="not arrived"):
        interpret(tile.kernel(write).trace(ahead=2), {"x": torch.zeros(64)})


def test_other_mistakes() -> None:
    program = chain.trace()
    with pytest.raises(KernelError, match="expected x, y"):
        interpret(program, {"x": torch.zeros(1)})
    with pytest.raises(KernelError, match="contiguous"):
        interpret(program, {"x": torch.zeros(128).double(), "y": torch.zeros(8)})
    with pytest.raises(KernelError, match="no option 'weigth'"):
        lowbit_matmul.trace(weigth="uint3")
    with pytest.raises(KernelError, match="host, cuda"):
        chain.trace(target="gpu")
    with pytest.raises(KernelError, match="lowbit_matmul"):
        tile.compile_kernel("lowbit_matmull")
    with pytest.raises(KernelError, match="ir, cpp or cuda"):
        tile.compile_kernel("lowbit_matmul", emit="ptx")  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="expected a tile inside it"):
        lay = lowbit_matmul.trace(out="fp32")
        interpret(
            lay,
            {
                "x": torch.zeros(1, 8, dtype=torch.bfloat16),
                "tiles": torch.zeros(256, dtype=torch.uint8),
                "scales": torch.zeros(32, dtype=torch.float16),
                "bias": torch.zeros(32),
                "y": torch.zeros(1, 32),
            },
            {"m": 1, "n": 32, "k": 8, "groups": 1, "steps": 1},
        )


def test_texts() -> None:
    assert "Dot(a=%" in tile.compile_kernel("lowbit_matmul", emit="ir", weight="e3m2")
    cpp = tile.compile_kernel("lowbit_matmul", weight="uint6")
    assert "multishift" in cpp
    assert "multishift" not in host_source([lowbit_matmul.trace(weight="uint6")], unpack="generic")


@pytest.mark.parametrize("weight", ["uint4", "int3", "e3m2", "e4m3"])
def test_cuda_text_has_the_instructions(weight: str) -> None:
    text = tile.compile_kernel("lowbit_matmul", emit="cuda", weight=weight)
    assert "mma(&" in text
    assert "launch_lowbit_matmul" in text
    assert "copy16(" in tile.compile_kernel("stream_copy", emit="cuda")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_cuda_compiles(tmp_path: Path) -> None:
    gpu = {"target": "cuda", "step": 32, "columns": 32}
    programs = [
        lowbit_matmul.trace(weight="e3m2", rows=16, zeros=True, **gpu),
        lowbit_matmul.trace(weight="uint3", rows=16, stages=3, split=4, name="piped", **gpu),
        lowbit_pack.trace(weight="uint3", **gpu),
        stream_copy.trace(target="cuda"),
    ]
    source = tmp_path / "tile.cu"
    source.write_text(cuda_source(*programs))
    done = subprocess.run(
        ["nvcc", "-arch=sm_80", "-cubin", "-o", str(tmp_path / "tile.cubin"), str(source)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
