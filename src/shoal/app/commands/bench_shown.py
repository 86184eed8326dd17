"""What ``shoal bench`` says of a served workload: tables, files, pictures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from shoal.ir import ServePlan, ServeReport


def write_files(files: list[Path], value: Any, drawn: Callable[[Path], str]) -> None:
    """Write JSON to the files whose names end so, and pictures or pages to the others."""
    from shoal.core.files import write_atomic, write_json

    for file in files:
        if file.suffix == ".json":
            write_json(file, value)
        else:
            write_atomic(file, drawn(file))


def numbers_of(text: str, where: str, *, most: int | None = None) -> list[int]:
    """Whole numbers with commas between them, from 1 to ``most`` where there is one."""
    from shoal.core.errors import require

    words = [word.strip() for word in text.split(",")]
    require(
        all(word.isdecimal() and (most is None or 1 <= int(word) <= most) for word in words),
        where,
        text,
        expected="comma-separated integers, such as 1024,2048"
        if most is None
        else f"numbers from 1 to {most}, such as 1,4,16",
    )
    return [int(word) for word in words]


def show_served(where: str) -> None:
    """Print what is served."""
    typer.echo(f"serving {where}")


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
