"""The timeline of a run: its starts on their places, and what its ranks did in one of them.

Two sources, both bounded: the events, of which :class:`~shoal.train.runs.Events` keeps the
newest that say how the run went, and the flights of the ranks, rings of a fixed size.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from shoal.app.dash.lanes import Lanes, LaneSpan, LaneStay, PlaceHistory
from shoal.core.errors import ShoalError
from shoal.core.parts import table
from shoal.train.layout import RunDir
from shoal.train.runs import Events, RunStatus, finite, number, open_inside, rank_errors
from shoal.train.watch.evidence import Evidence
from shoal.train.watch.protocols import Fault
from shoal.train.watch.recorder import COMPUTE, Flight, read

# Lanes that one picture has; the others are a link away.
MAX_RANKS = 16
# Ranks that are read at all, and the largest file of records that is.
_MOST_RANKS = 256
_MAX_BYTES = 16 * 2**20
# Newest records of a rank, so that a page is made in a second.
_MAX_ROWS = 3000
_STEPS = 4
_LOCATORS = ("megascale", "c4d")
_GOES_ON = "still running"

# Rule of the driver -> display name.
_RULES = {
    "lost": "crash",
    "error": "error",
    "keyword": "hardware error",
    "beat": "process stopped",
    "hang": "hang",
    "slow": "slow compute",
    "self_check": "failed self-check",
}
_KINDS = {
    "communication_hang": "hang in communication",
    "non_communication_hang": "hang outside communication",
    "communication_slow": "slow link",
    "non_communication_slow": "slow compute",
}


@dataclass
class _Start:
    """One start of the run: from its beginning to its fault or its end.

    Args:
        index: from 1.
        places: what its ranks run on; empty where the events do not say.
        begin: wall-clock seconds.
        end: the same; the newest event of it.
        fault: the event that ended it; None if none did.
        restart: what the driver did about it.
        how: how it ended, in words.
        start: what its ranks reported when they began; None before they did.
        bad: it ended before the run was over, and nobody had asked for that.
        message: why, in the words of its ranks.
        then: what was done about it; empty where the restart says it.
    """

    index: int
    places: tuple[int, ...]
    begin: float
    end: float
    first: int = -1
    last: int = -1
    fault: dict[str, Any] | None = None
    restart: dict[str, Any] | None = None
    how: str = "end not recorded"
    start: dict[str, Any] | None = None
    bad: bool = False
    message: str = ""
    then: str = ""


def timeline(run: RunStatus, events: Events, query: Mapping[str, str]) -> dict[str, Any]:
    """What the page shows.

    Args:
        run: whose.
        events: of that run, read up to now.
        query: ``start`` (from 1), ``from`` and ``to`` (steps), ``ranks`` (first lane).
    """
    starts = _starts(events)
    failure = "; ".join(rank_errors(run.entry.path)) if run.state == "failed" else ""
    if starts and run.state == "failed" and starts[-1].fault is None:
        starts[-1].how, starts[-1].bad = "error" if failure else "ended unexpectedly", True
        starts[-1].message, starts[-1].then = failure, "the run ended here"
    base = f"/runs/{run.entry.id}/timeline"
    page: dict[str, Any] = {
        "run": run,
        "starts": [_start_row(start, base) for start in starts],
        "places": _places(starts, run.live) if starts else None,
        "skipped_lines": events.skipped_lines,
        "shortened": events.shortened,
        "records": None,
        "failure": failure,
        "error": "",
        "chosen": 0,
    }
    if run.entry.path is None:
        page["error"] = "this run is only in the score; its directory is unknown"
        return page
    chosen = _whole(query.get("start"), len(starts)) if starts else 1
    chosen = chosen if 1 <= chosen <= max(1, len(starts)) else max(1, len(starts))
    page["chosen"] = chosen
    now = chosen == max(1, len(starts)) and not (starts and starts[-1].fault)
    directory = RunDir(run.entry.path)
    fault = starts[chosen - 1].fault if starts else None
    if not now and fault is None:
        page["error"] = "the records of its ranks were replaced when the run was resumed"
        return page
    # The driver of a robust run keeps the records of each start that ended by a fault.
    kept = sum(one.fault is not None for one in starts[:chosen])
    folder = directory.ranks if now else directory.faults / str(kept)
    try:
        page["records"] = _records(folder, fault, query, base, chosen, now and run.live)
    except ShoalError as cause:
        page["error"] = str(cause)
    return page


def _whole(text: str | None, otherwise: int) -> int:
    """A number of an address; what is none counts as not given."""
    good = text is not None and text.isascii() and text.isdigit() and len(text) < 10
    return int(text) if good and text is not None else otherwise


# The starts


def _starts(events: Events) -> list[_Start]:
    """The starts of a run, from its events."""
    starts: list[_Start] = []
    places: tuple[int, ...] = ()
    here: _Start | None = None
    for event in events.story:
        kind, time = str(event.get("kind")), number(event.get("time"))
        if not math.isfinite(time):
            continue
        if here is not None and kind == "start" and here.start is not None:
            # The ranks of a run that was killed, or asked to stop, and then resumed.
            if here.how == _GOES_ON:
                here.how, here.bad = "killed", True
            first = _whole(str(event.get("step")), 0)
            here.then = f"resumed at step {first}" if event.get("resumed") else "began anew"
            here = None
        if here is None and kind in ("start", "restart", "fault", "step"):
            here = _Start(len(starts) + 1, places, time, time)
            starts.append(here)
        if kind == "restart":
            places = _ints(event.get("places"))
            if len(starts) > 1 and here is not None:
                starts[-2].restart = event
            if here is not None:
                here.places = places
        elif here is not None and kind == "start":
            world = _whole(str(event.get("ranks")), 0)
            if len(here.places) != world and 0 < world <= 65536:
                here.places = tuple(range(world))
            here.how, here.start = _GOES_ON, event
        elif here is not None and kind == "step":
            step = _whole(str(event.get("step")), 0)
            here.first = step if here.first < 0 else min(here.first, step)
            here.last = max(here.last, step)
        elif here is not None and kind in ("end", "stop"):
            here.how = "finished" if kind == "end" else "stopped on request"
        elif here is not None and kind == "fault":
            here.fault, here.end, here.bad = event, time, True
            here.message = str(event.get("message", ""))
            begin = time - number(event.get("seconds_of_start"))
            here.begin = begin if math.isfinite(begin) and here.last < 0 else here.begin
            here.how = _name(event)
            places = here.places
            here = None
            continue
        if here is not None:
            here.end = max(here.end, time)
    return starts


def _ints(value: Any) -> tuple[int, ...]:
    listed = value if isinstance(value, list) else []
    return tuple(one for one in listed if isinstance(one, int) and 0 <= one <= 65536)


def _name(event: Mapping[str, Any]) -> str:
    """What a finding of the driver is called."""
    message, rule = str(event.get("message", "")), str(event.get("rule", ""))
    if "the loss is" in message or "the norm of the gradients is" in message:
        return "loss or gradients not finite"
    located = event.get("fault")
    if rule in ("hang", "slow") and isinstance(located, dict):
        return _KINDS.get(str(located.get("kind")), _RULES.get(rule, rule))
    return _RULES.get(rule, rule or "fault")


def _start_row(start: _Start, base: str) -> dict[str, Any]:
    fault, restart = start.fault, start.restart
    place = None if fault is None else fault.get("place")
    after = start.then
    if fault is not None:
        after = "the run ended here"
        if restart is not None:
            left = _ints(restart.get("places"))
            if place is None:
                after = "started again on the same places"
            elif len(left) < len(start.places):
                after = f"place {place} excluded; continued with {len(left)} ranks"
            else:
                after = f"place {place} excluded; a spare took over"
    return {
        "index": start.index,
        "href": f"{base}?{urlencode({'start': start.index})}",
        "begin": start.begin,
        "seconds": max(0.0, start.end - start.begin),
        "steps": "none" if start.last < 0 else f"{start.first} to {start.last}",
        "how": start.how,
        "bad": start.bad,
        "fault": fault is not None,
        "rank": None if fault is None else fault.get("rank"),
        "place": place,
        "after_s": None if fault is None else finite(fault.get("seconds")),
        "message": start.message[:600],
        "then": after,
    }


def _places(starts: Sequence[_Start], live: bool) -> PlaceHistory:
    """The starts on the places that their ranks ran on."""
    stays, gone = [], {}
    for start in starts:
        named = start.fault.get("place") if start.fault is not None else None
        for rank, place in enumerate(start.places):
            text = f"start {start.index}, place {place} as rank {rank}: {start.how}"
            stays.append(LaneStay(place, start.begin, start.end, text, bad=place == named))
        if isinstance(named, int) and named in start.places and start.restart is not None:
            gone[named] = (start.end, start.how)
    return PlaceHistory(
        stays=stays,
        excluded={place: what for place, what in gone.items() if isinstance(place, int)},
        marks=[(start.end, f"{start.index}: {start.how}") for start in starts if start.bad],
        live=live,
    )


# The records of one start


def _flights(folder: Path) -> tuple[dict[int, Flight], list[str]]:
    """The newest records of every rank, and what could not be read."""
    flights: dict[int, Flight] = {}
    notes: list[str] = []
    if folder.is_symlink() or not folder.is_dir():
        return flights, notes
    with os.scandir(folder) as children:
        names = sorted(c.name for c in children if c.name.endswith(".flight"))
    if len(names) > _MOST_RANKS:
        notes.append(f"{len(names)} ranks have records; the first {_MOST_RANKS} are read")
    for name in names[:_MOST_RANKS]:
        file = open_inside(folder, name)
        if file is None:
            continue
        with file:
            status = os.fstat(file.fileno())
        if status.st_size > _MAX_BYTES:
            notes.append(f"{name}: {status.st_size} bytes exceed the limit of this page; left out")
            continue
        try:
            flight = read(folder / name)
        except (ShoalError, IndexError) as cause:
            notes.append(f"{name}: left out: {cause}")
            continue
        if flight is not None:
            lost = flight.lost + max(0, len(flight.rows) - _MAX_ROWS)
            flights[flight.rank] = flight._replace(rows=flight.rows[-_MAX_ROWS:], lost=lost)
    return flights, notes


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """What changes when the records do."""
    if folder.is_symlink() or not folder.is_dir():
        return ()
    with os.scandir(folder) as children:
        files = [c for c in children if c.name.endswith(".flight")]
        return tuple(
            sorted(
                (c.name, status.st_mtime_ns, status.st_size)
                for c in files[: 2 * _MOST_RANKS]
                for status in [c.stat(follow_symlinks=False)]
            )
        )


@dataclass(frozen=True)
class _Told:
    """The evidence of one start and what the locators say of it."""

    evidence: Evidence | None
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]


@functools.lru_cache(maxsize=4)
def _look(folder: Path, _stamp: object, live: bool) -> _Told:
    flights, result = _flights(folder)
    if not flights:
        return _Told(None, (), tuple(result))
    evidence = Evidence(flights)
    faults: list[Fault] = []
    # Of a run that goes on, who stands in an operation now stands there by right.
    for name in () if live else _LOCATORS:
        try:
            verdict = table("locator").build(name).locate(evidence)
        except ShoalError as cause:
            result.append(f"{name}: {cause}")
            continue
        known = {(fault.kind, fault.ranks) for fault in faults}
        faults += [fault for fault in verdict.faults if (fault.kind, fault.ranks) not in known]
    return _Told(evidence, tuple(faults[:32]), tuple(result))


def _records(
    folder: Path,
    fault: dict[str, Any] | None,
    query: Mapping[str, str],
    base: str,
    chosen: int,
    live: bool,
) -> dict[str, Any]:
    """The picture and the table of one start; without records, what to do."""
    result = _look(folder, _stamp(folder), live)
    evidence = result.evidence
    page: dict[str, Any] = {"picture": None, "notes": result.notes, "named": [], "rows": []}
    if evidence is None:
        return page
    steps = sorted({step for begin in evidence.begins.values() for step in begin if step >= 0})
    if not steps:
        return page
    last = min(_whole(query.get("to"), steps[-1]), steps[-1])
    first = max(_whole(query.get("from"), last - _STEPS + 1), steps[0])
    first = min(first, last) if first <= steps[-1] else steps[-1]
    last = max(first, last)
    named = _named(result.faults, fault)
    ranks = list(evidence.flights)
    at = min(_whole(query.get("ranks"), 0), max(0, len(ranks) - 1)) // MAX_RANKS * MAX_RANKS
    shown = ranks[at : at + MAX_RANKS]
    begin, end = _window(evidence, first, last, steps[-1])

    def href(**changes: int) -> str:
        words = {"start": chosen, "from": first, "to": last, "ranks": at, **changes}
        return f"{base}?{urlencode(words)}#ranks"

    width = last - first + 1
    page.update(
        first=first,
        last=last,
        oldest=steps[0],
        newest=steps[-1],
        ranks_at=at,
        num_ranks=len(ranks),
        zoom=_zoom(first, last, steps, href),
        groups=[
            (f"{ranks[i]} to {ranks[min(i + MAX_RANKS, len(ranks)) - 1]}", href(ranks=i), i == at)
            for i in range(0, len(ranks), MAX_RANKS)
        ],
        named=[
            (", ".join(map(str, one.ranks)), _fault_name(one), one.text) for one in result.faults
        ],
        rows=[_row(evidence, rank, first, last, named.get(rank, ())) for rank in ranks],
        picture=Lanes(
            title=f"Ranks in step{'s' if width > 1 else ''} {first}"
            + (f" to {last}" if width > 1 else ""),
            begin=begin,
            end=end,
            lanes={rank: _spans(evidence, rank, begin, end) for rank in shown},
            marks={rank: named[rank] for rank in shown if rank in named},
            steps=_step_marks(evidence, first, last),
            last=last == steps[-1] and not live,
        ),
    )
    return page


def _zoom(first: int, last: int, steps: Sequence[int], href: Any) -> list[tuple[str, str]]:
    """(words, address) of the windows one may go to from here; empty where there is none."""
    width = last - first + 1
    low, high = steps[0], steps[-1]
    near = first + width // 4
    far_from = max(low, first - (width + 1) // 2)
    far_to = min(high, last + (width + 1) // 2)
    earlier, later = max(low, first - width), min(high, last + width)
    whole = first > low or last < high
    return [
        ("‹ Earlier", href(**{"from": earlier, "to": earlier + width - 1}) if first > low else ""),
        ("Later ›", href(**{"from": later - width + 1, "to": later}) if last < high else ""),
        (
            "Zoom in",
            href(**{"from": near, "to": near + max(width // 2, 1) - 1}) if width > 1 else "",
        ),
        ("Zoom out", href(**{"from": far_from, "to": far_to}) if whole else ""),
        ("All recorded", href(**{"from": low, "to": high}) if whole else ""),
    ]


def _window(evidence: Evidence, first: int, last: int, newest: int) -> tuple[int, int]:
    """The time that the steps take, over all ranks, ns."""
    begins = [b[s] for b in evidence.begins.values() for s in b if first <= s <= last]
    after = [b[last + 1] for b in evidence.begins.values() if last + 1 in b]
    begin = min(begins, default=0)
    end = evidence.now if last >= newest or not after else max(after)
    return begin, max(end, begin + 1)


def _named(faults: Sequence[Fault], event: Mapping[str, Any] | None) -> dict[int, tuple[str, ...]]:
    """Rank -> what was named about it, the driver's finding first."""
    result: dict[int, tuple[str, ...]] = {}
    if event is not None and isinstance(event.get("rank"), int):
        result[event["rank"]] = (_name(event),)
    for fault in faults:
        for rank in fault.ranks:
            words = result.get(rank, ())
            name = _fault_name(fault)
            if name not in words:
                result[rank] = (*words, name)
    return result


