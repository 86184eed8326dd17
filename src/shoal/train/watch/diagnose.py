"""A run's records for people: a verdict in words, a heat map, a trace for Perfetto."""

from __future__ import annotations

import html
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from shoal.core.files import write_atomic
from shoal.core.parts import table
from shoal.train.watch.evidence import Evidence
from shoal.train.watch.megascale import growing_spread
from shoal.train.watch.protocols import Fault, FaultLocator, FaultVerdict
from shoal.train.watch.recorder import COMPUTE


def diagnose(directory: Path, locators: tuple[str, ...] = ("c4d", "megascale")) -> dict[str, Any]:
    """Ask the locators about a run, and write ``heat.html`` and ``trace.json`` beside its records.

    Args:
        directory: of the run's records, ``RUN/ranks``.
        locators: parts of kind ``locator``.

    Returns:
        ``verdict``: locator -> what it says; ``text``; ``files``; ``driver``: what a robust
        run's driver found last, if it did.

    Raises:
        RankError: there are no records, or a file is damaged.
    """
    evidence = Evidence.load(directory)
    said: dict[str, FaultVerdict] = {}
    for name in locators:
        locator: FaultLocator = table("locator").build(name, where="--locator")
        said[name] = locator.locate(evidence)
    heat, trace = directory / "heat.html", directory / "trace.json"
    text = verdict_text(evidence, said)
    write_atomic(heat, heat_map(evidence, text))
    write_atomic(trace, json.dumps(perfetto(evidence)))
    result: dict[str, Any] = {
        "verdict": {name: verdict.model_dump(mode="json") for name, verdict in said.items()},
        "text": text,
        "files": [str(heat), str(trace)],
    }
    outcome = directory / "fault.json"
    if outcome.exists():
        result["driver"] = json.loads(outcome.read_text())
    return result


def verdict_text(evidence: Evidence, said: dict[str, FaultVerdict]) -> str:
    """What was found, in lines."""
    steps = evidence.steps()
    period, _ = evidence.period_s()
    lines = [
        f"{len(evidence.flights)} of {evidence.world} ranks recorded "
        f"{sum(len(rows) for rows in evidence.entries.values())} operations"
        + (f" in steps {steps[0]} to {steps[-1]}" if steps else "")
        + f"; {1e3 * period:.2f} ms between two of a rank"
    ]
    ahead = {rank: offset for rank, offset in evidence.offsets.items() if offset}
    if ahead:
        spelled = ", ".join(f"rank {rank} {offset / 1e6:+.3f} ms" for rank, offset in ahead.items())
        lines.append(f"clocks ahead of rank {min(evidence.flights)}'s: {spelled}")
    for name, verdict in said.items():
        if not verdict.faults:
            lines.append(f"{name}: nothing found")
        lines += [f"{name}: {_spell(fault)}" for fault in verdict.faults]
        lines += [f"{name}: note: {note}" for note in verdict.notes]
    drift = growing_spread(evidence)
    if len(steps) >= 20 and drift * len(steps) > 0.1 * max(_step_s(evidence), 1e-9):
        lines.append(
            f"arrivals drift apart by {1e6 * drift:.0f} us a step: some rank slowly gets slower"
        )
    return "\n".join(lines)


def _spell(fault: Fault) -> str:
    kind = fault.kind.replace("non_communication", "outside of communication")
    score = f" (z = {fault.score:.1f})" if fault.score else ""
    return f"{kind.replace('_', ' ')}: {fault.text}{score}"


def _step_s(evidence: Evidence) -> float:
    values = [s for steps in evidence.busy.values() for s in steps.values()]
    return statistics.median(values) if values else 0.0


