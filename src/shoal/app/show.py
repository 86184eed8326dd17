"""How the command line shows things: tables, JSON, progress."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.core.theme import STYLES, Mark, console
from shoal.core.theme import echo as echo

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress, TaskID

    from shoal.core.config import ResolvedValue
    from shoal.core.tables import Table
    from shoal.ir import Report


class Format(StrEnum):
    """Output formats."""

    text = "text"
    json = "json"


# Options of several commands.
Anyway = Annotated[bool, typer.Option("--anyway", help="Measure on a busy machine too.")]
Output = Annotated[Format, typer.Option("--output", "-o", help="text or json.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")]
Brief = Annotated[bool, typer.Option("--quiet", "-q", help="Print the first table only.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Also show time and memory by cause.")
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="path=value of the job.")]


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
            f"not scored: predicted for {machine.device.name} of {machine.name}, but measured on "
            f"a {report.device.upper()}"
        )


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numeric: str = "",
) -> None:
    """Print a table of plain text, in which brackets are brackets.

    Args:
        title: above it; empty for none.
        columns: their heads; all empty for no head.
        rows: their cells.
        numeric: has an r for each right-aligned column.
    """
    from shoal.core.tables import table_of

    show(table_of(title, columns, rows, numeric))


def show(shown: Table, *, most: int | None = None) -> None:
    """Print a table, on so many columns of the terminal at the most."""
    from shoal.core.tables import rich_table

    # rich wraps a title to the table's width, which may be that of two short columns.
    out = console()
    if shown.title:
        out.print(shown.title, style=STYLES["title"])
    width = None if most is None else min(most, out.width)
    out.print(rich_table(shown, titled=False), width=width)


def show_blocks(blocks: Iterable[Table | str], *, most: int | None = None) -> None:
    """Print tables, on so many columns at the most, and sentences."""
    for block in blocks:
        if isinstance(block, str):
            echo(block)
        else:
            show(block, most=most)


def check_endings(option: str, files: Iterable[Path | None], *endings: str) -> None:
    """Refuse names of files to write that have none of the endings, before anything is done.

    Raises:
        ConfigError: names the option, the file and the endings.
    """
    from shoal.core.errors import require

    for file in files:
        require(
            file is None or file.suffix in endings,
            option,
            str(file),
            expected=f"a name in {' or '.join(endings)}",
        )


def show_values(resolved: ResolvedValue[Any], output: Format) -> None:
    """Print a job, and why each of its values is what it is."""
    if output is Format.json:
        as_json(resolved.value.model_dump(mode="json", exclude_none=True))
    else:
        table("configuration", ("key", "value", "why"), list(resolved.lines()))


def show_notes(notes: Iterable[str]) -> None:
    """Print notes beside an answer, on stderr."""
    for note in notes:
        echo(f"note: {note}", stderr=True)


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
                TextColumn("{task.description}", markup=False),
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


def wait_until_quiet(
    *, anyway: bool, quiet: bool = False, bar: WorkBar | None = None, wait_s: float = 60.0
) -> None:
    """Wait until the machine is quiet enough to measure, with a countdown.

    Args:
        anyway: the user measures on a busy machine too.
        quiet: print no countdown.
        bar: that is shown already, and shows the countdown.
        wait_s: how long to wait, in s.

    Raises:
        NoisyMachineError: it stays busy; names the flag.
    """
    from shoal.core.measure import check_quiet

    if anyway:
        return
    title = "waiting for a quiet machine"
    with WorkBar(title, quiet=quiet or bar is not None) as own:
        said = False

        def waiting(why: str, left: float) -> None:
            nonlocal said
            if not said and not quiet:
                typer.echo(
                    f"waiting up to {wait_s:.0f} s for a quiet machine: {why}; --anyway starts at "
                    f"once",
                    err=True,
                )
            said = True
            text = f"{left:.0f} s left"
            if bar is None:
                own(wait_s - left, wait_s, text)
            else:
                bar(wait_s - left, wait_s, f"{title}, {text}")

        check_quiet(wait_s=wait_s, waiting=waiting, hint="measure nevertheless with --anyway")


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
        elif kind == "phase":
            self._phase(event["phase"])
        elif kind == "eval":
            label = "all held-out text" if event["final"] else "held-out text"
            self._say(
                f"step {event['step']}: {label}: {event['bits_per_byte']:.3f} bits per byte, "
                f"loss {event['loss']:.3f}"
            )
        elif kind == "checkpoint":
            self._say(f"step {event['step']}: checkpoint in {event['seconds']:.2f} s", minor=True)
        elif kind == "checkpoint_failed":
            self._say(
                f"step {event['step']}: the checkpoint was NOT saved: {event['message']}", "error"
            )
        elif kind == "checkpoint_level" and event["state"] in ("failed", "unreachable"):
            self._say(f"{event['place']}: {event['state']}: {event['message']}", "warning")
        elif kind == "corrupt":
            self._say(f"refused: {event['message']}", "warning")
        elif kind == "finished":
            self._say(
                f"the run is finished ({event['step']} steps); this is its report; give more "
                f"--steps to extend it"
            )
        elif kind == "restart":
            self._say(f"{event['message']}\nrestarting from the newest checkpoint")
        elif kind == "recover":
            self._say(f"snapshots in memory: {event['reason']}")
        elif kind == "memory_off":
            self._say(f"continuing without snapshots in memory: {event['message']}")
        elif kind == "fault":
            known = event["place"] is not None
            place = f"place {event['place']}" if known else "no rank could be located"
            self._say(f"fault ({event['rule']}, {place}) after {event['seconds']:.1f} s", "warning")

    def _start(self, event: dict[str, Any]) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._total = event["total"]
        word = "resumed" if event["resumed"] else "training"
        self._say(
            f"{word} at step {event['step']} of {event['total']}: "
            f"{event['parameters'] / 1e6:.2f} M parameters on {event['ranks']} rank(s)"
        )
        if event.get("learned", 0) < event.get("tokens", 0):
            self._say(f"loss on {event['learned']:,} of {event['tokens']:,} tokens: the answers")
        if event.get("cut"):
            self._say(
                f"{event['cut']:,} of {event['documents']:,} documents are longer than seq_len and "
                "lose their ends; a larger seq_len keeps them"
            )
        if self._quiet or not sys.stderr.isatty():
            return
        if self._bar is None:
            # Fits 80 columns: 10 + 10 + 11 + 28 + 7 + 4 and the spaces between them.
            self._bar = Progress(
                TextColumn("{task.description:<10}", markup=False),
                BarColumn(bar_width=10),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}", style=STYLES["headline"], markup=False),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=console(stderr=True),
            )
            self._bar.start()
            self._task = self._bar.add_task("training", total=self._total, note="")
        assert self._task is not None
        self._bar.update(self._task, completed=event["step"])

    def _phase(self, name: str) -> None:
        """Show what the run does between two steps, until the next one."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=name)

    def _step(self, event: dict[str, Any]) -> None:
        note = f"loss {event['loss']:.3f}  {event['tokens_per_s']:,.0f} tok/s"
        if self._bar is not None and self._task is not None:
            done = event["step"] + 1
            self._bar.update(self._task, completed=done, note=note, description="training")
            return
        if "mfu" in event:  # of what is trained whole
            note += f"  {100 * event['mfu']:.0f} % MFU"
        from shoal.core.sizes import human_bytes

        note += f"  {human_bytes(event['memory_bytes'])}"
        if time.monotonic() - self._line > 10:
            self._line = time.monotonic()
            left = (self._total - event["step"] - 1) * event["step_s"]
            self._say(f"step {event['step'] + 1}/{self._total}  {note}  {left:.0f} s left")

    def _say(self, text: str, mark: Mark = "", *, minor: bool = False) -> None:
        if self._quiet:
            return
        if self._bar is not None:
            if not minor:
                self._bar.console.print(text, style=STYLES[mark])
        elif not minor:
            echo(text, mark, stderr=True)
