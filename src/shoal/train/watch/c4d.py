"""C4D: four syndromes from the records of all ranks.

Communication of training is periodic and alike on all ranks, so deviations locate faults:
a delay matrix of the messages tells a slow link from a slow sender or receiver, and who
arrives late in collectives tells a slow rank from those that wait for it.

Source: Dong et al., Boosting Large-scale Parallel Training Efficiency with C4: A
Communication-Driven Approach, 2024, section 4.2.
"""

from __future__ import annotations

import statistics
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.train.watch.evidence import Entry, Evidence, robust_z
from shoal.train.watch.hangs import find_hangs, hang_limit_s
from shoal.train.watch.protocols import Fault, Verdict

__all__ = ["C4D", "delay_matrix"]

# Cells of one rank's row or column from which its end can be told from its links.
_ENOUGH_CELLS = 3


@part
class C4D:
    """Link, sender, receiver or rank: what hangs and what is slow.

    Args:
        window: newest steps that are looked at.
        z: robust z above which a delay, or a late arrival, is no chance.
        factor: how many times the usual delay it must be as well.
        share: share of a row's or a column's cells that makes it the end's fault; and of the
            steps in which a rank must be late.
        late: seconds of late arrival in a step, as a share of the step, that count.
        hang_s: seconds of waiting that are a hang; three times the p99 of a step, or 60 s
            without a history, if not given.
    """

    window: int = 20
    z: float = 4.0
    factor: float = 2.0
    share: float = 0.7
    late: float = 0.1
    hang_s: float | None = None

    def __post_init__(self) -> None:
        require(self.window >= 1, "locator.c4d.window", self.window, expected="at least 1 step")
        require(self.z > 0, "locator.c4d.z", self.z, expected="a number above 0")
        require(self.factor > 1, "locator.c4d.factor", self.factor, expected="a number above 1")
        require(0 < self.share <= 1, "locator.c4d.share", self.share, expected="in (0, 1]")
        require(0 < self.late < 1, "locator.c4d.late", self.late, expected="in (0, 1)")
        require(
            self.hang_s is None or self.hang_s > 0,
            "locator.c4d.hang_s",
            self.hang_s,
            expected="seconds above 0",
        )

    def locate(self, evidence: Evidence) -> Verdict:
        """Name what hangs, else what is slow."""
        notes = _missing(evidence)
        hang = find_hangs(evidence, hang_limit_s(evidence, self.hang_s))
        if hang.faults:
            return Verdict(faults=hang.faults, notes=(*notes, *hang.notes))
        steps = evidence.steps()[-self.window :]
        matrix = delay_matrix(evidence, set(steps))
        slow, more = self.judge(matrix)
        found = [*slow, *self._late(evidence, steps)]
        found.sort(key=lambda fault: -fault.seconds)
        return Verdict(faults=tuple(found), notes=(*notes, *hang.notes, *more))

    def judge(self, matrix: NDArray[np.float64]) -> tuple[list[Fault], list[str]]:
        """Faults of a delay matrix [source, target] in multiples of the usual; NaN: no message.

        Returns:
            Faults, and what could not be decided.
        """
        known = int(np.isfinite(matrix).sum())
        if known < _ENOUGH_CELLS:
            apart = np.nanmax(matrix) / np.nanmin(matrix) if known == 2 else 1.0
            if apart < self.factor:
                return [], []
            slow = divmod(int(np.nanargmax(matrix)), matrix.shape[1])
            return [], [
                f"messages from rank {slow[0]} to rank {slow[1]} take {apart:.1f} times as long as "
                "the other way; with two ranks link, sender and receiver cannot be told apart"
            ]
        z, middle = robust_z(matrix)
        with np.errstate(invalid="ignore"):
            odd = (z > self.z) & (matrix >= self.factor * middle)
        if not odd.any():
            return [], []
        seen = np.isfinite(matrix)
        left = odd.copy()
        faults: list[Fault] = []
        notes: list[str] = []
        ends: dict[int, list[str]] = defaultdict(list)
        for axis, end in ((1, "sender"), (0, "receiver")):
            total, many = seen.sum(axis=axis), odd.sum(axis=axis)
            for place in np.flatnonzero((total >= _ENOUGH_CELLS) & (many >= self.share * total)):
                ends[int(place)].append(end)
        for rank, which in ends.items():
            cells = [matrix[rank][odd[rank]]] if "sender" in which else []
            if "receiver" in which:
                cells.append(matrix[:, rank][odd[:, rank]])
            delays = np.concatenate(cells)
            both = len(which) == 2
            faults.append(
                Fault(
                    kind="communication_slow",
                    place="rank" if both else "sender" if which == ["sender"] else "receiver",
                    ranks=(rank,),
                    op="message",
                    score=float((np.median(delays) - middle) / max(_scale(matrix, middle), 1e-12)),
                    ratio=float(np.median(delays) / middle),
                    text=f"rank {rank} {'sends and receives' if both else which[0][:-2] + 's'} "
                    f"{np.median(delays) / middle:.1f} times slower than usual, with "
                    f"{len(delays)} peers",
                )
            )
            if "sender" in which:
                left[rank] = False
            if "receiver" in which:
                left[:, rank] = False
        for source, target in np.argwhere(left).tolist():
            few = [
                word
                for word, count in (
                    (f"rank {source} as sender", seen[source].sum()),
                    (f"rank {target} as receiver", seen[:, target].sum()),
                )
                if count < _ENOUGH_CELLS
            ]
            if few:
                notes.append(
                    f"link {source} -> {target} is slow, and with so few peers it cannot be told "
                    f"from {' or '.join(few)}"
                )
            ratio = float(matrix[source, target] / middle)
            faults.append(
                Fault(
                    kind="communication_slow",
                    place="link",
                    ranks=(source, target),
                    op="message",
                    score=float(z[source, target]),
                    ratio=ratio,
                    text=f"messages from rank {source} to rank {target} take {ratio:.1f} times "
                    "as long as usual",
                )
            )
        return faults, notes

    def _late(self, evidence: Evidence, steps: list[int]) -> list[Fault]:
        """Ranks that arrive late, step after step, by their own doing, and make others wait."""
        cost = _cost_to_others(evidence)
        found = []
        for ranks in sorted(set(evidence.roles.values())):
            common = [s for s in steps if all(s in evidence.busy[r] for r in ranks)]
            if len(ranks) < _ENOUGH_CELLS or not common:
                continue
            times = np.array([[evidence.busy[r][s] for s in common] for r in ranks])
            middle = np.median(times, axis=0)
            starts = [evidence.begins[r] for r in ranks]
            period = statistics.median(
                (begin[s + 1] - begin[s]) / 1e9 for begin in starts for s in common
            )
            scores = np.stack([robust_z(times[:, i])[0] for i in range(len(common))], axis=1)
            for rank, score, own in zip(ranks, scores, times, strict=True):
                more = own - middle
                caused = np.array([cost.get((rank, s), 0) / 1e9 for s in common])
                odd = (score > self.z) & (more >= self.late * period) & (caused >= 0.5 * more)
                if odd.sum() >= self.share * len(common):
                    late = float(np.median(more))
                    found.append(
                        Fault(
                            kind="non_communication_slow",
                            place="rank",
                            ranks=(rank,),
                            score=float(np.median(score)),
                            ratio=period / max(period - late, 1e-12),
                            seconds=float(more.sum()),
                            text=f"rank {rank} comes {1e3 * late:.1f} ms late in a step of "
                            f"{1e3 * period:.1f} ms, and the others wait for it",
                        )
                    )
        return found