def _fault_name(fault: Fault) -> str:
    name = _KINDS[fault.kind]
    if fault.place == "link" and len(fault.ranks) == 2:
        name = f"{name} {fault.ranks[0]} → {fault.ranks[1]}"
    return f"{name}, {fault.ratio:.1f}×" if fault.ratio > 1 else name


def _spans(evidence: Evidence, rank: int, begin: int, end: int) -> list[LaneSpan]:
    """What a rank did between two times: computing, messages on their way, waiting."""
    flight, offset = evidence.flights[rank], evidence.offsets[rank]
    # Where no rank keeps another waiting, it computes: only some of that has a name.
    over = []
    if len(flight.rows):
        newest = max(int(flight.rows[key].max()) for key in ("enter", "issued", "waited", "left"))
        over = [
            LaneSpan("compute", min(evidence.begins[rank].values()), newest - offset, "computes")
        ]
    results = []
    if COMPUTE in flight.names:
        code = flight.names.index(COMPUTE)
        for row in flight.rows[flight.rows["op"] == code].tolist():
            left = row[3] - offset if row[3] else evidence.now
            name = flight.names[row[9]] if row[9] < len(flight.names) else ""
            results.append(LaneSpan("phase", row[0] - offset, left, name))
    for entry in evidence.entries[rank]:
        name = f"{entry.op} {entry.tag}".strip()
        if entry.peer >= 0:
            name += f" {'to' if entry.op == 'send' else 'from'} rank {entry.peer}"
        if entry.blocked:
            results.append(LaneSpan("stuck", entry.since, evidence.now, f"stands in {name}"))
            continue
        if entry.issued:
            results.append(LaneSpan("flight", entry.enter, entry.done or evidence.now, name))
        if entry.issued > entry.enter:
            results.append(LaneSpan("wait", entry.enter, entry.issued, f"waits in {name}"))
        if entry.waited and entry.left:
            results.append(LaneSpan("wait", entry.waited, entry.left, f"waits for {name}"))
    return [span for span in [*over, *results] if span.end >= begin and span.begin <= end]


