"""Programs of the tile machine: what one block of threads does, in typed single assignments.

A value is assigned once. Tensors live in global memory (:class:`Global`, a view of a pointer), in
shared memory (:class:`Shared`, of one block) or in registers (:class:`Register`, spread over the
threads by a layout). Whole numbers that are only known at run time are :class:`Expr`.

Source: Ding et al., Tilus: A Tile-Level GPGPU Programming Language for Low-Precision
Computation, 2025, section 6.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from shoal.core.errors import KernelError
from shoal.kernel.tile.layout import TileLayout, row_strides
from shoal.kernel.tile.types import TileType

_OPS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "<": lambda a, b: int(a < b),
    "<=": lambda a, b: int(a <= b),
    "==": lambda a, b: int(a == b),
    "min": min,
    "max": max,
}


@dataclass(frozen=True, slots=True)
class Expr:
    """A whole number: a constant, a name, or an operation of two others.

    Args:
        op: ``const``, ``name`` or an operation. Division and remainder are of numbers that are
            not negative.
        args: the number, the name, or the two operands.
    """

    op: str
    args: tuple[int | str | Expr, ...]

    def evaluate(self, env: Mapping[str, int]) -> int:
        """Its value where names have these."""
        if self.op == "const":
            assert isinstance(self.args[0], int)
            return self.args[0]
        if self.op == "name":
            return env[str(self.args[0])]
        a, b = (arg.evaluate(env) for arg in self.args if isinstance(arg, Expr))
        return int(_OPS[self.op](a, b))

    @property
    def constant(self) -> int | None:
        """Its value, if it is a constant."""
        return int(str(self.args[0])) if self.op == "const" else None

    @property
    def divisor(self) -> int:
        """A number that divides it for all values of its variables; 0 if it is 0."""
        if self.op == "const":
            return abs(self.constant or 0)
        if self.op == "name":
            return 1
        a, b = (arg.divisor for arg in self.args if isinstance(arg, Expr))
        if self.op == "*":
            return a * b
        return math.gcd(a, b) if self.op in ("+", "-", "min", "max") else 1

    def __str__(self) -> str:
        if self.op in ("const", "name"):
            return str(self.args[0])
        a, b = self.args
        if self.op in ("min", "max"):
            return f"({a} {'<' if self.op == 'min' else '>'} {b} ? {a} : {b})"
        return f"({a} {'/' if self.op == '//' else self.op} {b})"

    def _with(self, op: str, other: Expr | int, swap: bool = False) -> Expr:
        a, b = (number(other), self) if swap else (self, number(other))
        if a.constant is not None and b.constant is not None:
            return number(int(_OPS[op](a.constant, b.constant)))
        if op == "+" and (a.constant == 0 or b.constant == 0):
            return b if a.constant == 0 else a
        if op == "*" and (a.constant == 1 or b.constant == 1):
            return b if a.constant == 1 else a
        if op == "*" and (a.constant == 0 or b.constant == 0):
            return number(0)
        if op in ("//", "-") and b.constant == (1 if op == "//" else 0):
            return a
        return Expr(op, (a, b))

    def __add__(self, other: Expr | int) -> Expr:
        return self._with("+", other)

    def __radd__(self, other: int) -> Expr:
        return self._with("+", other, True)

    def __sub__(self, other: Expr | int) -> Expr:
        return self._with("-", other)

    def __rsub__(self, other: int) -> Expr:
        return self._with("-", other, True)

    def __mul__(self, other: Expr | int) -> Expr:
        return self._with("*", other)

    def __rmul__(self, other: int) -> Expr:
        return self._with("*", other, True)

    def __floordiv__(self, other: Expr | int) -> Expr:
        return self._with("//", other)

    def __mod__(self, other: Expr | int) -> Expr:
        return self._with("%", other)

    def __lt__(self, other: Expr | int) -> Expr:
        return self._with("<", other)

    def __le__(self, other: Expr | int) -> Expr:
        return self._with("<=", other)

    def equals(self, other: Expr | int) -> Expr:
        """1 where both are the same number."""
        return self._with("==", other)

    def min(self, other: Expr | int) -> Expr:
        """The smaller of both."""
        return self._with("min", other)

    def ceil_div(self, other: Expr | int) -> Expr:
        """Quotient, rounded up."""
        return (self + number(other) - 1) // other


def number(value: Expr | int) -> Expr:
    """A constant, or what is an expression already."""
    return value if isinstance(value, Expr) else Expr("const", (int(value),))


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address that the program is given."""

    name: str
    dtype: TileType


