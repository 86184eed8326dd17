"""MegaScale: stragglers by the time a rank works, hangs by who has not entered.

The time that a rank is busy in a step, waiting for others not counted, is compared with that
of ranks with the same work. A rank that waits longest is thereby the last to be blamed.

Source: Jiang et al., MegaScale: Scaling Large Language Model Training to More Than 10,000
GPUs, 2024, section 5.
"""

from __future__ import annotations

import statistics
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.train.watch.evidence import Evidence, robust_z
from shoal.train.watch.hangs import find_hangs, hang_limit_s
from shoal.train.watch.phases import excess
from shoal.train.watch.protocols import Fault, FaultVerdict

_ENOUGH_RANKS = 3
_MOST = 0.7
# Ranks that agree more closely than this are alike.
_FLOOR = 0.05


@part
class MegaScale:
    """Locate slow and hanging ranks from statistics over many steps.

    Args:
        z: threshold of the robust z-score of a rank's median busy time among ranks with the same
            work.
        steps: smallest number of steps for that median.
        window: number of latest steps that are analyzed.
        ratio: smallest reported ratio of the busy time to that of the other ranks.
        hang_s: seconds of waiting that count as a hang; by default three times the p99 of a step,
            or 60 s without a history.
    """

    z: Annotated[float, Gt(0)] = 3.5
    steps: Annotated[int, Ge(1)] = 10
    window: int = 20
    ratio: Annotated[float, Ge(1)] = 1.3
    hang_s: Annotated[float, Gt(0)] | None = None

    def __post_init__(self) -> None:
        require(
            self.window >= self.steps,
            "locator.megascale.window",
            self.window,
            expected=f"at least steps = {self.steps}",
        )

    def locate(self, evidence: Evidence) -> FaultVerdict:
        """Name what hangs, else who is slow."""
        hang = find_hangs(evidence, hang_limit_s(evidence, self.hang_s))
        if hang.faults:
            return hang
        notes = list(hang.notes)
        if evidence.missing:
            notes.append(f"no records of ranks {list(evidence.missing)}")
        steps = evidence.steps()[-self.window :]
        faults: list[Fault] = []
        for ranks in sorted(set(evidence.roles.values())):
            if len(ranks) < _ENOUGH_RANKS:
                notes.append(
                    f"ranks {list(ranks)} have no peers with the same work: a slow rank is found "
                    f"by comparison with at least {_ENOUGH_RANKS - 1} ranks that do the same"
                )
                continue
            faults += self._stragglers(evidence, ranks, steps)
        faults.sort(key=lambda fault: -fault.seconds)
        return FaultVerdict(faults=tuple(faults), notes=tuple(dict.fromkeys(notes)))

    def _stragglers(
        self, evidence: Evidence, ranks: tuple[int, ...], steps: list[int]
    ) -> list[Fault]:
        busy = evidence.busy
        common = [step for step in steps if all(step in busy[rank] for rank in ranks)]
        if len(common) < self.steps:
            return []
        times = np.array([[busy[rank][step] for step in common] for rank in ranks])
        # Of each rank over the steps first: one noisy step of a busy host says nothing.
        typical = np.median(times, axis=1)
        scores, usual = robust_z(typical, floor=_FLOOR)
        above = (times > np.median(times, axis=0)).mean(axis=1)
        stragglers = []
        for rank, score, own, often, each in zip(
            ranks, scores.tolist(), typical.tolist(), above.tolist(), times, strict=True
        ):
            ratio = own / max(usual, 1e-9)
            if score > self.z and ratio >= self.ratio and often >= _MOST:
                mostly = excess(evidence, rank, ranks, common)
                stragglers.append(
                    Fault(
                        kind="non_communication_slow",
                        place="rank",
                        ranks=(rank,),
                        op="compute",
                        score=score,
                        ratio=ratio,
                        seconds=float((each - np.median(times, axis=0)).sum()),
                        phase="" if mostly is None else mostly.phase,
                        text=f"rank {rank} is busy {ratio:.2f} times as long as ranks with the "
                        f"same work, over {len(common)} steps"
                        + ("" if mostly is None else f"; {mostly}"),
                    )
                )
        return stragglers


def growing_spread(evidence: Evidence) -> float:
    """Growth of the spread of arrivals, seconds a step: a slow decline's sign.

    Of the ranks' first operations in each step; the slope of Theil and Sen, which a single bad
    step does not bend.
    """
    first: dict[int, dict[int, int]] = {}
    for rank, rows in evidence.entries.items():
        for entry in rows:
            if entry.step >= 0:
                first.setdefault(entry.step, {}).setdefault(rank, entry.enter)
    points = [
        (step, (max(times.values()) - min(times.values())) / 1e9)
        for step, times in sorted(first.items())
        if len(times) == len(evidence.flights)
    ]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[i + 1 :]]
    return statistics.median(slopes) if slopes else 0.0
