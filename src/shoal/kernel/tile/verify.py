"""What must hold of a program before anything runs it.

Values are made before they are read, and once; shapes and layouts fit; a view has the same bits
in every thread; shared memory is enough, alive, and neither read before a copy into it has
arrived nor written while others may read it. Places that are only known at run time are
distinguished by the interpreter, which checks the same of every element.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from shoal.core.errors import KernelError
from shoal.kernel.tile import ir
from shoal.kernel.tile.ir import Expr, Global, Register, Shared, TileProgram
from shoal.kernel.tile.layout import TileLayout, reduce, row_strides
from shoal.kernel.tile.target import target_named


def places(inner: TileLayout, outer: TileLayout) -> np.ndarray | None:
    """Where each thread holds, of a tile in ``inner``, what belongs to its places in ``outer``.

    Dimensions of size 1 of ``inner`` are spread.

    Returns:
        int64 [T, L of outer], places in ``inner``; None if a thread would need another's.
    """
    if inner.num_threads != outer.num_threads:
        return None
    if inner.same(outer):
        return np.broadcast_to(np.arange(outer.num_local), (outer.num_threads, outer.num_local))
    wanted = outer.table() * (np.asarray(inner.shape) > 1)
    weights = row_strides(inner.shape)
    have = inner.table() @ weights
    order = np.argsort(have, axis=1, kind="stable")
    keys = np.take_along_axis(have, order, 1)
    need = wanted @ weights
    out = np.empty(need.shape, dtype=np.int64)
    for thread in range(len(need)):
        at = np.searchsorted(keys[thread], need[thread]).clip(max=keys.shape[1] - 1)
        if (keys[thread][at] != need[thread]).any():
            return None
        out[thread] = order[thread][at]
    return out


@dataclass
class _Memory:
    """What is known of one shared tensor on the way through the program."""

    copies: list[tuple[Expr, ...]] = field(default_factory=list)  # begun, not committed
    groups: list[tuple[int, tuple[Expr, ...]]] = field(default_factory=list)  # under way
    written: list[tuple[Expr, ...]] = field(default_factory=list)  # since the last Sync
    read: list[tuple[Expr, ...]] = field(default_factory=list)

    def forget(self, name: str) -> None:
        """Drop the places that a name is part of."""

        def stays(at: tuple[Expr, ...]) -> bool:
            return not any(_mentions(expr, name) for expr in at)

        self.copies = [at for at in self.copies if stays(at)]
        self.groups = [(group, at) for group, at in self.groups if stays(at)]
        self.written = [at for at in self.written if stays(at)]
        self.read = [at for at in self.read if stays(at)]


def _mentions(expr: Expr, name: str) -> bool:
    if expr.op == "name":
        return expr.args[0] == name
    return any(_mentions(arg, name) for arg in expr.args if isinstance(arg, Expr))


class _Check:
    def __init__(self, program: TileProgram) -> None:
        self.program = program
        self.target = target_named(program.target)
        self.names = {*program.scalars}
        self.registers: set[int] = set()
        self.views: set[int] = set()
        self.shared: dict[int, _Memory] = {}
        self.freed: set[int] = set()
        self.commits = 0

    def fail(self, one: ir.Instruction, why: str) -> NoReturn:
        raise KernelError(f"tile program {self.program.name}: {type(one).__name__}: {why}")

    def expr(self, one: ir.Instruction, value: Expr) -> None:
        if value.op == "name":
            if str(value.args[0]) not in self.names:
                self.fail(one, f"{value} is not defined here; expected {', '.join(self.names)}")
        elif value.op != "const":
            for arg in value.args:
                assert isinstance(arg, Expr)
                self.expr(one, arg)

    def made(self, one: ir.Instruction, value: ir.Value) -> None:
        if isinstance(value, Expr):
            if value.op == "name":
                self.names.add(str(value.args[0]))
            return
        if id(value) in self.registers:
            self.fail(one, f"{value} is assigned twice; expected a new value")
        threads = value.held.num_threads
        if value.held.shape != value.shape:
            self.fail(one, f"{value} has {value.held}; expected a layout of its shape")
        if threads != self.program.threads:
            self.fail(
                one,
                f"{value} has a layout of {threads} threads and a block has "
                f"{self.program.threads}; expected all of these, some of which may hold the same "
                "(replicate)",
            )
        self.registers.add(id(value))

    def known(self, one: ir.Instruction, value: ir.Value) -> None:
        if isinstance(value, Expr):
            self.expr(one, value)
        elif id(value) not in self.registers:
            self.fail(one, f"{value} is read before its definition")

    def body(self, body: list[ir.Instruction]) -> None:
        for one in body:
            if isinstance(one, ir.Control):
                self.control(one)
                continue
            for value in ir.reads(one):
                self.known(one, value)
            getattr(self, f"on_{type(one).__name__.lower()}", lambda one: None)(one)
            for value in ir.writes(one):
                self.made(one, value)

    def control(self, one: ir.Control) -> None:
        if isinstance(one, ir.If):
            self.expr(one, one.condition)
            self.body(one.body)
            self.body(one.otherwise)
            for carried in one.carried:
                self.known(one, carried.init)
                self.known(one, carried.yielded)
                self.made(one, carried.result)
            return
        for carried in one.carried:
            self.known(one, carried.init)
            self.made(one, carried.argument)
        if isinstance(one, ir.For):
            self.expr(one, one.count)
            self.names.add(str(one.variable.args[0]))
        else:
            self.expr(one, one.condition)
        before = set(self.registers)
        self.body(one.body)
        # A second round, for what lies between the end of one and the beginning of the next;
        # places that the loop's variable is part of are others then.
        if isinstance(one, ir.For):
            for memory in self.shared.values():
                memory.forget(str(one.variable.args[0]))
        inside = self.registers
        self.registers = set(before)
        self.body(one.body)
        self.registers = inside
        for carried in one.carried:
            self.known(one, carried.yielded)
            self.same_layout(one, carried.init, carried.argument)
            self.same_layout(one, carried.yielded, carried.argument)
            self.made(one, carried.result)

    def same_layout(self, one: ir.Instruction, a: ir.Value, b: ir.Value) -> None:
        if isinstance(a, Register) and isinstance(b, Register) and not a.held.same(b.held):
            self.fail(one, f"{a} has {a.held} and {b} has {b.held}; expected the same layout")

    # Memory.

    def on_blockindices(self, one: ir.BlockIndices) -> None:
        self.names |= {str(name.args[0]) for name in one.out}
        for count in self.program.grid:
            self.expr(one, count)

    def on_globalview(self, one: ir.GlobalView) -> None:
        for value in (*one.out.shape, *one.out.strides):
            self.expr(one, value)
        if one.out.pointer not in self.program.pointers:
            self.fail(one, f"{one.out.pointer.name} is not a parameter of the program")
        self.views.add(id(one.out))

    def tile(
        self,
        one: ir.Instruction,
        view: Global | Shared,
        offsets: tuple[Expr, ...],
        shape: tuple[int, ...],
    ) -> None:
        if isinstance(view, Global) and id(view) not in self.views:
            self.fail(one, f"%{view.name} is read before its definition")
        if isinstance(view, Shared):
            self.alive(one, view)
        if len(offsets) != len(view.shape) or len(shape) > len(view.shape):
            self.fail(
                one,
                f"a tile {list(shape)} at {len(offsets)} offsets of a tensor of "
                f"{len(view.shape)} dimensions; expected an offset for each dimension",
            )
        for offset in offsets:
            self.expr(one, offset)

    def on_loadglobal(self, one: ir.LoadGlobal) -> None:
        self.tile(one, one.source, one.offsets, one.out.shape)
        self.same_type(one, one.out, one.source)

    def on_storeglobal(self, one: ir.StoreGlobal) -> None:
        self.tile(one, one.target, one.offsets, one.value.shape)
        self.same_type(one, one.value, one.target)
        if one.value.dtype.bits % 8:
            self.fail(
                one,
                f"{one.value} has elements that share bytes with those of other threads; View it "
                "as uint8 and store the bytes",
            )

    def same_type(self, one: ir.Instruction, value: Register, memory: Global | Shared) -> None:
        if value.dtype != memory.dtype:
            self.fail(one, f"{value} of a tensor of {memory.dtype}; expected the same type")

    def on_allocshared(self, one: ir.AllocShared) -> None:
        if one.out.dtype.bits % 8:
            self.fail(one, f"{one.out.dtype} in shared memory; expected whole bytes, as uint8")
        self.freed.discard(id(one.out))
        self.shared[id(one.out)] = _Memory()

    def on_freeshared(self, one: ir.FreeShared) -> None:
        self.alive(one, one.tensor)
        memory = self.shared[id(one.tensor)]
        if memory.copies or memory.groups:
            self.fail(one, f"%{one.tensor.name} has unfinished copies; wait for them first")
        self.freed.add(id(one.tensor))

    def alive(self, one: ir.Instruction, tensor: Shared) -> None:
        if id(tensor) in self.freed:
            self.fail(one, f"%{tensor.name} is freed; use it before FreeShared")
        if id(tensor) not in self.shared:
            self.fail(one, f"%{tensor.name} is not allocated; allocate it first")

    def on_copyasync(self, one: ir.CopyAsync) -> None:
        self.tile(one, one.source, one.offsets, one.shape)
        self.tile(one, one.target, one.at, one.shape)
        if one.target.dtype != one.source.dtype:
            self.fail(one, f"{one.source.dtype} to {one.target.dtype}; expected the same type")
        self.writable(one).copies.append(one.at)

    def writable(self, one: ir.CopyAsync | ir.StoreShared) -> _Memory:
        """The tensor that is written, in a place that nobody reads any more."""
        memory = self.shared[id(one.target)]
        if one.at in memory.read:
            self.fail(
                one,
                f"%{one.target.name} at {list(map(str, one.at))} may still be read by other "
                "threads; Sync first",
            )
        return memory

    def on_commitgroup(self, one: ir.CommitGroup) -> None:
        self.commits += 1
        for memory in self.shared.values():
            memory.groups += [(self.commits, at) for at in memory.copies]
            memory.copies.clear()

    def on_waitgroup(self, one: ir.WaitGroup) -> None:
        for memory in self.shared.values():
            done = [at for group, at in memory.groups if group <= self.commits - one.pending]
            memory.groups = [
                (group, at) for group, at in memory.groups if group > self.commits - one.pending
            ]
            memory.written += done

    def on_sync(self, one: ir.Sync) -> None:
        for memory in self.shared.values():
            memory.written.clear()
            memory.read.clear()

    def on_loadshared(self, one: ir.LoadShared) -> None:
        self.tile(one, one.source, one.at, one.out.shape)
        self.same_type(one, one.out, one.source)
        memory = self.shared[id(one.source)]
        where = f"%{one.source.name} at {list(map(str, one.at))}"
        if one.at in memory.copies:
            self.fail(
                one,
                f"{where} is read while a copy into it is not committed; CommitGroup, WaitGroup "
                "and Sync first",
            )
        if one.at in [at for _, at in memory.groups]:
            self.fail(one, f"{where} is read before a copy into it has finished; WaitGroup first")
        if one.at in memory.written:
            self.fail(one, f"{where} was written since the last Sync; Sync first")
        memory.read.append(one.at)

    def on_storeshared(self, one: ir.StoreShared) -> None:
        self.tile(one, one.target, one.at, one.value.shape)
        self.same_type(one, one.value, one.target)
        self.writable(one).written.append(one.at)

    # Arithmetic.

    def on_view(self, one: ir.View) -> None:
        a, b = one.value, one.out
        if a.held.num_threads != b.held.num_threads or a.thread_bits != b.thread_bits:
            self.fail(
                one,
                f"{a} has {a.thread_bits} bits in each of {a.held.num_threads} threads and {b} "
                f"{b.thread_bits} in each of {b.held.num_threads}; expected the same",
            )
        if a.thread_bits % 8:
            self.fail(
                one,
                f"{a} has {a.thread_bits} bits in each thread; expected a multiple of 8",
            )

    def on_cast(self, one: ir.Cast) -> None:
        if one.out.shape != one.value.shape:
            self.fail(one, f"{one.value} to {one.out}; expected the same shape")
        self.same_layout(one, one.value, one.out)

    def on_elementwise(self, one: ir.Elementwise) -> None:
        for value in one.inputs:
            if not isinstance(value, Register):
                continue
            fits = all(a in (1, b) for a, b in zip(value.shape, one.out.shape, strict=True))
            if not fits or value.dtype != one.out.dtype:
                self.fail(one, f"{value} into {one.out}; expected its type, and its size or 1")
            if places(value.held, one.out.held) is None:
                self.fail(
                    one,
                    f"{value} has {value.held} and {one.out} {one.out.held}; expected every "
                    "thread to hold its operands",
                )

    def on_reduce(self, one: ir.Reduce) -> None:
        wanted = reduce(one.value.held, (one.dim,))
        if not one.out.held.same(wanted):
            self.fail(one, f"{one.out} has {one.out.held}; expected {wanted}")

    def on_dot(self, one: ir.Dot) -> None:
        (m, k), (k2, n) = one.a.shape, one.b.shape
        if k != k2 or one.c.shape != (m, n) or one.out.shape != (m, n):
            self.fail(one, f"{one.a} times {one.b} plus {one.c}; expected [m, k], [k, n], [m, n]")
        if one.a.dtype != one.b.dtype or one.c.dtype != one.out.dtype:
            self.fail(one, f"{one.a} times {one.b}; expected one type, and one of sums")
        self.same_layout(one, one.c, one.out)


def verify(program: TileProgram) -> None:
    """Check a program whose layouts are known.

    Raises:
        KernelError: says which instruction is wrong, and what is expected.
    """
    target = target_named(program.target)
    if program.shared_bytes > target.shared_bytes:
        raise KernelError(
            f"tile program {program.name}: {program.shared_bytes} bytes of shared memory; a block "
            f"on {program.target} has {target.shared_bytes}; use smaller tiles or fewer stages"
        )
    if not program.grid:
        raise KernelError(f"tile program {program.name}: no grid; give the number of blocks")
    _Check(program).body(program.body)