@dataclass(eq=False, slots=True)
class Global:
    """A view of memory: element i lies at the sum of i_d stride_d.

    Args:
        pointer: where.
        dtype: of an element; need not be that of the pointer.
        shape: of the view.
        strides: in elements, or in bits.
        in_bits: strides are in bits, for rows that begin at bytes.
    """

    name: str
    pointer: Pointer
    dtype: TileType
    shape: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    in_bits: bool = False


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Where an element of a shared tensor lies: strides, then an exclusive or.

    Args:
        shape: of the tensor.
        strides: in elements.
        swizzle: (width, base, shift) or None: bits [base + shift, base + shift + width) of the
            place are XORed into bits [base, base + width), so that columns spread over banks.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    swizzle: tuple[int, int, int] | None = None

    @staticmethod
    def rows(*shape: int, swizzle: tuple[int, int, int] | None = None) -> SharedLayout:
        """Row after row."""
        return SharedLayout(shape, tuple(row_strides(shape)), swizzle)

    @property
    def size(self) -> int:
        """Elements of memory it takes."""
        top = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        if self.swizzle:
            block = 1 << sum(self.swizzle)
            top = -(-top // block) * block
        return top

    def place(self, index: tuple[int, ...]) -> int:
        """Place of an element."""
        at = sum(i * s for i, s in zip(index, self.strides, strict=True))
        if self.swizzle:
            width, base, shift = self.swizzle
            at ^= ((at >> (base + shift)) & ((1 << width) - 1)) << base
        return at


@dataclass(eq=False, slots=True)
class Shared:
    """A tensor in the memory of one block.

    Args:
        dtype: of an element; 8 bits or more.
        layout: where its elements lie.
        address: its first byte, given by the allocation pass.
    """

    name: str
    dtype: TileType
    layout: SharedLayout
    address: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor."""
        return self.layout.shape

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.layout.size * self.dtype.storage_bytes


@dataclass(eq=False, slots=True)
class Register:
    """A tensor spread over the registers of the threads.

    Args:
        dtype: of an element.
        shape: of the tensor.
        layout: who holds what; None until the layouts are inferred.
    """

    name: str
    dtype: TileType
    shape: tuple[int, ...]
    layout: TileLayout | None = None

    @property
    def held(self) -> TileLayout:
        """The layout.

        Raises:
            KernelError: nothing has said it yet.
        """
        if self.layout is None:
            raise KernelError(f"tile: {self}: its layout is not known; infer the layouts first")
        return self.layout

    @property
    def thread_bits(self) -> int:
        """Bits of it that each thread holds."""
        return self.held.num_local * self.dtype.bits

    def __str__(self) -> str:
        return f"%{self.name}: {self.dtype}{list(self.shape)}"


Value = Register | Expr


@dataclass(eq=False, slots=True)
class Instruction:
    """Base of the instructions."""


@dataclass(eq=False, slots=True)
class BlockIndices(Instruction):
    """The place of the block in the grid, a name for each dimension."""

    out: tuple[Expr, ...]


@dataclass(eq=False, slots=True)
class GlobalView(Instruction):
    """View memory as a tensor."""

    out: Global


@dataclass(eq=False, slots=True)
class AllocShared(Instruction):
    """From here to its ``FreeShared`` the tensor exists; its contents are undefined."""

    out: Shared


@dataclass(eq=False, slots=True)
class FreeShared(Instruction):
    """Its memory may be used again."""

    tensor: Shared


@dataclass(eq=False, slots=True)
class AllocRegister(Instruction):
    """A register tensor whose elements are all the same number."""

    out: Register
    fill: float = 0.0


@dataclass(eq=False, slots=True)
class LoadGlobal(Instruction):
    """Read a tile.

    Args:
        out: as large as the tile.
        source: from where.
        offsets: first index of the tile.
        masked: elements outside the view are 0; else there must be none.
        vector: bytes that a thread reads at once, chosen by a pass.
    """

    out: Register
    source: Global
    offsets: tuple[Expr, ...]
    masked: bool = False
    vector: int = 0


@dataclass(eq=False, slots=True)
class StoreGlobal(Instruction):
    """Write a tile; elements outside the view are left out if ``masked``."""

    target: Global
    offsets: tuple[Expr, ...]
    value: Register
    masked: bool = False
    vector: int = 0


@dataclass(eq=False, slots=True)
class CopyAsync(Instruction):
    """Begin to copy a tile from global to shared memory.

    Args:
        target: into which.
        at: first index in it.
        source: from which.
        offsets: first index in it.
        shape: of the tile, dimensions of the source.
        masked: elements outside the view are 0.
    """

    target: Shared
    at: tuple[Expr, ...]
    source: Global
    offsets: tuple[Expr, ...]
    shape: tuple[int, ...]
    masked: bool = False


@dataclass(eq=False, slots=True)
class CommitGroup(Instruction):
    """The copies begun since the last one make a group."""


@dataclass(eq=False, slots=True)
class WaitGroup(Instruction):
    """Wait until at most this many groups are unfinished."""

    pending: int


@dataclass(eq=False, slots=True)
class Sync(Instruction):
    """All threads of the block have come here, and see what all have written."""


@dataclass(eq=False, slots=True)
class LoadShared(Instruction):
    """Read a tile of a shared tensor."""

    out: Register
    source: Shared
    at: tuple[Expr, ...]


@dataclass(eq=False, slots=True)
class StoreShared(Instruction):
    """Write a tile of a shared tensor."""

    target: Shared
    at: tuple[Expr, ...]
    value: Register


@dataclass(eq=False, slots=True)
class View(Instruction):
    """The same bits of every thread as another type in another layout; moves nothing."""

    out: Register
    value: Register


@dataclass(eq=False, slots=True)
class Cast(Instruction):
    """The same numbers in another type."""

    out: Register
    value: Register


@dataclass(eq=False, slots=True)
class Elementwise(Instruction):
    """Element by element; dimensions of size 1 are spread.

    Args:
        op: add, sub, mul, div, min, max, and, or or xor.
        inputs: two registers, or a register and a number.
    """

    out: Register
    op: str
    inputs: tuple[Register | float, Register | float]


@dataclass(eq=False, slots=True)
class Reduce(Instruction):
    """Sum or maximum along a dimension, which becomes 1."""

    out: Register
    op: str
    value: Register
    dim: int


@dataclass(eq=False, slots=True)
class Dot(Instruction):
    """``out[m, n] = c[m, n] + sum_k a[m, k] b[k, n]``, summed in fp32 in any order."""

    out: Register
    a: Register
    b: Register
    c: Register


@dataclass(eq=False, slots=True)
class Carried:
    """A value that goes from round to round of a loop, or comes out of a branch.

    Args:
        init: before the first round (of a branch: what it is if the condition holds).
        argument: its name within a round.
        yielded: at the end of a round (of a branch: if the condition does not hold).
        result: after the last.
    """

    init: Value
    argument: Value
    yielded: Value
    result: Value


@dataclass(eq=False, slots=True)
class For(Instruction):
    """``count`` rounds with ``variable`` = 0, 1, ..."""

    variable: Expr
    count: Expr
    carried: list[Carried] = field(default_factory=list)
    body: list[Instruction] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class While(Instruction):
    """Rounds for as long as the condition, of what is carried, holds."""

    condition: Expr
    carried: list[Carried] = field(default_factory=list)
    body: list[Instruction] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class If(Instruction):
    """One of two bodies; ``init`` of what is carried is the first's, ``yielded`` the second's."""

    condition: Expr
    carried: list[Carried] = field(default_factory=list)
    body: list[Instruction] = field(default_factory=list)
    otherwise: list[Instruction] = field(default_factory=list)


Control = For | While | If


@dataclass(eq=False, slots=True)
class Print(Instruction):
    """Show a value, with a text before it."""

    text: str
    value: Value


@dataclass(eq=False, slots=True)
class TileProgram:
    """What a grid of blocks does.

    Args:
        target: name of the machine whose products it uses, ``host`` or ``cuda``.
        threads: of a block.
        pointers: what memory it is given.
        scalars: what whole numbers it is given.
        grid: blocks in each dimension.
        shared_bytes: what the blocks' shared memory takes, from the allocation pass.
    """

    name: str
    target: str
    threads: int
    pointers: tuple[Pointer, ...] = ()
    scalars: tuple[str, ...] = ()
    grid: tuple[Expr, ...] = ()
    body: list[Instruction] = field(default_factory=list)
    shared_bytes: int = 0

    def __str__(self) -> str:
        head = [f"{p.name}: *{p.dtype}" for p in self.pointers] + list(self.scalars)
        grid = ", ".join(map(str, self.grid))
        lines = [
            f"program {self.name}({', '.join(head)}) for {self.target}:",
            f"  grid {grid}; {self.threads} threads; {self.shared_bytes} bytes shared",
        ]
        return "\n".join([*lines, *_lines(self.body, "  ")])


def _text(value: object) -> str:
    if isinstance(value, Register | Shared | Global):
        return f"%{value.name}"
    if isinstance(value, tuple):
        return f"({', '.join(_text(part) for part in value)})"
    return str(value)


def _lines(body: list[Instruction], indent: str) -> Iterator[str]:
    for one in body:
        name = type(one).__name__
        if isinstance(one, Control):
            carried = ", ".join(
                f"{_text(c.result)} = {_text(c.argument)} from {_text(c.init)}, {_text(c.yielded)}"
                for c in one.carried
            )
            over = f"{one.variable} < {one.count}" if isinstance(one, For) else one.condition
            yield f"{indent}{name} {over}" + (f" carrying {carried}:" if carried else ":")
            yield from _lines(one.body, indent + "  ")
            if isinstance(one, If) and one.otherwise:
                yield f"{indent}Else:"
                yield from _lines(one.otherwise, indent + "  ")
            continue
        given = [
            f"{f.name}={_text(getattr(one, f.name))}"
            for f in dataclasses.fields(one)
            if f.name != "out" and getattr(one, f.name) is not False
        ]
        out = getattr(one, "out", None)
        head = "" if out is None else f"{out if isinstance(out, Register) else _text(out)} = "
        tail = ""
        if isinstance(out, Register) and out.layout is not None:
            tail = f"  # {out.layout}"
        if isinstance(out, Shared):
            head = f"%{out.name}: {out.dtype}{list(out.shape)} = "
        if isinstance(out, Global):
            head = f"%{out.name}: {out.dtype}{_text(out.shape)} = "
            given = [f"{out.pointer.name}", f"strides={_text(out.strides)}"]
        yield f"{indent}{head}{name}({', '.join(given)}){tail}"


def bodies(one: Instruction) -> list[list[Instruction]]:
    """The body of a loop, or both of a branch."""
    if isinstance(one, If):
        return [one.body, one.otherwise]
    return [one.body] if isinstance(one, Control) else []


def walk(body: list[Instruction]) -> Iterator[Instruction]:
    """Every instruction, those of loops and branches after these."""
    for one in body:
        yield one
        for inner in bodies(one):
            yield from walk(inner)


def reads(one: Instruction) -> list[Register]:
    """Registers that an instruction reads itself; of a loop, what it carries."""
    if isinstance(one, Control):
        values: list[object] = [v for c in one.carried for v in (c.init, c.yielded)]
    elif isinstance(one, Elementwise):
        values = list(one.inputs)
    else:
        values = [getattr(one, f.name) for f in dataclasses.fields(one) if f.name != "out"]
    return [value for value in values if isinstance(value, Register)]


def writes(one: Instruction) -> list[Register]:
    """Registers that an instruction makes; of a loop, arguments and results."""
    if isinstance(one, Control):
        values: list[object] = [c.result for c in one.carried]
        if not isinstance(one, If):
            values += [c.argument for c in one.carried]
    else:
        values = [getattr(one, "out", None)]
    return [value for value in values if isinstance(value, Register)]
