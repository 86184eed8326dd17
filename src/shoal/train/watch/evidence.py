"""The flights of all ranks as one picture: operations by communicator, on one clock.

Ranks of one host share a clock. The clocks of hosts are put in line by the collectives: all
members have the result of a synchronising collective at nearly the same moment, so the median
difference of these moments is the difference of the clocks.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RankError, require
from shoal.train.watch.recorder import COMPUTE, Flight, read

# All members leave these together; the others let some ranks go early.
_SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier", "all_to_all"})
_MESSAGES = frozenset({"send", "receive"})
# Below this a wait is the cost of asking, ns.
_ASKING_NS = 50_000
# And below this share of the time since it was asked for, it may have come at any time before.
_WAITED = 0.2


class OperationRecord(NamedTuple):
    """One operation of one rank; times in ns on the common clock, 0 where it has not come to it."""

    rank: int
    op: str
    tag: str
    seq: int
    step: int
    nbytes: int
    peer: int
    enter: int
    issued: int
    waited: int
    left: int

    @property
    def blocked(self) -> bool:
        """The rank stands in it: the call has not returned, or its result is waited for."""
        return not self.left and (not self.issued or bool(self.waited))

    @property
    def blocked_ns(self) -> int:
        """How long the rank was kept waiting in it, as far as it has ended."""
        inside = self.issued - self.enter if self.issued else 0
        after = self.left - self.waited if self.left and self.waited else 0
        return inside + after

    @property
    def since(self) -> int:
        """Since when the rank stands in it."""
        return self.waited or self.enter

    @property
    def done(self) -> int:
        """When the result was there: the end of the wait that was the longer one."""
        if not self.left:
            return 0
        if self.waited and self.left - self.waited >= self.issued - self.enter:
            return self.left
        return self.issued

    @property
    def exact(self) -> bool:
        """The rank waited for the result, so ``done`` is when it came and not a later look."""
        if not self.left:
            return False
        wait = max(self.issued - self.enter, self.left - self.waited if self.waited else 0)
        return wait > max(_ASKING_NS, _WAITED * (self.done - self.enter))


class CollectiveRecord(NamedTuple):
    """One operation of a communicator: the entries of those ranks that have come to it."""

    name: str
    members: tuple[int, ...]
    seq: int
    entries: dict[int, OperationRecord]


class Message(NamedTuple):
    """Both ends of a message; None where an end has not come, or has no record."""

    name: str
    source: int
    target: int
    tag: str
    seq: int
    sent: OperationRecord | None
    received: OperationRecord | None


class Evidence:
    """Everything the ranks have recorded.

    Args:
        flights: by rank; ranks may be missing.
        world: ranks of the job.
        now: when the records were read, ns of the first rank's clock; the last record's time if
            not given.
    """

    def __init__(
        self, flights: Mapping[int, Flight], world: int | None = None, now: int | None = None
    ) -> None:
        require(
            bool(flights),
            "flights",
            0,
            expected="the records of at least one rank",
            hint="train with watch.record: true",
            error=RankError,
        )
        self.flights = dict(sorted(flights.items()))
        self.world = world or max(flight.world for flight in flights.values())
        self.missing = tuple(rank for rank in range(self.world) if rank not in flights)
        self._now = now

    @classmethod
    def load(cls, directory: Path, *, now: int | None = None) -> Evidence:
        """The flights ``rank-*.flight`` in a directory.

        Raises:
            RankError: there are none, or a file is damaged.
        """
        result = (read(path) for path in sorted(directory.glob("rank-*.flight")))
        flights = {flight.rank: flight for flight in result if flight is not None}
        if not flights:
            raise RankError(
                f"{directory}: no rank has recorded anything; train with watch.record: true"
            )
        return cls(flights, now=now)

    @cached_property
    def entries(self) -> dict[int, list[OperationRecord]]:
        """Every rank's operations in order, spans left out, on the common clock."""
        return {
            rank: list(_entries(flight, self.offsets[rank]))
            for rank, flight in self.flights.items()
        }

    @cached_property
    def now(self) -> int:
        """When the records were read, on the common clock."""
        if self._now is not None:
            return self._now
        last = [0]
        for rank, flight in self.flights.items():
            for field in ("enter", "issued", "waited", "left"):
                if len(flight.rows):
                    last.append(int(flight.rows[field].max()) - self.offsets[rank])
        return max(last)

    @cached_property
    def offsets(self) -> dict[int, int]:
        """Rank -> how far its clock is ahead of the first rank's, ns; 0 on the same host."""
        hosts = {rank: flight.host for rank, flight in self.flights.items()}
        first = next(iter(hosts.values()))
        ahead: dict[str, int] = {first: 0}
        if len(set(hosts.values())) > 1:
            differences: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
            raw = {rank: list(_entries(flight, 0)) for rank, flight in self.flights.items()}
            names = {rank: flight.names for rank, flight in self.flights.items()}
            comms = _communicators(names)
            for collective in _collectives(raw, comms, self.flights):
                done = {
                    rank: entry.done
                    for rank, entry in collective.entries.items()
                    if entry.done and entry.op in _SYNCHRONISING
                }
                for a, time_a in done.items():
                    for b, time_b in done.items():
                        if hosts[a] != hosts[b]:
                            differences[hosts[a], hosts[b]].append(time_b - time_a)
            todo = deque([first])
            while todo:
                here = todo.popleft()
                for (one, two), apart in differences.items():
                    if one == here and two not in ahead:
                        ahead[two] = ahead[one] + int(statistics.median(apart))
                        todo.append(two)
        return {rank: ahead.get(host, 0) for rank, host in hosts.items()}

    @cached_property
    def communicators(self) -> dict[str, tuple[int, ...]]:
        """Name of a communicator -> its ranks; empty where there are too many to write down."""
        return _communicators({rank: flight.names for rank, flight in self.flights.items()})

    @cached_property
    def collectives(self) -> list[CollectiveRecord]:
        """Every collective that at least one rank has entered, by communicator and number."""
        return list(_collectives(self.entries, self.communicators, self.flights))

    @cached_property
    def messages(self) -> list[Message]:
        """Every message of which at least one end is recorded."""
        result: dict[tuple[str, int, int, str, int], list[OperationRecord | None]] = {}
        for rank, rows in self._by_communicator.items():
            for name, entry in rows:
                if entry.op not in _MESSAGES or entry.peer < 0:
                    continue
                sends = entry.op == "send"
                ends = (rank, entry.peer) if sends else (entry.peer, rank)
                both = result.setdefault((name, *ends, entry.tag, entry.seq), [None, None])
                both[0 if sends else 1] = entry
        return [Message(*key, *both) for key, both in result.items()]

    @cached_property
    def _by_communicator(self) -> dict[int, list[tuple[str, OperationRecord]]]:
        return {
            rank: list(zip(_names_of(flight), self.entries[rank], strict=True))
            for rank, flight in self.flights.items()
        }

    @cached_property
    def blocked(self) -> dict[int, tuple[str, OperationRecord]]:
        """Rank -> communicator and operation in which it stands now."""
        result = {}
        for rank, rows in self._by_communicator.items():
            standing = [(name, entry) for name, entry in rows if entry.blocked]
            if standing:
                result[rank] = max(standing, key=lambda pair: pair[1].since)
        return result

    def steps(self) -> list[int]:
        """Steps of which every rank here has records, the last one not counted: it may go on."""
        seen = [
            {int(step) for step in np.unique(flight.rows["step"]) if step >= 0}
            for flight in self.flights.values()
        ]
        common = set.intersection(*seen) if seen else set()
        full = sorted(common)[:-1]
        # The oldest step may have been overwritten in part.
        return full[1:] if any(flight.lost for flight in self.flights.values()) else full

    @cached_property
    def begins(self) -> dict[int, dict[int, int]]:
        """Rank -> step -> when it began, ns: its first phase or operation."""
        result: dict[int, dict[int, int]] = {}
        for rank, rows in self.entries.items():
            begin = self._first_span(rank)
            for entry in rows:
                begin[entry.step] = min(entry.enter, begin.get(entry.step, entry.enter))
            result[rank] = begin
        return result

    @cached_property
    def busy(self) -> dict[int, dict[int, float]]:
        """Rank -> step -> seconds in which it was not kept waiting by others."""
        result: dict[int, dict[int, float]] = {}
        for rank, begin in self.begins.items():
            order = sorted(step for step in begin if step >= 0)
            edges = np.array([begin[step] for step in order], dtype=np.int64)
            waits = np.zeros(len(order), dtype=np.int64)
            for start, end in _union(self.entries[rank]):
                # A wait belongs to the step in which it began.
                place = int(np.searchsorted(edges, start, side="right")) - 1
                if place >= 0:
                    waits[place] += end - start
            result[rank] = {
                step: max(0.0, float(begin[after] - begin[step] - waits[i]) / 1e9)
                for i, (step, after) in enumerate(itertools.pairwise(order))
                if after == step + 1
            }
        return result

    @cached_property
    def phases(self) -> dict[int, dict[int, dict[str, float]]]:
        """Rank -> step -> phase -> seconds in which it was not kept waiting by others."""
        phases: dict[int, dict[int, dict[str, float]]] = {}
        for rank, flight in self.flights.items():
            steps = phases[rank] = {}
            if COMPUTE not in flight.names:
                continue
            rows = flight.rows
            rows = rows[(rows["op"] == flight.names.index(COMPUTE)) & (rows["left"] > 0)]
            # Time waited before a moment grows along each wait and is level between them.
            edges = np.array(_union(self.entries[rank]), dtype=np.float64).reshape(-1)
            waited = np.cumsum(edges[1::2] - edges[::2]) if len(edges) else np.zeros(0)
            level = np.repeat(np.concatenate([[0.0], waited]), 2)[1:-1] if len(edges) else edges
            begin, end = (
                rows[f].astype(np.float64) - self.offsets[rank] for f in ("enter", "left")
            )
            spent = end - begin
            if len(edges):
                spent -= np.interp(end, edges, level) - np.interp(begin, edges, level)
            for step, tag, ns in zip(
                rows["step"].tolist(), rows["tag"].tolist(), spent.tolist(), strict=True
            ):
                names = steps.setdefault(step, {})
                name = flight.names[tag]
                names[name] = names.get(name, 0.0) + max(0.0, ns) / 1e9
        return phases

    def _first_span(self, rank: int) -> dict[int, int]:
        flight = self.flights[rank]
        number = flight.names.index(COMPUTE) if COMPUTE in flight.names else -1
        rows = flight.rows[flight.rows["op"] == number]
        numbers: dict[int, int] = {}
        for step, enter in zip(rows["step"].tolist(), rows["enter"].tolist(), strict=True):
            numbers.setdefault(step, enter - self.offsets[rank])
        return numbers

    @cached_property
    def roles(self) -> dict[int, tuple[int, ...]]:
        """Rank -> the ranks that do the same work as it, by what they say to each other."""
        signs: defaultdict[frozenset[tuple[str, str, int, int]], list[int]] = defaultdict(list)
        for rank, rows in self._by_communicator.items():
            signs[
                frozenset(
                    (entry.op, entry.tag, entry.nbytes, len(self.communicators.get(name, ())))
                    for name, entry in rows
                )
            ].append(rank)
        return {rank: tuple(ranks) for ranks in signs.values() for rank in ranks}

    def period_s(self) -> tuple[float, float]:
        """Median and 99th percentile of the time between a rank's collectives, seconds."""
        gaps: list[int] = []
        for rows in self.entries.values():
            times = [entry.enter for entry in rows]
            gaps += [b - a for a, b in itertools.pairwise(times)]
        if not gaps:
            return 0.0, 0.0
        middle, most = np.percentile(np.array(gaps), [50, 99])
        return float(middle) / 1e9, float(most) / 1e9