def _cost_to_others(evidence: Evidence) -> dict[tuple[int, int], int]:
    """(rank, step) -> ns that the one who waited most for it has waited."""
    waited: defaultdict[tuple[int, int, int], int] = defaultdict(int)

    def pair(late: Entry, early: Entry) -> None:
        behind = late.enter - early.enter
        if behind > 0:
            waited[late.rank, late.step, early.rank] += min(behind, early.blocked_ns)

    for collective in evidence.collectives:
        for late in collective.entries.values():
            for early in collective.entries.values():
                pair(late, early)
    for message in evidence.messages:
        if message.sent is not None and message.received is not None:
            pair(message.sent, message.received)
            pair(message.received, message.sent)
    most: dict[tuple[int, int], int] = {}
    for (rank, step, _), cost in waited.items():
        most[rank, step] = max(cost, most.get((rank, step), 0))
    return most


def delay_matrix(evidence: Evidence, steps: set[int] | None = None) -> NDArray[np.float64]:
    """Median time of the messages from rank to rank, in multiples of what such a message takes.

    Sizes are compared with sizes of the same power of two, and messages that stay on a host
    with their like. Only messages for which the receiver waited count: of the others nobody
    knows when they came.

    Returns:
        [source, target] float64; NaN where there is none.
    """
    hosts = {rank: flight.host for rank, flight in evidence.flights.items()}
    times: defaultdict[tuple[int, bool], list[tuple[int, int, float]]] = defaultdict(list)
    for message in evidence.messages:
        sent, received = message.sent, message.received
        if sent is None or received is None or not received.done or not received.exact:
            continue
        if steps is not None and received.step >= 0 and received.step not in steps:
            continue
        taken = received.done - max(sent.enter, received.enter)
        if taken <= 0 or not received.nbytes:
            continue
        size = received.nbytes.bit_length()
        near = hosts[message.source] == hosts[message.target]
        per_byte = taken / received.nbytes
        times[size, near].append((message.source, message.target, per_byte))
    cells: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for group in times.values():
        by_cell: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        for source, target, value in group:
            by_cell[source, target].append(value)
        # Of the cells, not of the messages: a busy pair must not set the norm.
        usual = statistics.median(statistics.median(values) for values in by_cell.values())
        for pair, values in by_cell.items():
            cells[pair] += [value / usual for value in values]
    matrix = np.full((evidence.world, evidence.world), np.nan)
    for pair, values in cells.items():
        matrix[pair] = statistics.median(values)
    return matrix


def _scale(matrix: NDArray[np.float64], middle: float) -> float:
    spread = 1.4826 * float(np.nanmedian(np.abs(matrix - middle)))
    return max(spread, 0.02 * abs(middle))


def _missing(evidence: Evidence) -> list[str]:
    if not evidence.missing:
        return []
    return [
        f"no records of ranks {list(evidence.missing)}: faults of theirs show only in those "
        "who wait for them"
    ]
