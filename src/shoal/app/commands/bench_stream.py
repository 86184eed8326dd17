"""``shoal bench stream``: what memory gives, to our loops, to plain C, and by the probe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["stream"]


def stream(
    elements: Annotated[
        int, typer.Option(help="Numbers (fp64) of each of the three arrays.", min=1)
    ] = 1 << 25,
    quick: Annotated[bool, typer.Option("--quick", help="Three rounds.")] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Measure on a busy machine too.")
    ] = False,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
    out: Annotated[Path | None, typer.Option("--out", help="A file .json for the rates.")] = None,
) -> None:
    """Measure STREAM: copy, scale, add and triad by the parallel algorithms and by C with OpenMP.

    Both take turns, with the same flags and threads. Beside them stands the bandwidth that the
    probe of this machine found. Arrays that fit a cache say nothing about memory.

    **Examples**

        shoal bench stream

        shoal bench stream --quick --out stream.json
    """
    from shoal.app.show import as_json, table
    from shoal.core.errors import require
    from shoal.core.files import write_json
    from shoal.core.measure import check_quiet
    from shoal.kernel.algorithms.stream import rates
    from shoal.kernel.dispatch import here

    require(out is None or out.suffix == ".json", "--out", str(out), expected="a name in .json")
    if not anyway:
        check_quiet(wait_s=60.0)
    found = rates(elements, pairs=3 if quick else 15)
    probed = here().device.main_memory.read_bandwidth
    told = {"bytes_per_s": found, "probed_bytes_per_s": probed, "elements": elements}
    if out is not None:
        write_json(out, told)
    if output is Format.json:
        as_json(told)
        return
    rows = [
        (
            name,
            f"{of['algorithms'] / 1e9:.1f}",
            f"{of['openmp_c'] / 1e9:.1f}",
            f"{of['ratio']:.2f}",
            "" if not probed else f"{of['algorithms'] / probed:.0%}",
        )
        for name, of in found.items()
    ]
    table("GB/s", ("", "algorithms", "OpenMP C", "ratio", "of the probe"), rows, numeric=" rrrr")