def _union(rows: Iterable[OperationRecord]) -> list[tuple[int, int]]:
    """The stretches of time in which a rank stood in operations, one after the other."""
    spans = []
    for entry in rows:
        if entry.issued > entry.enter:
            spans.append((entry.enter, entry.issued))
        if entry.left and entry.waited:
            spans.append((entry.waited, entry.left))
    spans.sort()
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _names_of(flight: Flight) -> Iterable[str]:
    names = flight.names
    compute = names.index(COMPUTE) if COMPUTE in names else -1
    return [
        names[comm]
        for comm, op in zip(flight.rows["comm"], flight.rows["op"], strict=True)
        if op != compute
    ]


def _entries(flight: Flight, offset: int) -> Iterable[OperationRecord]:
    names = flight.names

    def at(time: int) -> int:
        return time - offset if time else 0

    for row in flight.rows.tolist():
        enter, issued, waited, left, nbytes, seq, step, _comm, op, tag, peer = row
        if names[op] == COMPUTE:
            continue
        yield OperationRecord(
            flight.rank,
            names[op],
            names[tag],
            seq,
            step,
            nbytes,
            peer,
            enter - offset,
            at(issued),
            at(waited),
            at(left),
        )


def _communicators(names: Mapping[int, tuple[str, ...]]) -> dict[str, tuple[int, ...]]:
    communicators: dict[str, tuple[int, ...]] = {}
    for words in names.values():
        for word in words:
            if word.startswith("comm:"):
                spelled = word.rpartition(":")[2]
                listed = spelled.replace(",", "").isdigit()
                communicators[word] = tuple(map(int, spelled.split(","))) if listed else ()
    return communicators


