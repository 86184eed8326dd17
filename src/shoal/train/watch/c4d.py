"""C4D: four syndromes from the records of all ranks.

Communication of training is periodic and alike on all ranks, so deviations locate faults:
a delay matrix of the messages separates a slow link from a slow sender or receiver, and who
arrives late in collectives separates a slow rank from those that wait for it.

Source: Dong et al., Boosting Large-scale Parallel Training Efficiency with C4: A
Communication-Driven Approach, 2024, section 4.2.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le, Lt
from numpy.typing import NDArray

from shoal.core.parts import part
from shoal.train.watch.evidence import Evidence, OperationRecord, half_middle, robust_z
from shoal.train.watch.hangs import find_hangs, hang_limit_s
from shoal.train.watch.outliers import Normal, fit, line_tail_apart
from shoal.train.watch.phases import excess
from shoal.train.watch.protocols import Fault, FaultVerdict

# Cells of one rank's row or column that separate its end from its links.
_ENOUGH_CELLS = 3
# Fewer than these, and one slow end is too large a part of them to be judged among them.
_FEW_CELLS = 30
# Of the false alarms that are allowed, those of single cells; the others are of rows and columns.
_OF_CELLS = 0.5
# Less than so many times the usual is not slow, and more is not usual.
_CLEARLY = 1.5
# A receiver that comes within this share of a message's time has waited for it.
_BEFORE = 0.2
# Share of a pair's messages whose time must be known.
_KNOWN = 0.5
_VERBS = {"sender": "sends", "receiver": "receives"}


@part
class C4D:
    """Locate hanging and slow links, senders, receivers and ranks.

    Args:
        window: number of latest steps that are analyzed.
        z: robust z-score above which a delay, on the log scale, or a late arrival is significant.
        false_alarms: expected share of the delay matrices of a healthy run with a false alarm; the
            z-score threshold for it grows with the number of delays.
        factor: smallest ratio of a faulty delay to the usual delay.
        share: share of slow cells in a row or column that blames the sender or receiver; also the
            share of the steps in which a rank must be late.
        late: smallest late arrival in a step, as a share of the step.
        hang_s: seconds of waiting that count as a hang; by default three times the p99 of a step,
            or 60 s without a history.
    """

    window: Annotated[int, Ge(1)] = 20
    z: Annotated[float, Gt(0)] = 4.0
    false_alarms: Annotated[float, Gt(0), Lt(1)] = 5e-4
    factor: Annotated[float, Gt(1)] = 2.0
    share: Annotated[float, Gt(0), Le(1)] = 0.7
    late: Annotated[float, Gt(0), Lt(1)] = 0.1
    hang_s: Annotated[float, Gt(0)] | None = None

    def locate(self, evidence: Evidence) -> FaultVerdict:
        """Name what hangs, else what is slow."""
        notes = _missing(evidence)
        hang = find_hangs(evidence, hang_limit_s(evidence, self.hang_s))
        if hang.faults:
            return FaultVerdict(faults=hang.faults, notes=(*notes, *hang.notes))
        steps = evidence.steps()[-self.window :]
        matrix = delay_matrix(evidence, set(steps))
        slow, more = self.judge(matrix)
        results = [*slow, *self._late(evidence, steps)]
        results.sort(key=lambda fault: -fault.seconds)
        return FaultVerdict(faults=tuple(results), notes=(*notes, *hang.notes, *more))

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
        normal = fit(matrix)
        z, seen = normal.z(matrix), np.isfinite(matrix)
        with np.errstate(invalid="ignore"):
            large = matrix >= self.factor * np.exp(normal.middle)
            rare = normal.tail(z) * known <= _OF_CELLS * self.false_alarms
        odd = large & (z > self.z) & rare
        left = odd.copy()
        faults: list[Fault] = []
        notes: list[str] = []
        ends: dict[int, list[str]] = defaultdict(list)
        usual: dict[int, float] = {}
        for axis, end in ((1, "sender"), (0, "receiver")):
            for place, delay in self._slow_lines(matrix, axis, normal):
                ends[place].append(end)
                usual[place] = delay
        for rank, which in ends.items():
            middle = usual[rank]
            if len(which) == 2 and known < _FEW_CELLS:
                # Answers to what is slow are slow as well, but less so.
                out, back = np.nanmedian(matrix[rank]), np.nanmedian(matrix[:, rank])
                if max(out, back) > _CLEARLY * min(out, back):
                    which.remove("receiver" if out > back else "sender")
            cells = [matrix[rank]] if "sender" in which else []
            if "receiver" in which:
                cells.append(matrix[:, rank])
            delays = np.concatenate(cells)
            delays = delays[delays >= self.factor * middle]
            both = len(which) == 2
            faults.append(
                Fault(
                    kind="communication_slow",
                    place="rank" if both else "sender" if which == ["sender"] else "receiver",
                    ranks=(rank,),
                    op="message",
                    score=float(normal.z(np.median(delays))),
                    ratio=float(np.median(delays) / middle),
                    text=f"rank {rank} {'sends and receives' if both else _VERBS[which[0]]} "
                    f"{np.median(delays) / middle:.1f} times slower than usual, with "
                    f"{len(delays)} peers",
                )
            )
            # What comes the other way waits for its answers on the slow one, so cells there that
            # are no slower than this are explained; their own fault shows after its repair.
            worst = float(np.max(delays, initial=0.0))
            with np.errstate(invalid="ignore"):
                left[rank] &= ("sender" not in which) & (matrix[rank] > worst)
                left[:, rank] &= ("receiver" not in which) & (matrix[:, rank] > worst)
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
            ratio = float(matrix[source, target] / np.exp(normal.middle))
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

    def _slow_lines(
        self, matrix: NDArray[np.float64], axis: int, normal: Normal
    ) -> list[tuple[int, float]]:
        """Rows (axis 1), or columns (0), of which so large a share is slow as no chance makes.

        Returns:
            Their numbers, and the delay that each was held against.
        """
        limit = (1 - _OF_CELLS) * self.false_alarms / (2 * len(matrix))
        slow_lines = []
        for place in range(len(matrix)):
            line = matrix[place] if axis else matrix[:, place]
            rest, middle = matrix, normal.middle
            if few := normal.num_values < _FEW_CELLS:
                # What a slow end is answered may be slow as well, and does not say what is usual:
                # where messages between the others are not known, the two are most of all values.
                rest = np.delete(np.delete(matrix, place, axis=0), place, axis=1)
                if np.isfinite(rest).sum() < _ENOUGH_CELLS:
                    continue
                middle = float(np.nanmean(np.log(rest)))
            seen, usual = np.isfinite(line).sum(), float(np.exp(middle))
            if seen < _ENOUGH_CELLS or (line >= self.factor * usual).sum() < self.share * seen:
                continue
            tail = (
                line_tail_apart(line, rest, self.share)
                if few
                else normal.line_tail(normal.z(line), self.share)
            )
            if tail <= limit:
                slow_lines.append((place, usual))
        return slow_lines

    def _late(self, evidence: Evidence, steps: list[int]) -> list[Fault]:
        """Ranks that arrive late, step after step, by their own doing, and make others wait."""
        cost = _cost_to_others(evidence)
        results = []
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
                    mostly = excess(evidence, rank, ranks, common)
                    results.append(
                        Fault(
                            kind="non_communication_slow",
                            place="rank",
                            ranks=(rank,),
                            score=float(np.median(score)),
                            ratio=period / max(period - late, 1e-12),
                            seconds=float(more.sum()),
                            phase="" if mostly is None else mostly.phase,
                            text=f"rank {rank} comes {1e3 * late:.1f} ms late in a step of "
                            f"{1e3 * period:.1f} ms, and the others wait for it"
                            + ("" if mostly is None else f"; {mostly}"),
                        )
                    )
        return results


def _cost_to_others(evidence: Evidence) -> dict[tuple[int, int], int]:
    """(rank, step) -> ns that the one who waited most for it has waited."""
    waited: defaultdict[tuple[int, int, int], int] = defaultdict(int)

    def pair(late: OperationRecord, early: OperationRecord) -> None:
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
    with their like. Where the receiver waited from the beginning, the end of its wait is when
    the message came. Where it did not wait, the message came earlier than it looked: that counts
    if even then it was not slow. Where it began to wait when the message was long on its way, the
    message took at least as long as the wait: that counts if even this was slow.

    Returns:
        [source, target] float64; NaN where there is none.
    """
    hosts = {rank: flight.host for rank, flight in evidence.flights.items()}
    seen: defaultdict[tuple[int, bool], _Times] = defaultdict(_Times)
    messages: defaultdict[tuple[int, int], int] = defaultdict(int)
    for message in evidence.messages:
        sent, received = message.sent, message.received
        if sent is None or received is None or not received.left or not received.nbytes:
            continue
        if steps is not None and received.step >= 0 and received.step not in steps:
            continue
        near = hosts[message.source] == hosts[message.target]
        times = seen[received.nbytes.bit_length(), near]
        pair = message.source, message.target
        messages[pair] += 1
        late = received.enter - sent.enter
        if not received.exact:
            end = received.waited or received.left
            times.most[pair].append((end - sent.enter) / received.nbytes)
        elif late <= _BEFORE * (received.done - sent.enter):
            taken = received.done - max(sent.enter, received.enter)
            times.exact[pair].append(taken / received.nbytes)
        else:
            times.least[pair].append((received.done - received.enter) / received.nbytes)
    cells: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for times in seen.values():
        if not times.exact:
            continue
        # Of the cells, not of the messages: a busy pair must not set the norm.
        usual = half_middle(np.array([statistics.median(found) for found in times.exact.values()]))
        for pair, result in times.exact.items():
            cells[pair] += [value / usual for value in result]
        for pair, result in times.most.items():
            cells[pair] += [value / usual for value in result if value < _CLEARLY * usual]
        for pair, result in times.least.items():
            cells[pair] += [value / usual for value in result if value > _CLEARLY * usual]
    matrix = np.full((evidence.world, evidence.world), np.nan)
    for pair, values in cells.items():
        # A few that were odd enough to say something do not speak for all the others.
        if len(values) >= _KNOWN * messages[pair]:
            matrix[pair] = statistics.median(values)
    return matrix


class _Times:
    """Nanoseconds a byte by pair: measured, at most, and at least."""

    def __init__(self) -> None:
        self.exact: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self.most: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self.least: defaultdict[tuple[int, int], list[float]] = defaultdict(list)


def _missing(evidence: Evidence) -> list[str]:
    if not evidence.missing:
        return []
    return [
        f"no records of ranks {list(evidence.missing)}: faults of theirs show only in those "
        "who wait for them"
    ]
