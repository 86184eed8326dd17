"""Writing programs as Python functions.

A function that is marked ``@tile.kernel`` gets a :class:`Builder` and its options, and calls the
builder once for every instruction; loops and branches are functions within it::

    @tile.kernel
    def double(k, *, n: int = 64):
        (block,) = k.grid(n // 32)
        x = k.view_global(k.pointer("x", "fp32"), (n,))
        y = k.view_global(k.pointer("y", "fp32"), (n,))
        tile = k.load(x, (block * 32,), (32,))
        k.store(y, (block * 32,), k.add(tile, tile))

``double.trace(n=128)`` is the checked program.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from shoal.core.errors import KernelError, nearest
from shoal.kernel.tile import ir
from shoal.kernel.tile.ir import Expr, Global, Register, Shared, TileProgram, Value, number
from shoal.kernel.tile.layout import TileLayout, reduce
from shoal.kernel.tile.target import target_named
from shoal.kernel.tile.types import TileType, tile_type

Body = Callable[..., Any]
OPS = ("add", "sub", "mul", "div", "min", "max", "and", "or", "xor")


class Builder:
    """Collects the instructions of one program.

    Args:
        name: of the program, a C identifier.
        target: host or cuda.
        warps: of a block.
    """

    def __init__(self, name: str, target: str = "host", warps: int = 1) -> None:
        self.target = target_named(target)
        if not name.isidentifier() or warps < 1:
            raise KernelError(
                f"tile: program {name!r} of {warps} warps: expected a name, 1 or more"
            )
        self.warps = warps
        self.program = TileProgram(name, target, self.target.warp * warps)
        self._block = self.program.body
        self._count = 0

    # Parameters and the grid.

    def pointer(self, name: str, dtype: str | TileType) -> ir.Pointer:
        """An address the program is given."""
        pointer = ir.Pointer(name, tile_type(dtype))
        self.program.pointers += (pointer,)
        return pointer

    def scalars(self, *names: str) -> tuple[Expr, ...]:
        """Whole numbers the program is given."""
        self.program.scalars += names
        return tuple(Expr("name", (name,)) for name in names)

    def grid(self, *counts: Expr | int) -> tuple[Expr, ...]:
        """How many blocks there are in each dimension; the indices of this one."""
        self.program.grid = tuple(number(count) for count in counts)
        out = tuple(Expr("name", (f"block{d}",)) for d in range(len(counts)))
        self._add(ir.BlockIndices(out))
        return out

    # Memory.

    def view_global(
        self,
        pointer: ir.Pointer,
        shape: Sequence[Expr | int],
        strides: Sequence[Expr | int] | None = None,
        *,
        dtype: str | TileType | None = None,
        in_bits: bool = False,
    ) -> Global:
        """Look at memory as a tensor; row after row, if no strides are given."""
        sizes = tuple(number(size) for size in shape)
        if strides is None:
            steps = [number(1)]
            for size in reversed(sizes[1:]):
                steps.insert(0, steps[0] * size)
        else:
            steps = [number(step) for step in strides]
        if len(steps) != len(sizes):
            raise KernelError(f"tile: view of {len(sizes)} sizes and {len(steps)} strides")
        of = pointer.dtype if dtype is None else tile_type(dtype)
        out = Global(self._name("g"), pointer, of, sizes, tuple(steps), in_bits)
        self._add(ir.GlobalView(out))
        return out

    def shared(
        self,
        dtype: str | TileType,
        shape: Sequence[int],
        *,
        swizzle: tuple[int, int, int] | None = None,
    ) -> Shared:
        """Memory of the block."""
        layout = ir.SharedLayout.rows(*shape, swizzle=swizzle)
        out = Shared(self._name("s"), tile_type(dtype), layout)
        self._add(ir.AllocShared(out))
        return out

    def free(self, tensor: Shared) -> None:
        """The memory may be used for another tensor."""
        self._add(ir.FreeShared(tensor))

    def register(
        self,
        dtype: str | TileType,
        shape: Sequence[int],
        *,
        fill: float = 0.0,
        layout: TileLayout | None = None,
    ) -> Register:
        """A tile whose elements are all ``fill``."""
        out = self._register(tile_type(dtype), shape, layout)
        self._add(ir.AllocRegister(out, fill))
        return out

    def load(
        self,
        source: Global | Shared,
        offsets: Sequence[Expr | int],
        shape: Sequence[int],
        *,
        masked: bool = False,
        layout: TileLayout | None = None,
    ) -> Register:
        """Read a tile of global or shared memory."""
        out = self._register(source.dtype, shape, layout)
        at = tuple(number(offset) for offset in offsets)
        if isinstance(source, Global):
            self._add(ir.LoadGlobal(out, source, at, masked))
        else:
            self._add(ir.LoadShared(out, source, at))
        return out

    def store(
        self,
        target: Global | Shared,
        offsets: Sequence[Expr | int],
        value: Register,
        *,
        masked: bool = False,
    ) -> None:
        """Write a tile to global or shared memory."""
        at = tuple(number(offset) for offset in offsets)
        if isinstance(target, Global):
            self._add(ir.StoreGlobal(target, at, value, masked))
        else:
            self._add(ir.StoreShared(target, at, value))

    def copy_async(
        self,
        target: Shared,
        at: Sequence[Expr | int],
        source: Global,
        offsets: Sequence[Expr | int],
        shape: Sequence[int],
        *,
        masked: bool = False,
    ) -> None:
        """Begin to copy a tile from global to shared memory."""
        first = tuple(number(offset) for offset in at)
        where = tuple(number(offset) for offset in offsets)
        self._add(ir.CopyAsync(target, first, source, where, tuple(shape), masked))

    def commit(self) -> None:
        """The copies begun since the last commit are a group."""
        self._add(ir.CommitGroup())

    def wait(self, pending: int = 0) -> None:
        """Wait until at most this many groups are unfinished."""
        self._add(ir.WaitGroup(pending))

    def sync(self) -> None:
        """Wait for all threads of the block."""
        self._add(ir.Sync())

    # Arithmetic.

    def view(
        self,
        value: Register,
        dtype: str | TileType,
        shape: Sequence[int],
        *,
        layout: TileLayout | None = None,
    ) -> Register:
        """The same bits of every thread as another type."""
        out = self._register(tile_type(dtype), shape, layout)
        self._add(ir.View(out, value))
        return out

    def cast(self, value: Register, dtype: str | TileType) -> Register:
        """The same numbers in another type."""
        if tile_type(dtype) == value.dtype:
            return value
        out = self._register(tile_type(dtype), value.shape, value.layout)
        self._add(ir.Cast(out, value))
        return out

    def elementwise(self, op: str, a: Register | float, b: Register | float) -> Register:
        """One of add, sub, mul, div, min, max, and, or, xor."""
        if op not in OPS:
            raise KernelError(f"tile: operation {op!r}: expected one of {', '.join(OPS)}")
        tiles = [value for value in (a, b) if isinstance(value, Register)]
        if not tiles or len({tile.dtype for tile in tiles}) > 1:
            raise KernelError(
                f"tile: {op} of {a} and {b}: expected registers of one type, or a number"
            )
        if len({len(tile.shape) for tile in tiles}) > 1:
            raise KernelError(f"tile: {op} of {a} and {b}: expected as many dimensions")
        shape = tuple(max(sizes) for sizes in zip(*(tile.shape for tile in tiles), strict=True))
        out = self._register(tiles[0].dtype, shape, None)
        self._add(ir.Elementwise(out, op, (a, b)))
        return out

    def add(self, a: Register | float, b: Register | float) -> Register:
        """Sum."""
        return self.elementwise("add", a, b)

    def sub(self, a: Register | float, b: Register | float) -> Register:
        """Difference."""
        return self.elementwise("sub", a, b)

    def mul(self, a: Register | float, b: Register | float) -> Register:
        """Product, element by element."""
        return self.elementwise("mul", a, b)

    def reduce(self, value: Register, dim: int, op: str = "add") -> Register:
        """Sum (``add``) or maximum (``max``) along a dimension, which becomes 1."""
        if op not in ("add", "max") or not 0 <= dim < len(value.shape):
            raise KernelError(f"tile: reduce {op!r} of {value} along {dim}: expected add or max")
        shape = tuple(1 if d == dim else size for d, size in enumerate(value.shape))
        layout = None if value.layout is None else reduce(value.layout, (dim,))
        out = self._register(value.dtype, shape, layout)
        self._add(ir.Reduce(out, op, value, dim))
        return out

    def dot(self, a: Register, b: Register, c: Register) -> Register:
        """``c + a @ b``, summed in the type of c."""
        out = self._register(c.dtype, c.shape, c.layout)
        self._add(ir.Dot(out, a, b, c))
        return out

    def print(self, text: str, value: Value) -> None:
        """Show a value when the program is interpreted."""
        self._add(ir.Print(text, value))

    # Control.

    def loop(self, count: Expr | int, *carried: Value) -> Callable[[Body], Any]:
        """A loop: the function gets (index, *carried) and returns what is carried on.

        The name of the function becomes what is carried after the last round: one value, or a
        tuple of them.
        """
        variable = Expr("name", (self._name("i"),))
        return functools.partial(self._loop, ir.For(variable, number(count)), (variable,), carried)

    def loop_while(self, condition: Callable[..., Expr], *carried: Value) -> Callable[[Body], Any]:
        """A loop for as long as a condition of what is carried holds."""
        return functools.partial(self._loop, ir.While(number(0)), (), carried, condition=condition)

    def _loop(
        self,
        one: ir.For | ir.While,
        head: tuple[Expr, ...],
        carried: tuple[Value, ...],
        body: Body,
        *,
        condition: Callable[..., Expr] | None = None,
    ) -> Any:
        arguments = tuple(self._like(value) for value in carried)
        if isinstance(one, ir.While) and condition is not None:
            one.condition = condition(*arguments)
        self._add(one)
        yielded = self._inside(one.body, body, (*head, *arguments))
        if len(yielded) != len(carried):
            raise KernelError(
                f"tile: a loop carries {len(carried)} values and returns {len(yielded)}; "
                "expected as many"
            )
        results = tuple(self._like(value) for value in carried)
        for values in zip(carried, arguments, yielded, results, strict=True):
            self._alike(values[0], values[2])
            one.carried.append(ir.Carried(*values))
        return results[0] if len(results) == 1 else results

    def branch(self, condition: Expr, then: Body, otherwise: Body | None = None) -> Any:
        """Do one or the other; what the two functions return, which must be alike."""
        one = ir.If(condition)
        self._add(one)
        first = self._inside(one.body, then, ())
        second = self._inside(one.otherwise, otherwise, ()) if otherwise else ()
        if len(first) != len(second):
            raise KernelError(
                f"tile: the branches return {len(first)} and {len(second)} values; expected as many"
            )
        results = tuple(self._like(value) for value in first)
        for a, b, result in zip(first, second, results, strict=True):
            self._alike(a, b)
            one.carried.append(ir.Carried(a, result, b, result))
        return results[0] if len(results) == 1 else results

    def _inside(
        self, block: list[ir.Instruction], body: Body, arguments: tuple[Value, ...]
    ) -> tuple[Value, ...]:
        outer, self._block = self._block, block
        try:
            result = body(*arguments)
        finally:
            self._block = outer
        if result is None:
            return ()
        return tuple(result) if isinstance(result, tuple) else (result,)

    def _like(self, value: Value) -> Value:
        if isinstance(value, Register):
            return self._register(value.dtype, value.shape, value.layout)
        return Expr("name", (self._name("n"),))

    @staticmethod
    def _alike(a: Value, b: Value) -> None:
        def kind(value: Value) -> object:
            return (value.dtype, value.shape) if isinstance(value, Register) else "a number"

        if kind(a) != kind(b):
            raise KernelError(f"tile: {a} becomes {b}: expected the same type and shape")

    def _register(
        self, dtype: TileType, shape: Sequence[int], layout: TileLayout | None
    ) -> Register:
        return Register(self._name("v"), dtype, tuple(shape), layout)

    def _name(self, letter: str) -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def _add(self, one: ir.Instruction) -> None:
        self._block.append(one)


class TileKernel:
    """A function that writes a program.

    Args:
        function: gets a :class:`Builder` and, by name, its options.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.name = function.__name__
        self.__doc__ = function.__doc__

    def options(self) -> dict[str, Any]:
        """Its options with their defaults."""
        parameters = list(inspect.signature(self.function).parameters.values())[1:]
        return {p.name: p.default for p in parameters}

    def trace(
        self, *, target: str = "host", warps: int = 1, name: str | None = None, **options: Any
    ) -> TileProgram:
        """The program for these options, its layouts inferred, and checked.

        Raises:
            KernelError: an unknown option, or a program that is wrong.
        """
        from shoal.kernel.tile.passes import finish

        known = self.options()
        for option in options:
            if option not in known:
                raise KernelError(
                    f"tile: {self.name} has no option {option!r}; expected {', '.join(known)}; "
                    f"{nearest(option, known)}"
                )
        builder = Builder(name or self.name, target, warps)
        self.function(builder, **options)
        return finish(builder.program)


def kernel(function: Callable[..., None]) -> TileKernel:
    """Mark a function as one that writes a program."""
    return TileKernel(function)
