"""What happens to a program between being written and being run.

Casts are expanded to ones that machines have, layouts inferred from what the products and the
vector loads want, unused results dropped, loads given their width, shared memory
placed by lifetimes, and all of it checked.
"""

from __future__ import annotations

import math

from shoal.core.errors import KernelError
from shoal.kernel.tile import ir
from shoal.kernel.tile.ir import Register, Shared, TileProgram, bodies, reads, walk, writes
from shoal.kernel.tile.layout import TileLayout, local, reduce, replicate, spatial
from shoal.kernel.tile.target import Target, target_named
from shoal.kernel.tile.types import TileType, tile_type
from shoal.kernel.tile.verify import verify


def finish(program: TileProgram) -> TileProgram:
    """All passes, in their order; changes the program and returns it.

    Raises:
        KernelError: the program is wrong.
    """
    expand_casts(program)
    drop_dead(program)
    infer_layouts(program)
    select_vectors(program)
    allocate_shared(program)
    verify(program)
    return program


def _direct(source: TileType, target: TileType) -> bool:
    """Whether machines have this conversion: from a table, or between neighbours."""
    fp32 = tile_type("fp32")
    if source.narrow and not target.narrow:
        return True
    if fp32 in (source, target):
        return True
    return source.kind != "float" and target.kind != "float" and not target.narrow


def expand_casts(program: TileProgram) -> None:
    """A cast that no machine has becomes two, through fp32, which holds all narrow numbers.

    Arithmetic on types of few bits, but for that of bits, is done in fp32 too.
    """
    fp32, count = tile_type("fp32"), 0

    def fresh(dtype: TileType, like: Register) -> Register:
        nonlocal count
        count += 1
        return Register(f"x{count}", dtype, like.shape, like.layout)

    def expand(body: list[ir.Instruction]) -> None:
        out: list[ir.Instruction] = []
        for one in body:
            for inner in bodies(one):
                expand(inner)
            if isinstance(one, ir.Cast) and not _direct(one.value.dtype, one.out.dtype):
                middle = fresh(fp32, one.value)
                out += [ir.Cast(middle, one.value), ir.Cast(one.out, middle)]
                continue
            bitwise = isinstance(one, ir.Elementwise) and one.op in ("and", "or", "xor")
            if (
                isinstance(one, ir.Elementwise)
                and not bitwise
                and one.out.dtype not in (fp32, tile_type("int32"))
            ):
                wide = fresh(fp32, one.out)
                inputs: list[Register | float] = []
                for value in one.inputs:
                    if isinstance(value, Register):
                        inputs.append(fresh(fp32, value))
                        out.append(ir.Cast(inputs[-1], value))  # type: ignore[arg-type]
                    else:
                        inputs.append(value)
                out.append(ir.Elementwise(wide, one.op, (inputs[0], inputs[1])))
                out.append(ir.Cast(one.out, wide))
                continue
            out.append(one)
        body[:] = out

    expand(program.body)


def drop_dead(program: TileProgram) -> None:
    """Instructions whose results are not read are dropped, until there are none."""
    pure = (ir.AllocRegister, ir.LoadGlobal, ir.View, ir.Cast, ir.Elementwise, ir.Reduce, ir.Dot)

    def sweep(body: list[ir.Instruction], used: set[int]) -> None:
        for one in body:
            for inner in bodies(one):
                sweep(inner, used)
        body[:] = [
            one
            for one in body
            if not isinstance(one, pure) or any(id(value) in used for value in writes(one))
        ]

    while True:
        before = sum(1 for _ in walk(program.body))
        sweep(program.body, {id(value) for one in walk(program.body) for value in reads(one)})
        if sum(1 for _ in walk(program.body)) == before:
            return


def infer_layouts(program: TileProgram) -> None:
    """Give every register a layout: products say what they want, and it spreads from there.

    Raises:
        KernelError: two uses of a register want different layouts.
    """
    target = target_named(program.target)
    warps = program.threads // target.warp
    while True:
        changed = False
        for one in walk(program.body):
            changed |= _infer_one(one, target, warps)
        if changed:
            continue
        # Nothing follows any more: the first that is left takes a plain layout.
        left = [
            value for one in walk(program.body) for value in writes(one) if value.layout is None
        ]
        if not left:
            return
        left[0].layout = plain(left[0].shape, program.threads)


