"""What ``shoal bench`` says of a served workload: tables, files, pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from shoal.ir import ServePlan, ServeReport


def files_of(files: list[Path], known: tuple[str, ...]) -> list[Path]:
    """The files, once each has one of the known endings.

    Raises:
        ConfigError: one has not.
    """
    from shoal.core.errors import require

    for file in files:
        expected = f"a name in {' or '.join(known)}"
        require(file.suffix in known, "--out", str(file), expected=expected)
    return files


def write_served(files: list[Path], found: dict[str, Any], title: str) -> None:
    """Write what was found, its ``samples`` as a picture if a file is one."""
    from shoal.core.files import write_atomic, write_json
    from shoal.serve.bench.latencies import draw

    for file in files:
        if file.suffix == ".json":
            write_json(file, found)
        else:
            write_atomic(file, draw(found["samples"], title))


def measured_rows(measured: Mapping[str, float]) -> list[tuple[str, str]]:
    """Names and values of a table, of what is there."""
    from shoal.ir import kind_named

    return [
        (quantity.label, quantity.text(measured[quantity.name]))
        for quantity in kind_named("serve").quantities
        if quantity.name in measured
    ]


def show_serve_plan(plan: ServePlan) -> None:
    """Print what is predicted, before it is measured."""
    result = plan.predicted["tokens_per_s"]
    typer.echo(
        f"predicted: {result.value:,.0f} output tokens/s ({result.low:,.0f} to "
        f"{result.high:,.0f}). "
        f"{plan.why}"
    )
    for note in plan.notes:
        typer.echo(f"  {note}")


def show_serve_report(report: ServeReport) -> None:
    """Print prediction beside measurement."""
    from shoal.app.show import say_if_elsewhere, table
    from shoal.ir import compared

    table("", ("", "predicted", "measured", "error"), compared(report), numeric=" rrr")
    say_if_elsewhere(report)
