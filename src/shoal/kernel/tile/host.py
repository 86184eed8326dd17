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
from shoal.kernel.tile.ir import TileProgram, walk

__all__ = ["NEEDS", "Unpack", "build_host", "host_source"]


class _Emit(ProductWriter):
    """Writes the C++ of one program."""

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

    def on_for(self, one: ir.For) -> None:
        for inner in walk(one.body) if self.tiles else ():
            if (
                isinstance(inner, ir.Dot)
                and self.nests.get(id(inner), ())[:1] == (one,)
                and self._may_run_ahead(inner)
            ):
                self.run_ahead(inner)
        super().on_for(one)


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
