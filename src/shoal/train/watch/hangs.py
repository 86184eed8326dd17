"""Who hangs, from who waits for whom.

Every rank that stands in an operation waits for a peer: in a collective for the members that
have not come to it, in a message for the other end. Following this leads from the victims to
those that stand in nothing: they have not entered, and are the suspects. Where all have come
and the result does not, communication itself hangs.

Source: Dong et al., C4, 2024 (communication and non-communication hang); Jiang et al.,
MegaScale, 2024 (section 5.2, ranks that did not log entering are the suspects).
"""

from __future__ import annotations

import itertools

from shoal.train.watch.evidence import Evidence, OperationRecord
from shoal.train.watch.phases import open_phases
from shoal.train.watch.protocols import Fault, FaultVerdict

# Without a history of steps.
_UNKNOWN_S = 60.0
_PERIODS = 3.0
_ENOUGH_STEPS = 10


def hang_limit_s(evidence: Evidence, given: float | None) -> float:
    """Seconds of waiting that are a hang: as given, else three times the p99 of a step."""
    if given is not None:
        return given
    periods: list[float] = []
    for rows in evidence.entries.values():
        first: dict[int, int] = {}
        for entry in rows:
            first.setdefault(entry.step, entry.enter)
        order = sorted(first)
        periods += [
            (first[b] - first[a]) / 1e9
            for a, b in itertools.pairwise(order)
            if b == a + 1 and a >= 0
        ]
    if len(periods) < _ENOUGH_STEPS:
        return _UNKNOWN_S
    return _PERIODS * sorted(periods)[int(0.99 * (len(periods) - 1))]


def find_hangs(evidence: Evidence, limit_s: float) -> FaultVerdict:
    """The suspects of every hang that lasts longer than ``limit_s``."""
    now = evidence.now
    standing = evidence.blocked
    long = {rank: pair for rank, pair in standing.items() if (now - pair[1].since) / 1e9 > limit_s}
    if not long:
        return FaultVerdict()
    entered: dict[tuple[str, int], set[int]] = {
        (c.name, c.seq): set(c.entries) for c in evidence.collectives
    }
    members = {c.name: c.members for c in evidence.collectives}
    ends = {(m.name, m.source, m.target, m.tag, m.seq): m for m in evidence.messages}
    faults: list[Fault] = []
    suspects: dict[int, list[tuple[str, OperationRecord]]] = {}
    unknown: set[int] = set()
    waits: dict[int, set[int]] = {}
    for rank, (name, entry) in long.items():
        if entry.peer >= 0:
            sends = entry.op == "send"
            pair = (rank, entry.peer) if sends else (entry.peer, rank)
            message = ends[(name, *pair, entry.tag, entry.seq)]
            if message.sent is not None and message.received is not None:
                if not any(f.place == "link" and f.ranks == pair for f in faults):
                    faults.append(_stuck_link(pair, name, entry, now))
                continue
            absent = {entry.peer}
        else:
            absent = set(members[name]) - entered[name, entry.seq]
            if not absent:
                faults = _add_stuck(faults, evidence, name, entry, limit_s)
                continue
        unknown |= absent - evidence.flights.keys()
        waits[rank] = absent & evidence.flights.keys()
        for other in waits[rank]:
            if other not in standing:
                suspects.setdefault(other, []).append((name, entry))
    for rank, victims in suspects.items():
        name, entry = max(victims, key=lambda pair: now - pair[1].since)
        seconds = max((now - e.since) / 1e9 for _, e in victims)
        inside = open_phases(evidence.flights[rank])
        where = f"; it is in {inside[-1].name}" if inside else ""
        faults.append(
            Fault(
                kind="non_communication_hang",
                place="rank",
                ranks=(rank,),
                communicator=_spelled(name),
                op=entry.op,
                seq=entry.seq,
                seconds=seconds,
                phase=inside[-1].name if inside else "",
                text=f"rank {rank} has not entered {_operation(entry)}; "
                f"{len(victims)} ranks wait for it since {seconds:.1f} s{where}",
            )
        )
    notes = []
    if unknown:
        notes.append(
            f"ranks {sorted(unknown)} are waited for and have no records: they may hang, or be gone"
        )
        if not faults:
            faults.append(_unrecorded(sorted(unknown), long, now))
    if not faults and waits:
        circle = tuple(sorted(waits))
        name, entry = long[circle[0]]
        faults.append(
            Fault(
                kind="communication_hang",
                place="communicator",
                ranks=circle,
                communicator=_spelled(name),
                op=entry.op,
                seq=entry.seq,
                seconds=(now - entry.since) / 1e9,
                text=f"ranks {list(circle)} wait for each other in a circle: they make different "
                "calls, or the same in different orders",
            )
        )
    return FaultVerdict(faults=tuple(faults), notes=tuple(notes))


