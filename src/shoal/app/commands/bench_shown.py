"""What ``shoal bench`` says of a served workload: tables, files, pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from shoal.ir import ServePlan, ServeReport

__all__ = [
    "files_of",
    "measured_rows",
    "number",
    "show_serve_plan",
    "show_serve_report",
    "write_served",
]

_ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("tokens_per_s", "output tokens per second", 1, ""),
    ("prompt_tokens_per_s", "prompt tokens per second", 1, ""),
    ("requests_per_s", "requests per second", 1, ""),
    ("goodput_per_s", "  of which met the targets", 1, ""),
    ("slo_share", "requests that met the targets", 100, "%"),
    ("total_s", "time for all requests", 1, "s"),
    *(
        (f"{name}_{which}_s", f"{label}, mean" if which == "mean" else f"  {said}", 1e3, "ms")
        for name, label in (
            ("ttft", "time to first token"),
            ("tpot", "time per further token"),
            ("itl", "time between two outputs"),
            ("e2e", "time of a request"),
        )
        for which, said in (
            ("mean", ""),
            ("p50", "median"),
            ("p95", "95 % within"),
            ("p99", "99 % within"),
        )
    ),
    ("lag_p99_s", "requests sent late, 99 % within", 1e3, "ms"),
    ("memory_bytes", "memory of the process", 1 / 2**20, "MiB"),
    ("step_s", "time of a step", 1e3, "ms"),
    ("prefix_hit_share", "prompt tokens found in the cache", 100, "%"),
    ("preemptions", "requests preempted", 1, ""),
)


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
    from shoal.serve.latencies import draw

    for file in files:
        if file.suffix == ".json":
            write_json(file, found)
        else:
            write_atomic(file, draw(found["samples"], title))


def measured_rows(measured: Mapping[str, float]) -> list[tuple[str, str]]:
    """Names and values of a table, of what is there."""
    return [
        (label, number(measured[name] * factor, unit))
        for name, label, factor, unit in _ROWS
        if name in measured
    ]


def number(value: float, unit: str) -> str:
    """As people read it."""
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown} {unit}".strip()


def show_serve_plan(plan: ServePlan) -> None:
    """Print what is predicted, before it is measured."""
    told = plan.predicted["tokens_per_s"]
    typer.echo(
        f"predicted: {told.value:,.0f} output tokens/s ({told.low:,.0f} to {told.high:,.0f}). "
        f"{plan.why}"
    )
    for note in plan.notes:
        typer.echo(f"  {note}")


def show_serve_report(report: ServeReport) -> None:
    """Print prediction beside measurement."""
    from shoal.app.show import table

    predicted = {name: told.value for name, told in report.plan.predicted.items()}
    if report.plan.estimate is not None:
        predicted["memory_bytes"] = report.plan.estimate.memory_total
    rows = []
    for name, label, factor, unit in _ROWS:
        if name not in report.measured:
            continue
        before, error = predicted.get(name), report.errors.get(name)
        rows.append(
            (
                label,
                "" if before is None else number(before * factor, unit),
                number(report.measured[name] * factor, unit),
                "" if error is None else f"{100 * error:+.1f} %",
            )
        )
    table("", ("", "predicted", "measured", "error"), rows, numeric=" rrr")
