"""A log as numbers: entries in order, and what all readers share.

Quantities are in plain units and go by the same names everywhere: ``step_s``,
``tokens_per_s`` (of the whole job; of a server, output), ``device_tokens_per_s``,
``samples_per_s``, ``device_flops`` (FLOP/s of one device), ``mfu`` (a share),
``memory_bytes`` (of one device), ``loss``; and of a server ``prompt_tokens_per_s``,
``requests_per_s``, ``ttft_p50_s``, ``ttft_p95_s``, ``tpot_p50_s``, ``tpot_p95_s``,
``decode_tokens_per_s`` (of one request), ``total_s``.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal, NamedTuple

from shoal.core.errors import DataError

GIB = 2**30
# Lines from which a format is guessed.
SNIFFED = 4000
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
# Quantities from which the pace of a run is seen, and whether more of it is faster.
PACES = (
    ("step_s", False),
    ("tokens_per_s", True),
    ("device_tokens_per_s", True),
    ("samples_per_s", True),
)
# Above the later pace by so much, an early step belongs to the warm-up.
WARM = 1.25


class LogEntry(NamedTuple):
    """What the log says at one step, or at one time.

    Args:
        step: optimizer step, or number of the entry.
        line: where it stands; 0 where there are no lines.
        values: quantity -> value.
    """

    step: int
    line: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class Log:
    """The parsed contents.

    Args:
        format: name of the part that read it.
        job: what kind of job it was.
        totals: quantities of the whole run, where the log states them.
        facts: what the log says of the job: fact -> (value, line); ``global_batch``,
            ``seq_len``.
    """

    format: str
    path: Path
    job: Literal["train", "serve"]
    entries: tuple[LogEntry, ...]
    totals: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, tuple[float, int]] = field(default_factory=dict)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text without colours) of every line; a progress bar's updates are lines.

    Raises:
        DataError: the file is missing, is not text or is empty.
    """
    result = False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for place, line in enumerate(file, 1):
                if "\0" in line:
                    raise DataError(
                        f"{path}, line {place}: not text; give a log in text, or name the format "
                        "with --format"
                    )
                result = True
                yield place, _ANSI.sub("", line.rstrip("\n"))
    except OSError as cause:
        raise DataError(
            f"{path}: cannot be read ({cause.strerror or cause}); give a log that exists"
        ) from cause
    if not result:
        raise DataError(f"{path}: is empty; give the log of a run")


def head(path: Path) -> Iterator[str]:
    """The first lines, for guessing; nothing of what is not text."""
    try:
        for _, line in itertools.islice(lines(path), SNIFFED):
            yield line
    except DataError:  # it says so again when it is read
        return


def is_last(path: Path, place: int) -> bool:
    """Whether the line of this number is the file's last, which a crash may have cut."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return next(itertools.islice(file, place, None), None) is None


def number(text: str, path: Path, place: int, name: str) -> float:
    """A finite number as people and engines write it.

    Raises:
        DataError: it is none; names the line.
    """
    try:
        result = float(text.replace(",", "").rstrip("%"))
    except ValueError:
        result = math.nan
    if not math.isfinite(result):
        raise DataError(
            f"{path}, line {place}: {name} = {text!r}: expected a number; remove the line, or give "
            "the log of a run that did not fail there"
        )
    return result


def refuse(path: Path, name: str, sample: str) -> DataError:
    """The error of a file that is no such log: its first line beside one that would do."""
    place, text = next(((p, t) for p, t in lines(path) if t.strip()), (1, ""))
    return DataError(
        f"{path}, line {place}: {text.strip()[:80]!r}: this is not a log of {name}, whose lines "
        f"look like {sample!r}; give such a log, or another --format"
    )


def stamp(line: str) -> float | None:
    """Seconds since 1970 that the line begins with, by no zone in particular; None without."""
    match = _STAMP.search(line)
    if match is None:
        return None
    day, clock, part = match.groups()
    whole = datetime.fromisoformat(f"{day}T{clock}+00:00").timestamp()
    return whole + (float(f"0.{part}") if part else 0.0)


def paced(entries: Iterable[LogEntry], times: Iterable[float | None]) -> tuple[LogEntry, ...]:
    """The entries with ``step_s`` from the clock where they have no pace of their own.

    Args:
        entries: in order.
        times: when each was written, s; None where that is not known.
    """
    log_entries: list[LogEntry] = []
    before: tuple[int, float] | None = None
    for entry, now in zip(entries, times, strict=True):
        values = dict(entry.values)
        known = any(name in values for name, _ in PACES)
        if not known and now is not None and before is not None and entry.step > before[0]:
            seconds = (now - before[1]) / (entry.step - before[0])
            if seconds > 0:
                values["step_s"] = seconds
        if now is not None:
            before = (entry.step, now)
        log_entries.append(entry._replace(values=values))
    return tuple(log_entries)


def steady(log: Log) -> tuple[dict[str, float], int]:
    """(quantity -> its value in the steady state, entries of the steady state).

    Early entries slower than the later half's median by a quarter are the warm-up, and the
    first of several always is. The rest's median counts; of memory the most, of the loss the
    last. A server's entries without output are left out. Totals that the log states itself
    are taken as they are.
    """
    entries = list(log.entries)
    if log.job == "serve":
        entries = [e for e in entries if e.values.get("tokens_per_s", 1.0) > 0]
    kept = entries[_warm_up(entries) :]
    series: dict[str, list[float]] = {}
    for entry in kept:
        for name, value in entry.values.items():
            series.setdefault(name, []).append(value)
    result = {name: statistics.median(values) for name, values in series.items()}
    if "memory_bytes" in series:
        result["memory_bytes"] = max(
            e.values["memory_bytes"] for e in entries if "memory_bytes" in e.values
        )
    if "loss" in series:
        result["loss"] = series["loss"][-1]
    return {**result, **log.totals}, len(kept)


def _warm_up(entries: list[LogEntry]) -> int:
    """Entries at the start that are not steady yet."""
    for name, faster in PACES:
        values = [(i, e.values[name]) for i, e in enumerate(entries) if e.values.get(name)]
        if len(values) >= 3:
            seconds = [(i, 1 / value if faster else value) for i, value in values]
            later = statistics.median(s for _, s in seconds[len(seconds) // 2 :])
            end = len(seconds) - 1
            warm = next((k for k, (_, s) in enumerate(seconds) if s <= WARM * later), end)
            return seconds[min(max(1, warm), end)][0]
    return 0