def plain(shape: tuple[int, ...], threads: int) -> TileLayout:
    """Row after row, first over places of a thread's vector, then threads, then places."""
    total = math.prod(shape)
    out = local(*(1,) * len(shape))
    left, use = list(shape), min(threads, total & -total)
    layout_threads = use
    # From the last dimension outwards, as many threads as divide it.
    for dim in reversed(range(len(shape))):
        part = math.gcd(left[dim], use)
        if part > 1:
            out = spatial(*(part if d == dim else 1 for d in range(len(shape)))) * out
        left[dim] //= part
        use //= part
    layout_threads //= use
    out = local(*left) * out
    if layout_threads < threads:
        if threads % layout_threads:
            raise KernelError(
                f"tile: a tile of shape {shape} for {threads} threads: expected a number of "
                f"threads that {layout_threads} divides"
            )
        out = replicate(threads // layout_threads, len(shape)) * out
    return out


def _set(value: ir.Value, layout: TileLayout | None) -> bool:
    if not isinstance(value, Register) or layout is None or value.layout is not None:
        return False
    if layout.shape != value.shape:
        raise KernelError(f"tile: {value} needs layout {layout}: expected a layout of its shape")
    value.layout = layout
    return True


def _infer_one(one: ir.Instruction, target: Target, warps: int) -> bool:
    changed = False
    if isinstance(one, ir.Dot):
        (m, k), n = one.a.shape, one.b.shape[-1]
        known = (one.a.layout, one.b.layout, one.c.layout)
        if None in known and one.a.dtype.bits == 16:
            target.check(m, n, k, warps)
            changed |= _set(one.a, target.a(m, k, warps))
            changed |= _set(one.b, target.b(k, n, warps))
            changed |= _set(one.c, target.c(m, n, warps))
        changed |= _set(one.out, one.c.layout) or _set(one.c, one.out.layout)
    elif isinstance(one, ir.Cast):
        changed |= _set(one.out, one.value.layout) or _set(one.value, one.out.layout)
    elif isinstance(one, ir.Elementwise):
        tiles = [value for value in one.inputs if isinstance(value, Register)]
        for tile in tiles:
            if tile.shape == one.out.shape:
                changed |= _set(one.out, tile.layout) or _set(tile, one.out.layout)
            elif one.out.layout is not None:
                small = [d for d, size in enumerate(tile.shape) if size < one.out.shape[d]]
                changed |= _set(tile, reduce(one.out.layout, small))
    elif isinstance(one, ir.Reduce):
        if one.value.layout is not None:
            changed |= _set(one.out, reduce(one.value.layout, (one.dim,)))
    elif isinstance(one, ir.View):
        changed |= _infer_view(one, target)
    elif isinstance(one, ir.Control):
        for carried in one.carried:
            values = (carried.init, carried.argument, carried.yielded, carried.result)
            layouts = [v.layout for v in values if isinstance(v, Register) and v.layout]
            for value in values:
                changed |= _set(value, layouts[0] if layouts else None)
    return changed


def _infer_view(one: ir.View, target: Target) -> bool:
    """Bytes lie so that each thread reads a run of its own: local(outer) spatial(T) local(run)."""
    for known, value in ((one.out, one.value), (one.value, one.out)):
        if known.layout is None or value.layout is not None or value.dtype.bits != 8:
            continue
        count, rest = divmod(known.layout.num_local * known.dtype.bits, 8)
        threads = known.layout.num_threads
        if rest:
            raise KernelError(
                f"tile: View of {known}: each thread holds {count * 8 + rest} bits, which is not "
                "a whole number of bytes; expected a tile of which each thread holds a multiple "
                f"of {8 // math.gcd(8, known.dtype.bits)} elements"
            )
        if value.shape[-1] != threads * count or math.prod(value.shape) != value.shape[-1]:
            raise KernelError(
                f"tile: View between {known} and {value}: {threads} threads of {count} bytes; "
                f"expected {threads * count} bytes in one row"
            )
        run = target.run(known.dtype.bits, count)
        ones = (1,) * (len(value.shape) - 1)
        # Threads that hold the same do so of the bytes, too.
        return _set(value, local(*ones, count // run) * spatial(*ones, threads) * local(*ones, run))
    return False


def select_vectors(program: TileProgram) -> None:
    """Loads and stores take the longest of 16, 8, 4, 2 and 1 bytes that lie in a row."""
    for one in walk(program.body):
        if isinstance(one, ir.LoadGlobal):
            one.vector = _vector(one.out, one.source, one.offsets, one.masked)
        elif isinstance(one, ir.StoreGlobal):
            one.vector = _vector(one.value, one.target, one.offsets, one.masked)


def _vector(value: Register, view: ir.Global, offsets: tuple[ir.Expr, ...], masked: bool) -> int:
    size = view.dtype.bits // 8
    if size == 0 or view.dtype.bits % 8 or view.in_bits or view.strides[-1].constant != 1:
        return 0
    if masked:
        return size
    table = value.held.table()
    # Elements in a row in the last dimension, in every thread.
    run = 1
    while run * size < 16 and table.shape[1] % (2 * run) == 0:
        groups = table.reshape(table.shape[0], -1, 2 * run, table.shape[2])
        steps = groups - groups[:, :, :1]
        if steps[..., :-1].any() or (steps[..., -1] != range(2 * run)).any():
            break
        if (groups[:, :, 0, -1] % (2 * run)).any():
            break
        run *= 2
    # And every row of the view begins at a multiple.
    for offset in (offsets[-1], *view.strides[:-1]):
        while run > 1 and offset.divisor % run:
            run //= 2
    return run * size


def allocate_shared(program: TileProgram) -> None:
    """Place shared tensors: those that do not live at the same time may lie in one place.

    A tensor lives from its allocation to its ``FreeShared``, or to the end.
    """
    live: list[Shared] = []
    top = 0

    def place(body: list[ir.Instruction]) -> None:
        nonlocal top
        for one in body:
            if isinstance(one, ir.AllocShared):
                taken = sorted((t.address or 0, t.nbytes) for t in live)
                at = 0
                for address, size in taken:
                    if at + one.out.nbytes <= address:
                        break
                    at = max(at, -(-(address + size) // 64) * 64)
                one.out.address = at
                live.append(one.out)
                top = max(top, at + one.out.nbytes)
            elif isinstance(one, ir.FreeShared) and one.tensor in live:
                live.remove(one.tensor)
            for inner in bodies(one):
                place(inner)

    place(program.body)
    program.shared_bytes = top
