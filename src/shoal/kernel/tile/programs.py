"""The programs that Shoal runs: products with weights of any type of 1 to 8 bits.

``lowbit_pack`` reads a matrix of N-bit codes, as weight formats store it, in the layout that the
product wants of it, views what each thread holds as bytes, and stores these. ``lowbit_matmul``
reads the bytes, views them as codes again, and multiplies. On the host both are written to be
compiled for a type once, whatever the sizes of the matrix.
"""

from __future__ import annotations

import functools

from shoal.core.errors import KernelError, nearest
from shoal.kernel.tile.build import Builder, TileKernel, kernel
from shoal.kernel.tile.ir import Expr, Register, number
from shoal.kernel.tile.types import tile_type


def _bytes(weight: str, step: int, columns: int) -> int:
    """Bytes of one tile of codes."""
    return step * columns * tile_type(weight).bits // 8


@kernel
def lowbit_pack(k: Builder, *, weight: str = "uint4", step: int = 16, columns: int = 32) -> None:
    """Codes [n, k], a bit stream a row, to tiles of bytes as the product wants them.

    Parameters: codes, tiles; n, k, row_bits (bits from row to row), steps (tiles along k).
    Tiles are [columns' tile, step, bytes]; what lies outside the matrix is code 0.
    """
    codes, tiles = k.pointer("codes", weight), k.pointer("tiles", "uint8")
    n, length, row_bits, steps = k.scalars("n", "k", "row_bits", "steps")
    column, at = k.grid(n.ceil_div(columns), steps)
    size = _bytes(weight, step, columns)
    source = k.view_global(codes, (length, n), (tile_type(weight).bits, row_bits), in_bits=True)
    target = k.view_global(tiles, (n.ceil_div(columns) * steps, size))
    held = k.load(
        source,
        (at * step, column * columns),
        (step, columns),
        masked=True,
        layout=k.target.b(step, columns, k.warps),
    )
    k.store(target, (column * steps + at, 0), k.view(held, "uint8", (1, size)))