def _unrecorded(
    unknown: list[int], long: dict[int, tuple[str, OperationRecord]], now: int
) -> Fault:
    name, entry = max(long.values(), key=lambda pair: now - pair[1].since)
    seconds = (now - entry.since) / 1e9
    return Fault(
        kind="non_communication_hang",
        place="rank" if len(unknown) == 1 else "communicator",
        ranks=tuple(unknown),
        communicator=_spelled(name),
        op=entry.op,
        seq=entry.seq,
        seconds=seconds,
        text=f"only ranks without records can be missing in {_operation(entry)}: {unknown}",
    )


def _stuck_link(pair: tuple[int, int], name: str, entry: OperationRecord, now: int) -> Fault:
    seconds = (now - entry.since) / 1e9
    return Fault(
        kind="communication_hang",
        place="link",
        ranks=pair,
        communicator=_spelled(name),
        op=entry.op,
        seq=entry.seq,
        seconds=seconds,
        text=f"rank {pair[0]} has sent and rank {pair[1]} receives since {seconds:.1f} s "
        f"({entry.tag!r}, message {entry.seq}): it does not arrive",
    )


def _add_stuck(
    faults: list[Fault], evidence: Evidence, name: str, entry: OperationRecord, limit_s: float
) -> list[Fault]:
    """A collective that all have entered and some have not left."""
    if any(f.seq == entry.seq and f.communicator == _spelled(name) for f in faults):
        return faults
    here = next(c for c in evidence.collectives if c.name == name and c.seq == entry.seq)
    inside = tuple(sorted(rank for rank, other in here.entries.items() if other.blocked))
    seconds = (evidence.now - entry.since) / 1e9
    silent = _silent(evidence, here.entries, limit_s)
    if silent:
        place, ranks = "rank", silent
        why = f"of these rank {list(silent)} has stopped beating"
    else:
        place, ranks = "communicator", inside
        why = "its records do not tell them apart"
    return [
        *faults,
        Fault(
            kind="communication_hang",
            place="rank" if place == "rank" and len(ranks) == 1 else "communicator",
            ranks=ranks,
            communicator=_spelled(name),
            op=entry.op,
            seq=entry.seq,
            seconds=seconds,
            text=f"all ranks have entered {_operation(entry)} and {list(inside)} have not left "
            f"it for {seconds:.1f} s; {why}",
        ),
    ]


def _silent(
    evidence: Evidence, among: dict[int, OperationRecord], limit_s: float
) -> tuple[int, ...]:
    """Ranks whose process does not run, while that of others does."""
    ages = {
        rank: (evidence.now - flight.beat + evidence.offsets[rank]) / 1e9
        for rank, flight in evidence.flights.items()
        if flight.beat and rank in among
    }
    old = tuple(sorted(rank for rank, age in ages.items() if age > limit_s))
    return old if len(old) < len(ages) else ()


def _operation(entry: OperationRecord) -> str:
    return f"{entry.op} {entry.seq}" + (f" ({entry.tag!r})" if entry.tag else "")


def _spelled(name: str) -> str:
    return name.rpartition(":")[2]