def _sums(evidence: Evidence) -> tuple[list[str], dict[int, dict[str, float]]]:
    """Operations, and rank -> operation -> median seconds a step."""
    steps = set(evidence.steps())
    by: dict[int, defaultdict[str, defaultdict[int, float]]] = {
        rank: defaultdict(lambda: defaultdict(float)) for rank in evidence.flights
    }
    for rank, rows in evidence.entries.items():
        for entry in rows:
            if entry.step in steps:
                name = f"{entry.op} {entry.tag}".strip()
                by[rank][name][entry.step] += entry.blocked_ns / 1e9
        for step, seconds in evidence.busy[rank].items():
            if step in steps:
                by[rank]["busy"][step] = seconds
        for step, phases in evidence.phases[rank].items():
            if step in steps:
                for name, seconds in phases.items():
                    by[rank][f"busy in {name}"][step] = seconds
    names = sorted(
        {name for ops in by.values() for name in ops}, key=lambda n: (not n.startswith("busy"), n)
    )
    return names, {
        rank: {name: statistics.median(times.values()) for name, times in ops.items()}
        for rank, ops in by.items()
    }


def heat_map(evidence: Evidence, text: str = "") -> str:
    """A page: ranks down, busy time and waits by operation across, dark where it is long."""
    names, result = _sums(evidence)
    most = {name: max((ops.get(name, 0.0) for ops in result.values()), default=0) for name in names}
    head = "".join(f"<th scope=col>{html.escape(name)}</th>" for name in names)
    lines = []
    for rank, ops in result.items():
        cells = []
        for name in names:
            value = ops.get(name, 0.0)
            share = value / most[name] if most[name] else 0.0
            # Light to dark of one hue: readable without distinguishing colours.
            ink = "#fff" if share > 0.6 else "#111"
            style = f"background:hsl(16 80% {96 - 55 * share:.0f}%);color:{ink}"
            cells.append(f'<td style="{style}">{1e3 * value:.3f}</td>')
        lines.append(f"<tr><th scope=row>rank {rank}</th>{''.join(cells)}</tr>")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>ranks and operations</title>"
        "<style>body{font:14px system-ui;margin:2em}table{border-collapse:collapse}"
        "td,th{padding:.3em .6em;text-align:right;border:1px solid #ccc}pre{white-space:pre-wrap}"
        "</style><h1>Ranks and operations</h1>"
        "<p>Milliseconds a step, medians: time a rank was busy, and how long it stood in each "
        "operation. Who waits longest is not to blame; who is busy longest may be.</p>"
        f"<pre>{html.escape(text)}</pre>"
        f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
        "</html>\n"
    )


def perfetto(evidence: Evidence) -> dict[str, Any]:
    """The records in the Trace Event Format, which Perfetto and Chrome open; times in us."""
    starts = [rows[0].enter for rows in evidence.entries.values() if rows]
    zero = min(starts, default=0)
    events: list[dict[str, Any]] = []
    for rank, flight in evidence.flights.items():
        events.append(
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        )
        for number, name in enumerate(("operations", "waits", "phases")):
            events.append(
                {
                    "ph": "M",
                    "pid": rank,
                    "tid": number,
                    "name": "thread_name",
                    "args": {"name": name},
                }
            )
        for entry in evidence.entries[rank]:
            name = f"{entry.op} {entry.tag}".strip()
            end = entry.done or evidence.now
            args = {"seq": entry.seq, "step": entry.step, "bytes": entry.nbytes, "peer": entry.peer}
            events.append(_span(rank, 0, name, entry.enter - zero, end - entry.enter, args))
            if entry.waited:
                stood = (entry.left or evidence.now) - entry.waited
                events.append(_span(rank, 1, name, entry.waited - zero, stood, args))
        number = flight.names.index(COMPUTE) if COMPUTE in flight.names else -1
        offset = evidence.offsets[rank]
        for row in flight.rows[flight.rows["op"] == number].tolist():
            begin = row[0] - offset
            end = (row[3] - offset) if row[3] else evidence.now
            name = flight.names[row[9]]
            events.append(_span(rank, 2, name, begin - zero, end - begin, {"step": row[6]}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _span(
    rank: int, thread: int, name: str, begin: int, length: int, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "ts": begin / 1e3,
        "dur": max(length, 0) / 1e3,
        "args": args,
    }
