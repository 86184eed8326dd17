"""How the command line shows things: tables, JSON, progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from shoal.core.tables import Table
    from shoal.ir import Estimate, Report

__all__ = [
    "Anyway",
    "Format",
    "Output",
    "Quiet",
    "Sets",
    "TrainingBar",
    "WorkBar",
    "as_json",
    "console",
    "say_if_elsewhere",
    "say_if_slower",
    "show",
    "show_estimate",
    "show_taken",
    "table",
]


class Format(StrEnum):
    """Output formats."""

    text = "text"
    json = "json"


# Options of several commands.
Anyway = Annotated[bool, typer.Option("--anyway", help="Measure on a busy machine too.")]
Output = Annotated[Format, typer.Option("--output", "-o", help="text or json.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="path=value of the job.")]


def console(*, stderr: bool = False) -> Console:
    """A rich console; plain text when the output is no terminal."""
    from rich.console import Console

    # A pipe has no width; 80 columns would cut tables that people grep.
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 160, highlight=False)


def say_if_slower() -> None:
    """Say once that native code is missing; everything runs without it."""
    from shoal.core.native import compiler

    if compiler() is None:
        typer.echo(
            "no C++ compiler found, so slower kernels and checksums are used; install g++ "
            "(Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++) or set CXX",
            err=True,
        )


def as_json(value: Any) -> None:
    """Print JSON for other programs."""
    print(json.dumps(value, indent=1, ensure_ascii=False))


def say_if_elsewhere(report: Report[Any]) -> None:
    """Print why a report is not scored, if it was measured on another kind of device."""
    machine = report.plan.machine
    if report.device and report.device != machine.device.kind:
        print(
            f"not scored: predicted for {machine.device.name} of {machine.name}, and measured on "
            f"a {report.device.upper()}"
        )


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], *, numeric: str = ""
) -> None:
    """Print a table; ``numeric`` has an r for each right-aligned column."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    # rich wraps a title to the table's width, which may be that of two short columns.
    if title:
        console().print(f"[bold]{title}[/bold]")
    headed = any(columns)
    shown = Table(box=SIMPLE_HEAD if headed else None, show_header=headed, pad_edge=False)
    for index, column in enumerate(columns):
        right = numeric[index : index + 1] == "r"
        shown.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*("" if cell is None else str(cell) for cell in row))
    console().print(shown)


def show(shown: Table) -> None:
    """Print a table."""
    table(shown.title, shown.columns, shown.rows, numeric=shown.right)


def show_taken(rows: Sequence[tuple[str, str, str]]) -> None:
    """Print what an answer rests on, each with the reason why it was taken: (name, value, why)."""
    words = "; ".join(f"{name} {value} ({why})" for name, value, why in rows)
    typer.echo(f"taken: {words}")


def show_estimate(
    estimate: Estimate | None,
    *,
    title: str = "where a step's time goes",
    memory_title: str = "memory of a rank",
) -> None:
    """Print the time of a step and the memory by cause; nothing for causes that cost nothing."""
    from shoal.core.sizes import human_bytes

    if estimate is None:
        return
    total = estimate.step_s.value
    shares = [
        (cause, f"{1e3 * seconds:,.3g} ms", f"{100 * seconds / total:.0f} %")
        for cause, seconds in sorted(estimate.terms_s.items(), key=lambda item: -item[1])
        if seconds > 0
    ]
    memory = [(cause, human_bytes(size)) for cause, size in estimate.memory_bytes.items() if size]
    if shares:
        table(title, ("", "", ""), shares, numeric=" rr")
    if memory:
        table(memory_title, ("", ""), memory, numeric=" r")


class WorkBar:
    """A bar for long work that reports (done, total, text); plain lines in a pipe."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        self._title = title
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._line = 0.0

    def __enter__(self) -> WorkBar:
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        if not self._quiet and sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(show_speed=True),
                TimeRemainingColumn(),
                console=console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: float, total: float, text: str = "") -> None:
        """Show progress."""
        if self._bar is not None and self._task is not None:
            description = f"{self._title}: {text}" if text else self._title
            self._bar.update(self._task, completed=done, total=total, description=description)
        elif not self._quiet and time.monotonic() - self._line > 5:
            self._line = time.monotonic()
            share = f" {100 * done / total:.0f} %" if total else ""
            print(f"{self._title}{share} {text}".rstrip(), file=sys.stderr, flush=True)


class TrainingBar:
    """Shows the events of a run: a live bar on a terminal, a line now and then in a pipe."""

    def __init__(self, *, quiet: bool = False, before: str = "reading text") -> None:
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._line = 0.0
        self._prepare = WorkBar(before, quiet=quiet)

    def __enter__(self) -> TrainingBar:
        self._prepare.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._prepare.__exit__()
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event."""
        kind = event["kind"]
        if kind == "prepare":
            self._prepare(*event["state"])
        elif kind == "start":
            self._prepare.__exit__()
            self._start(event)
        elif kind == "step":
            self._step(event)
        elif kind == "eval":
            label = "held-out text, whole" if event["final"] else "held-out text"
            self._say(
                f"step {event['step']}: {label}: {event['bits_per_byte']:.3f} bits per byte, "
                f"loss {event['loss']:.3f}"
            )
        elif kind == "checkpoint":
            self._say(f"step {event['step']}: checkpoint in {event['seconds']:.2f} s", minor=True)
        elif kind == "checkpoint_failed":
            self._say(f"step {event['step']}: the checkpoint was NOT saved: {event['message']}")
        elif kind == "checkpoint_level" and event["state"] in ("failed", "unreachable"):
            self._say(f"{event['place']}: {event['state']}: {event['message']}")
        elif kind == "corrupt":
            self._say(f"refused: {event['message']}")
        elif kind == "restart":
            self._say(f"{event['message']}\nrestarting from the newest checkpoint")
        elif kind == "recover":
            self._say(f"in memory: {event['reason']}")
        elif kind == "memory_off":
            self._say(f"goes on without copies in memory: {event['message']}")
        elif kind == "fault":
            place = "nobody could be named" if event["place"] is None else f"place {event['place']}"
            self._say(f"fault ({event['rule']}, {place}) after {event['seconds']:.1f} s")

    def _start(self, event: dict[str, Any]) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._total = event["total"]
        word = "resumed" if event["resumed"] else "training"
        self._say(
            f"{word} at step {event['step']} of {event['total']}: "
            f"{event['parameters'] / 1e6:.2f} M parameters on {event['ranks']} rank(s)"
        )
        if self._quiet or not sys.stderr.isatty():
            return
        if self._bar is None:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("training", total=self._total, note="")
        assert self._task is not None
        self._bar.update(self._task, completed=event["step"])

    def _step(self, event: dict[str, Any]) -> None:
        note = f"loss {event['loss']:.3f}  {event['tokens_per_s']:,.0f} tok/s  "
        if "mfu" in event:  # of what is trained whole
            note += f"{100 * event['mfu']:.0f} % MFU  "
        note += f"{event['memory_bytes'] / 2**20:,.0f} MiB"
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=event["step"] + 1, note=note)
        elif time.monotonic() - self._line > 10:
            self._line = time.monotonic()
            left = (self._total - event["step"] - 1) * event["step_s"]
            self._say(f"step {event['step'] + 1}/{self._total}  {note}  {left:.0f} s left")

    def _say(self, text: str, *, minor: bool = False) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            if not minor:
                self._bar.console.print(text)
        elif not minor:
            print(text, file=sys.stderr, flush=True)