@kernel
def lowbit_matmul(
    k: Builder,
    *,
    weight: str = "uint4",
    rows: int = 1,
    step: int = 16,
    columns: int = 32,
    out: str = "bf16",
    zeros: bool = False,
    stages: int = 0,
    split: int = 1,
) -> None:
    """``y[m, n] = sum over groups of scale (sum of x w - zero sum of x) + bias``.

    Parameters: x [m, k] bf16, tiles (of ``lowbit_pack``), scales [columns' tile, group, columns]
    fp16, bias [columns' tile · columns] fp32, y [m, n]; with ``zeros`` also zeros like scales,
    uint8, and sums [m, groups] fp32 of x. Numbers: m, a multiple of ``rows``; n; k, the length of
    a row of x, at least groups · steps · step; groups; steps, tiles of a group.

    With ``stages`` (2 or more) weights pass through shared memory, so many tiles of them at a
    time, all but one on their way; a CPU fetches ahead by itself. With ``split`` so many blocks
    share a tile of y, each a part of the groups, and y is [split, m, n], to be summed.
    """
    if stages == 1 or stages < 0 or split < 1:
        raise KernelError(
            f"lowbit_matmul: stages = {stages}, split = {split}: expected 0 or at least 2 stages, "
            "and at least 1 part"
        )
    x, tiles = k.pointer("x", "bf16"), k.pointer("tiles", "uint8")
    scales, bias = k.pointer("scales", "fp16"), k.pointer("bias", "fp32")
    y = k.pointer("y", out)
    zero_pointer = k.pointer("zeros", "uint8") if zeros else None
    sum_pointer = k.pointer("sums", "fp32") if zeros else None
    m, n, length, groups, steps = k.scalars("m", "n", "k", "groups", "steps")
    count = n.ceil_div(columns)
    if split == 1:
        (column, row), part = k.grid(count, m // rows), number(0)
    else:
        column, row, part = k.grid(count, m // rows, split)
    size = _bytes(weight, step, columns)
    x_view = k.view_global(x, (m, length))
    w_view = k.view_global(tiles, (count * groups * steps, size))
    s_view = k.view_global(scales, (count * groups, columns))
    b_view = k.view_global(bias, (1, count * columns))
    y_view = k.view_global(y, (split, m, n))
    z_view = k.view_global(zero_pointer, (count * groups, columns)) if zero_pointer else None
    t_view = k.view_global(sum_pointer, (m, groups)) if sum_pointer else None
    start = k.register("fp32", (rows, columns), layout=k.target.c(rows, columns, k.warps))
    each = groups.ceil_div(split)
    first = part * each
    mine = each if split == 1 else each.min(groups - first)
    buffer = k.shared("uint8", (stages, size)) if stages else None

    def fetch(at: Expr) -> None:
        """Begin to copy the tile of a step of this block."""
        assert buffer is not None

        def copy() -> None:
            place = column * (groups * steps) + first * steps + at
            k.copy_async(buffer, (at % stages, 0), w_view, (place, 0), (1, size))

        k.branch(at < mine * steps, copy)
        k.commit()

    def codes(at: Expr) -> Register:
        """Bytes of one step."""
        if buffer is None:
            place = column * (groups * steps) + first * steps + at
            return k.load(w_view, (place, 0), (1, size))
        k.wait(stages - 2)
        k.sync()
        raw = k.load(buffer, (at % stages, 0), (1, size))
        fetch(at + (stages - 1))
        return raw

    def group_sum(group: Expr, total: Register) -> Register:
        nothing = k.register("fp32", (rows, columns))

        def product(i: Expr, acc: Register) -> Register:
            at = group * steps + i
            w = k.cast(k.view(codes(at), weight, (step, columns)), "bf16")
            a = k.load(x_view, (row * rows, (first * steps + at) * step), (rows, step))
            return k.dot(a, w, acc)

        acc = k.loop(steps, nothing)(product)
        at = column * groups + first + group
        scale = k.cast(k.load(s_view, (at, 0), (1, columns)), "fp32")
        if z_view is not None and t_view is not None:
            zero = k.cast(k.load(z_view, (at, 0), (1, columns)), "fp32")
            sums = k.load(t_view, (row * rows, first + group), (rows, 1))
            acc = k.sub(acc, k.mul(_spread(k, sums, rows, columns), zero))
        return k.add(total, k.mul(acc, scale))

    for slot in range(stages - 1):
        fetch(number(slot))
    total = k.loop(mine, start)(group_sum)
    if buffer is not None:
        k.wait(0)
        k.free(buffer)
    if split == 1:
        total = k.add(total, k.load(b_view, (0, column * columns), (1, columns)))
    k.store(y_view, (part, row * rows, column * columns), k.cast(total, out), masked=True)


def _spread(k: Builder, value: Register, rows: int, columns: int) -> Register:
    """A column as a tile."""
    nothing = k.register("fp32", (rows, columns), layout=k.target.c(rows, columns, k.warps))
    return k.add(nothing, value)


@kernel
def stream_copy(
    k: Builder, *, dtype: str = "fp32", rows: int = 8, columns: int = 64, stages: int = 3
) -> None:
    """Copy a matrix by tiles through shared memory, some copies under way while one is read.

    Parameters: x, y [m, n]; m, n, multiples of ``rows`` and ``columns``.
    """
    if stages < 2:
        raise KernelError(f"stream_copy: stages = {stages}: expected at least 2")
    x, y = k.pointer("x", dtype), k.pointer("y", dtype)
    m, n = k.scalars("m", "n")
    (block,) = k.grid(m // rows)
    source, target = k.view_global(x, (m, n)), k.view_global(y, (m, n))
    buffer = k.shared(dtype, (stages, rows, columns))
    tiles = n // columns

    def fetch(i: Expr | int) -> None:
        def copy() -> None:
            at = (block * rows, i * columns)
            k.copy_async(buffer, (i % stages, 0, 0), source, at, (rows, columns))

        k.branch(i < tiles if isinstance(i, Expr) else tiles.min(i + 1).equals(i + 1), copy)
        k.commit()

    for i in range(stages - 1):
        fetch(i)

    def one(i: Expr) -> None:
        k.wait(stages - 2)
        k.sync()
        tile = k.load(buffer, (i % stages, 0, 0), (rows, columns))
        k.store(target, (block * rows, i * columns), tile)
        fetch(i + (stages - 1))

    k.loop(tiles)(one)
    k.wait(0)
    k.free(buffer)


PROGRAMS: dict[str, TileKernel] = {
    found.name: found for found in (lowbit_matmul, lowbit_pack, stream_copy)
}


@functools.cache
def program(name: str) -> TileKernel:
    """The program of a name.

    Raises:
        KernelError: there is none.
    """
    if name not in PROGRAMS:
        raise KernelError(
            f"tile program {name!r}: expected one of {', '.join(PROGRAMS)}; "
            f"{nearest(name, PROGRAMS)}"
        )
    return PROGRAMS[name]