def _step_marks(evidence: Evidence, first: int, last: int) -> list[tuple[int, str]]:
    """When each step began, on the rank that began it first."""
    marks = []
    for step in range(first, last + 1):
        begins = [begin[step] for begin in evidence.begins.values() if step in begin]
        if begins:
            marks.append((min(begins), f"step {step}"))
    return marks


def _row(
    evidence: Evidence, rank: int, first: int, last: int, notes: tuple[str, ...]
) -> dict[str, Any]:
    """What one rank did in the steps that are shown, a step, by the median."""
    wanted = range(first, last + 1)
    mine = _median([s for step, s in evidence.busy[rank].items() if step in wanted])
    all_ = [
        _median([s for step, s in steps.items() if step in wanted])
        for steps in evidence.busy.values()
    ]
    usual = _median([one for one in all_ if one is not None])
    begin = evidence.begins[rank]
    lengths = [
        (begin[step + 1] - begin[step]) / 1e9
        for step in wanted
        if step in begin and step + 1 in begin
    ]
    length = _median(lengths)
    standing = evidence.blocked.get(rank)
    where = ""
    if standing is not None:
        entry = standing[1]
        where = f"{entry.op} {entry.tag}".strip() + f", step {entry.step}"
    return {
        "rank": rank,
        "busy_s": mine,
        "waits_s": max(0.0, length - mine) if mine is not None and length is not None else None,
        "share": mine / length if mine is not None and length else None,
        "ratio": mine / usual if mine is not None and usual else None,
        "at": where,
        "messages": notes,
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
