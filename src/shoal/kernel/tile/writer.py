"""What writing a tile program as C++ begins with on every machine: names, places, loops."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import numpy as np

from shoal.core.errors import KernelError
from shoal.kernel.tile import ir
from shoal.kernel.tile.ir import Expr, Register, Shared, TileProgram, number
from shoal.kernel.tile.types import TileType

_ELEMENT = {
    "fp32": "float",
    "bf16": "uint16_t",
    "fp16": "uint16_t",
    "uint16": "uint16_t",
    "int16": "int16_t",
    "uint32": "uint32_t",
    "int32": "int32_t",
}

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^"}


def element(dtype: TileType) -> str:
    """The C++ type of an element; bytes for types of few bits."""
    return _ELEMENT.get(str(dtype), "uint8_t")


def operation(op: str, a: str, b: str) -> str:
    """The text of an operation of :class:`~shoal.kernel.tile.ir.Elementwise`."""
    if op in _SIGNS:
        return f"{a} {_SIGNS[op]} {b}"
    return f"{a} {'<' if op == 'min' else '>'} {b} ? {a} : {b}"


def literal(dtype: TileType, value: float) -> str:
    """A number as an element holds it; of types of few bits its code."""
    if dtype.narrow:
        return str(int(dtype.encode(np.array(value))))
    if dtype.kind != "float":
        return str(int(value))
    text = f"{float(value)!r}f"
    return text if str(dtype) == "fp32" else f"to_{dtype}({text})"


class CodeWriter:
    """State of the writing of one program, and what every machine's text has in common.

    Attributes:
        target: the machine that programs must be for.
        fused: instructions that others write along with themselves.
    """

    target: ClassVar[str]

    def __init__(self, program: TileProgram) -> None:
        if program.target != self.target:
            raise KernelError(
                f"tile program {program.name} is for {program.target}; expected one for "
                f"target={self.target!r}"
            )
        self.program, self.threads = program, program.threads
        self.lines: list[str] = []
        self.indent = "  "
        self.count = 0
        self.names: dict[int, str] = {}
        self.fused: set[int] = set()

    @abstractmethod
    def storage(self, value: Register) -> str:
        """The type of the array of a value's places."""

    @abstractmethod
    def each(self, count: int, text: Callable[[object], str]) -> None:
        """A statement for each place."""

    def joined(self, value: Register) -> str:
        """The name of a value in its plain form."""
        return self.name(value)

    # Text and names.

    def put(self, text: str) -> None:
        """A line of the block, indented."""
        self.lines.append(self.indent + text)

    @contextlib.contextmanager
    def braces(self, head: str = "{", end: str = "}") -> Iterator[None]:
        """Lines between a head and an end."""
        self.put(head)
        indent, self.indent = self.indent, self.indent + "  "
        yield
        self.indent = indent
        if end:
            self.put(end)

    def fresh(self, letter: str) -> str:
        """A name that nothing has yet."""
        self.count += 1
        return f"{letter}_{self.count}"

    def name(self, value: ir.Value) -> str:
        """What a value is called."""
        if isinstance(value, Expr):
            return str(value)
        return self.names.get(id(value), f"r_{value.name}")

    def declare(self, value: Register, name: str | None = None) -> str:
        """Declare the places of a value; its name."""
        name = name or self.name(value)
        self.put(f"{self.storage(value)} {name}[{value.held.num_local}];")
        return name

    # Places.

    @staticmethod
    def shifted(offsets: Sequence[Expr], index: Sequence[Expr | int]) -> list[Expr]:
        """Offsets of all dimensions, with an index of the last ones added."""
        pad = len(offsets) - len(index)
        return [*offsets[:pad], *(a + b for a, b in zip(offsets[pad:], index, strict=True))]

    def place(
        self, strides: Sequence[Expr], offsets: Sequence[Expr], index: Sequence[Expr | int]
    ) -> Expr:
        """Place of an element: offsets are of all dimensions, the index of the last ones."""
        terms = zip(self.shifted(offsets, index), strides, strict=True)
        return sum((at * stride for at, stride in terms), number(0))

    def inside(
        self, offsets: Sequence[Expr], index: Sequence[Expr | int], shape: Sequence[Expr]
    ) -> str:
        """Whether an element is in bounds."""
        terms = zip(self.shifted(offsets, index), shape, strict=True)
        return " && ".join(f"{at} < {size}" for at, size in terms)

    @staticmethod
    def swizzled(tensor: Shared, at: Expr | str) -> str:
        """The place of an element, turned within its row as the layout says."""
        if tensor.layout.swizzle is None:
            return str(at)
        width, base, shift = tensor.layout.swizzle
        return f"({at} ^ ((({at} >> {base + shift}) & {(1 << width) - 1}) << {base}))"

    @staticmethod
    def shared_strides(tensor: Shared) -> list[Expr]:
        """Strides of a shared tensor, in elements."""
        return [number(stride) for stride in tensor.layout.strides]

    # Control.

    def body(self, body: list[ir.Instruction]) -> None:
        """What one instruction after the other does."""
        for one in body:
            write = getattr(self, f"on_{type(one).__name__.lower()}", None)
            if write is not None and id(one) not in self.fused:
                write(one)

    def assign(self, target: str, value: ir.Value, source: str | None = None) -> None:
        """Let a name be a value, or what ``source`` holds of one."""
        source = source or self.name(value)
        if isinstance(value, Expr):
            self.put(f"{target} = {source};")
        elif source != target:
            self.each(value.held.num_local, lambda p: f"{target}[{p}] = {source}[{p}];")

    def rounds(self, one: ir.For | ir.While) -> None:
        """Hand on what a round yields; what others' places hold is read before any is written."""
        targets = [self.name(c.argument) for c in one.carried]
        late: list[tuple[str, ir.Value, str]] = []
        for target, c in zip(targets, one.carried, strict=True):
            if isinstance(c.yielded, Register):
                if self.name(c.yielded) == target or self.name(c.yielded) not in targets:
                    continue
                name = self.declare(c.yielded, self.fresh("t"))
                self.assign(name, c.yielded)
            elif len(targets) > 1:
                name = self.fresh("t")
                self.put(f"const int64_t {name} = {c.yielded};")
            else:
                continue
            late.append((target, c.yielded, name))
        done = {target for target, _, _ in late}
        for target, c in zip(targets, one.carried, strict=True):
            if target not in done:
                self.assign(target, c.yielded)
        for target, value, name in late:
            self.assign(target, value, name)

    def around(self, one: ir.For | ir.While, head: str) -> None:
        """A loop, with what it carries before and behind it."""
        for c in one.carried:
            if isinstance(c.argument, Register):
                self.assign(self.declare(c.argument), c.init)
            else:
                self.put(f"int64_t {c.argument} = {c.init};")
        with self.braces(head):
            self.body(one.body)
            self.rounds(one)
        for c in one.carried:
            if isinstance(c.result, Register):
                self.names[id(c.result)] = self.name(c.argument)
            else:
                self.put(f"const int64_t {c.result} = {c.argument};")

    def on_for(self, one: ir.For) -> None:
        """So many rounds."""
        i = one.variable
        self.around(one, f"for (int64_t {i} = 0; {i} < {one.count}; {i}++) {{")

    def on_while(self, one: ir.While) -> None:
        """Rounds for as long as a condition holds."""
        self.around(one, f"while ({one.condition}) {{")

    def on_if(self, one: ir.If) -> None:
        """One of two bodies."""
        for c in one.carried:
            if isinstance(c.result, Register):
                self.declare(c.result)
            else:
                self.put(f"int64_t {c.result};")
        for head, body, first in (
            (f"if ({one.condition}) {{", one.body, True),
            ("} else {", one.otherwise, False),
        ):
            with self.braces(head, "" if first else "}"):
                self.body(body)
                for c in one.carried:
                    value = c.init if first else c.yielded
                    source = self.joined(value) if isinstance(value, Register) else str(value)
                    self.assign(self.name(c.result), value, source)

    # Memory.

    def on_globalview(self, one: ir.GlobalView) -> None:
        """A view is a pointer of its elements' type."""
        kind = element(one.out.dtype)
        self.put(f"{kind}* const {one.out.name} = ({kind}*)p_{one.out.pointer.name};")

    def on_allocshared(self, one: ir.AllocShared) -> None:
        """Shared memory, as an array of the block."""
        kind = element(one.out.dtype)
        self.put(f"{kind}* const {one.out.name} = ({kind}*)(shared + {one.out.address});")