def _collectives(
    entries: Mapping[int, list[OperationRecord]],
    communicators: Mapping[str, tuple[int, ...]],
    flights: Mapping[int, Flight],
) -> Iterable[CollectiveRecord]:
    result: dict[tuple[str, int], dict[int, OperationRecord]] = {}
    for rank, rows in entries.items():
        for name, entry in zip(_names_of(flights[rank]), rows, strict=True):
            if entry.op not in _MESSAGES:
                result.setdefault((name, entry.seq), {})[rank] = entry
    everyone: defaultdict[str, set[int]] = defaultdict(set)
    for (name, _), members in result.items():
        everyone[name] |= members.keys()
    for (name, seq), members in sorted(result.items()):
        ranks = communicators.get(name, ()) or tuple(sorted(everyone[name]))
        yield CollectiveRecord(name, ranks, seq, members)


def half_middle(values: NDArray[np.float64]) -> float:
    """The median of the shortest half of the values.

    Where all deviations lie on one side, as delays do, the median of everything leans to that
    side long before half of the values deviate; that of the shortest half does not.

    Source: Rousseeuw, Least Median of Squares Regression, 1984.
    """
    ordered = np.sort(values[np.isfinite(values)])
    half = len(ordered) // 2 + 1
    widths = ordered[half - 1 :] - ordered[: len(ordered) - half + 1]
    start = int(np.argmin(widths))
    return float(np.median(ordered[start : start + half]))


def robust_z(
    values: NDArray[np.float64], *, floor: float = 0.02
) -> tuple[NDArray[np.float64], float]:
    """(value - median) / (1.4826 MAD), and the median.

    Args:
        values: one each; NaN where there is none.
        floor: smallest scale, as a share of the median: agreement closer than any clock's must
            not turn a hair's breadth into a deviation.
    """
    middle = float(np.nanmedian(values))
    spread = 1.4826 * float(np.nanmedian(np.abs(values - middle)))
    scale = max(spread, floor * abs(middle), 1e-12)
    return (values - middle) / scale, middle
