"""C++ of a program: a block is a task of a thread pool, its threads are lanes of a vector.

Everything has a plain form, loops over places and lanes that the compiler may do what it likes
with. A product of weights of few bits has a better one: eight codes of N bits are N bytes, for
every N, so one byte permutation (``vpermb``) brings the bytes of eight threads into the eight
64-bit lanes, one instruction (``vpmultishiftqb``) cuts each lane into eight windows of 8 bits at
the bits 0, N, .. 7N, and one look-up in the table of the type's values, which ignores what the
windows hold beyond N bits, makes them bf16. All constants follow from the layouts and from the
type; there is no case of a width.

Source: Ding et al., Tilus: A Tile-Level GPGPU Programming Language for Low-Precision
Computation, 2025, section 7; the recipe for AVX-512 is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shoal.kernel.native.tiles import has_tiles
from shoal.kernel.tile import ir
from shoal.kernel.tile.host_base import NEEDS, PRELUDE, Unpack
from shoal.kernel.tile.host_products import ProductWriter
from shoal.kernel.tile.ir import Expr, Register, TileProgram, walk

__all__ = ["NEEDS", "Unpack", "build_host", "host_source"]


class _Emit(ProductWriter):
    """Writes the C++ of one program: control, around all the rest."""

    def source(self) -> str:
        program = self.program
        given = [f"void* p_{p.name}" for p in program.pointers]
        given += [f"int64_t {name}" for name in program.scalars]
        blocks = [f"block{d}" for d in range(len(program.grid))]
        self.body(program.body)
        head = ", ".join([*given, *(f"int64_t {block}" for block in blocks)])
        inner = [*self.constants, f"static void {program.name}_block({head}) {{"]
        if program.shared_bytes:
            inner.append(f"  alignas(64) unsigned char shared[{program.shared_bytes}];")
        inner += [*self.lines, "}", ""]
        calls = ", ".join([*(f"p_{p.name}" for p in program.pointers), *program.scalars, *blocks])
        outer = [f'extern "C" void {program.name}({", ".join(given)}) {{']
        if self.tiles:
            wide, high = self.tiles
            outer += ["#pragma omp parallel", "  {", f"  configure({wide}, {high});"]
            outer.append("#pragma omp for schedule(static)")
        else:
            outer.append("#pragma omp parallel for schedule(static)")
        for d, (block, count) in enumerate(zip(blocks, program.grid, strict=True)):
            outer.append(f"{'  ' * (d + 1)}for (int64_t {block} = 0; {block} < {count}; {block}++)")
        outer.append(f"{'  ' * (len(blocks) + 1)}{program.name}_block({calls});")
        if self.tiles:
            outer += ["  _tile_release();", "  }"]
        outer += ["}", ""]
        return "\n".join([*inner, *outer])

    def body(self, body: list[ir.Instruction]) -> None:
        for one in body:
            if id(one) in self.fused:
                continue
            value = getattr(self, f"on_{type(one).__name__.lower()}", None)
            if value is not None:
                value(one)

    def inside(self, body: list[ir.Instruction]) -> None:
        indent, self.indent = self.indent, self.indent + "  "
        self.body(body)
        self.indent = indent

    # Control.

    def assign(self, target: str, value: ir.Value) -> None:
        if isinstance(value, Expr):
            self.put(f"{target} = {value};")
            return
        source = self.name(value)
        if source != target:
            self.each(value.held.num_local, lambda p: f"{target}[{p}] = {source}[{p}];")

    def begin(self, value: ir.Value, init: ir.Value) -> None:
        if isinstance(value, Expr):
            self.put(f"int64_t {value} = {init};")
        else:
            self.assign(self.declare(value), init)

    def rounds(self, one: ir.For | ir.While) -> None:
        targets = [
            self.name(c.argument) if isinstance(c.argument, Register) else str(c.argument)
            for c in one.carried
        ]
        # Where one value goes to another's place, all are read before any is written.
        late: list[tuple[str, str, int]] = []
        for target, c in zip(targets, one.carried, strict=True):
            source = c.yielded
            if isinstance(source, Register):
                if self.name(source) == target or self.name(source) not in targets:
                    continue
                name = self.declare(source, self.fresh("t"))
                self.assign(name, source)
                late.append((target, name, source.held.num_local))
            elif len(targets) > 1:
                name = self.fresh("t")
                self.put(f"const int64_t {name} = {source};")
                late.append((target, name, 0))
        done = {target for target, _, _ in late}
        for target, c in zip(targets, one.carried, strict=True):
            if target not in done:
                self.assign(target, c.yielded)
        for target, name, count in late:
            if count:
                self.copy(target, name, count)
            else:
                self.put(f"{target} = {name};")

    def copy(self, target: str, source: str, count: int) -> None:
        self.each(count, lambda p: f"{target}[{p}] = {source}[{p}];")

    def end(self, one: ir.For | ir.While) -> None:
        for c in one.carried:
            if isinstance(c.result, Register) and isinstance(c.argument, Register):
                self.names[id(c.result)] = self.name(c.argument)
            else:
                self.put(f"const int64_t {c.result} = {c.argument};")

    def on_for(self, one: ir.For) -> None:
        for inner in walk(one.body) if self.tiles else ():
            if (
                isinstance(inner, ir.Dot)
                and self.nests.get(id(inner), ())[:1] == (one,)
                and self._may_run_ahead(inner)
            ):
                self.run_ahead(inner)
        for c in one.carried:
            self.begin(c.argument, c.init)
        i = one.variable
        self.put(f"for (int64_t {i} = 0; {i} < {one.count}; {i}++) {{")
        self.inside(one.body)
        self.indent += "  "
        self.rounds(one)
        self.indent = self.indent[:-2]
        self.put("}")
        self.end(one)

    def on_while(self, one: ir.While) -> None:
        for c in one.carried:
            self.begin(c.argument, c.init)
        self.put(f"while ({one.condition}) {{")
        self.inside(one.body)
        self.indent += "  "
        self.rounds(one)
        self.indent = self.indent[:-2]
        self.put("}")
        self.end(one)

    def on_if(self, one: ir.If) -> None:
        for c in one.carried:
            if isinstance(c.result, Register):
                self.declare(c.result)
            else:
                self.put(f"int64_t {c.result};")
        for head, body, first in (
            (f"if ({one.condition}) {{", one.body, True),
            ("} else {", one.otherwise, False),
        ):
            self.put(head)
            self.inside(body)
            self.indent += "  "
            for c in one.carried:
                target = self.name(c.result) if isinstance(c.result, Register) else str(c.result)
                value = c.init if first else c.yielded
                if isinstance(value, Register):
                    source = self.joined(value)
                    self.copy(target, source, value.held.num_local)
                else:
                    self.put(f"{target} = {value};")
            self.indent = self.indent[:-2]
        self.put("}")


def host_source(
    programs: Sequence[TileProgram], *, unpack: Unpack = "recipe", tiles: bool = False
) -> str:
    """The C++ of programs, one function each: pointers, then whole numbers.

    Args:
        programs: finished ones, for the host.
        unpack: ``recipe``, or ``generic`` for an extraction bit by bit of every element.
        tiles: products use matrix tiles (AMX), which the CPU and the system must grant.

    Raises:
        KernelError: a program is for another machine.
    """
    texts = (_Emit(program, unpack, tiles).source() for program in programs)
    return "\n".join([PRELUDE, *texts])


def build_host(
    programs: Sequence[TileProgram],
    *,
    name: str,
    unpack: Unpack = "recipe",
    tiles: bool | None = None,
) -> dict[str, Callable[..., Any]]:
    """Compile programs; name -> function of addresses, then whole numbers.

    Args:
        programs: finished ones, for the host.
        name: of the library.
        unpack: as of :func:`host_source`.
        tiles: the same; None for where there are some.

    Raises:
        KernelError: a program is for another machine.
        BuildError: there is no compiler.
    """
    import torch  # noqa: F401 - brings the OpenMP runtime that the library shares

    from shoal.core.native import build
    from shoal.kernel.native import FLAGS, declared

    tiles = has_tiles() if tiles is None else tiles
    text = host_source(programs, unpack=unpack, tiles=tiles)
    library = build(text, name=f"tile-{name}", flags=FLAGS)
    out: dict[str, Callable[..., Any]] = {}
    for program in programs:
        letters = "p" * len(program.pointers) + "l" * len(program.scalars)
        out[program.name] = declared(getattr(library, program.name), letters)
    return out
