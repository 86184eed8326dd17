"""``shoal bench compile``: the text that a program of the tile machine becomes.

``shoal bench planes``: products of few bits by every engine of this CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.kernel.tile.build import TileKernel

__all__ = ["compile_", "planes"]


def compile_(
    name: Annotated[
        str, typer.Argument(help="lowbit_matmul, lowbit_pack or stream_copy.")
    ] = "lowbit_matmul",
    emit: Annotated[
        str, typer.Option(help="cpp for this CPU, cuda, ir, or layout: who holds what.")
    ] = "cpp",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="option=value of the program, such as weight=uint3."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Of ir and layout: host or cuda; host without.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="A file for the text.")] = None,
) -> None:
    """Compile a program of the tile machine to text: checked instructions, C++ or CUDA C++.

    **Examples**

        shoal bench compile lowbit_matmul --set weight=uint3

        shoal bench compile lowbit_matmul --emit ir --set weight=float6_e3m2 --set rows=4

        shoal bench compile lowbit_matmul --emit layout --set weight=int5 --target cuda

        shoal bench compile stream_copy --emit cuda --out copy.cu
    """
    from shoal.core.errors import KernelError, require
    from shoal.core.files import write_atomic
    from shoal.kernel.tile import compile_kernel
    from shoal.kernel.tile.programs import program

    found = program(name)
    require(
        emit in ("cpp", "cuda", "ir", "layout"),
        "--emit",
        emit,
        expected="cpp, cuda, ir or layout",
        error=KernelError,
    )
    options = _options(found, set_ or [])
    if target is not None:
        require(
            emit in ("ir", "layout"),
            "--target",
            target,
            expected="no target: cpp is for the host, and cuda for a GPU",
            error=KernelError,
        )
        options["target"] = target
        if target == "cuda":  # a product on a GPU takes no less
            least = {"rows": 16, "step": 32, "columns": 32}
            options = {key: size for key, size in least.items() if key in found.options()} | options
    text = _layouts(found, options) if emit == "layout" else compile_kernel(name, emit, **options)  # type: ignore[arg-type]
    if out is None:
        typer.echo(text)
    else:
        write_atomic(out, text + "\n")


def _options(found: TileKernel, sets: list[str]) -> dict[str, object]:
    """``option=value`` as the types of the defaults say."""
    from shoal.core.errors import KernelError, nearest

    known, out = found.options(), dict[str, object]()
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or key not in known:
            listed = ", ".join(f"{option}={default}" for option, default in known.items())
            raise KernelError(f"--set {text}: expected one of {listed}; {nearest(key, known)}")
        usual = known[key]
        if isinstance(usual, bool):
            if value not in ("true", "false"):
                raise KernelError(f"--set {text}: expected true or false")
            out[key] = value == "true"
        elif isinstance(usual, int):
            if not value.isdigit():
                raise KernelError(f"--set {text}: expected a whole number, such as {usual}")
            out[key] = int(value)
        else:
            out[key] = value
    return out


def _layouts(found: TileKernel, options: dict[str, object]) -> str:
    """A picture of every layout of the program, under the tensors that lie so."""
    from shoal.kernel.tile import ir, show

    held: dict[str, list[str]] = {}
    for one in ir.walk(found.trace(**options).body):  # type: ignore[arg-type]
        for value in ir.writes(one):
            if isinstance(value, ir.Register):
                held.setdefault(show(value.held), []).append(f"%{value.name} {value.dtype}")
    return "\n\n".join(f"{', '.join(names)}\n{picture}" for picture, names in held.items())


def planes(
    widths: Annotated[
        str, typer.Option(help="Bits of weights x bits of activations, with commas.")
    ] = "1x1,2x2,2x8,4x4,4x8,8x8",
    rows: Annotated[str, typer.Option(help="Rows (tokens) of a call, with commas.")] = "1,16,256",
    size: Annotated[int, typer.Option(help="Outputs and inputs of a layer.", min=64)] = 4096,
    buffers: Annotated[
        int, typer.Option(help="Weights that take turns; 20 in bf16 exceed most caches.", min=1)
    ] = 20,
    pairs: Annotated[int, typer.Option(help="Rounds.", min=3)] = 15,
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="Whose estimates: local, as probed, or a file.")
    ] = "local",
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Measure on a busy machine too.")
    ] = False,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the table only.")] = False,
) -> None:
    """Time products of bipolar integers by every engine of this CPU, beside bf16.

    Engines count bits (popcnt), expand weights in registers (gemv), or multiply int8 by
    vectors (vnni) or by matrix tiles (amx). The one that dispatch would take is marked.

    **Examples**

        shoal bench planes --widths 1x1,2x8 --rows 1,16

        shoal bench planes --size 2048 --buffers 80 -o json
    """
    import dataclasses

    from shoal.app.show import WorkBar, as_json, table
    from shoal.core.errors import ConfigError
    from shoal.core.measure import check_quiet
    from shoal.kernel.planes import bench
    from shoal.machine.described import load

    pieces = []
    for text in widths.split(","):
        w, _, a = text.strip().partition("x")
        if not (w in _WIDTHS and a in _WIDTHS):
            raise ConfigError(f"--widths {text}: expected two numbers of 1 to 8, such as 2x8")
        pieces.append((int(w), int(a)))
    counts = [word.strip() for word in rows.split(",")]
    if not all(word.isdigit() and int(word) for word in counts):
        raise ConfigError(f"--rows {rows}: expected whole numbers with commas, such as 1,16")
    where = load(machine)
    if not anyway:
        check_quiet(wait_s=60.0)
    with WorkBar("bench planes", quiet=quiet) as bar:
        found = bench.table(
            where,
            size=size,
            rows=[int(word) for word in counts],
            widths=pieces,
            buffers=buffers,
            pairs=pairs,
            progress=lambda text, done: bar(done, 1.0, text),
        )
    if output is Format.json:
        as_json([dataclasses.asdict(line) for line in found])
        return
    table(
        "",
        ("rows", "bits", "engine", "measured", "expected", "x bf16", ""),
        [
            (
                line.m,
                f"{line.w} x {line.a}",
                line.engine,
                f"{1e6 * line.seconds:,.0f} us",
                "" if line.estimate is None else f"{1e6 * line.estimate:,.0f} us",
                f"{line.speedup:.2f}",
                "chosen" if line.chosen else "",
            )
            for line in found
        ],
        numeric="r  rrr ",
    )


_WIDTHS = frozenset("12345678")
