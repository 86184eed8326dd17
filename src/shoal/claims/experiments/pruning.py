"""[76] Pruning: does keeping hard examples beat a power law, and easy ones where data are few?

Source: Sorscher et al., Beyond neural scaling laws: beating power law scaling via data pruning,
2022.

Max-margin students of dimension 150 learn from pruned sets: the theory must give their errors, and
along its best share they must fall faster than unpruned ones. Small networks on digits and on
patches of photographs, all with the same number of steps, learn from what scores of their training
rows choose. Test rows are never scored; those of the photographs lie in other blocks of the image.
The A/A run has what each method is compared with in its place.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.pruning_tasks import PRUNE_TASKS, PruneTask, accuracy, kept
from shoal.claims.frame import ClaimRun
from shoal.core.parts import part
from shoal.cost.scaling.pruning import envelope, simulated_error, student

_QUICK = ((2, 1.0), (2, 0.6), (8, 0.4))
_PAIRS = (*_QUICK, (1, 0.8), (4, 1.0), (4, 0.5), (6, 0.3), (3, 0.4), (10, 0.2))
_FIRST, _LAST = 1.6, 4.8


class _Arms(NamedTuple):
    easy_few: float
    hard_few: float
    easy_many: float
    hard_many: float
    prototypes: float
    random: float
    correlation: float


@part
class PruningClaim(BaseClaim, row=76, needs=("sklearn",)):
    """Theory against trained students, and scores against random rows.

    Args:
        students: trained for each point of the theory.
        draws: of training and test rows.
    """

    students: int = 12
    draws: int = 12

    def collect(self, run: ClaimRun) -> None:
        """Compare; the quick run has fewer students and no networks."""
        count = 5 if run.quick else self.students
        run.progress("students of pruned sets", 0.0)
        gaps = []
        for alpha, keep in _QUICK if run.quick else _PAIRS:
            trained = run.remember(f"{alpha} {keep}", partial(_trained, alpha, keep, count))
            error = run.pick(student(alpha, keep).error, student(alpha * keep).error)
            spread = float(np.std(trained, ddof=1)) / math.sqrt(count)
            gaps.append(abs(error - float(np.mean(trained))) / (0.01 + 2 * spread))
        run.put("solver_gap", gaps)
        ends = run.remember("envelope", lambda: [envelope(alpha) for alpha in (_FIRST, _LAST)])
        run.put("envelope_first", ends[0][1].error)
        run.put("envelope_last", ends[1][1].error)
        slopes = run.remember("slopes", lambda: _slopes([keep for keep, _ in ends], count))
        run.put("envelope_slope", run.pick(slopes[0], slopes[1]))
        run.put("unpruned_slope", slopes[1])
        if run.quick:
            return
        for number, (name, task) in enumerate(PRUNE_TASKS.items()):
            run.progress(f"networks on {name}", 0.2 + 0.4 * number)
            arms = run.remember(name, partial(_all_arms, task, self.draws))
            by = {field: [getattr(one, field) for one in arms] for field in _Arms._fields}
            run.put(f"{name}_few", run.pick(by["easy_few"], by["hard_few"]), by["hard_few"])
            run.put(f"{name}_many", run.pick(by["hard_many"], by["easy_many"]), by["easy_many"])
            run.put(f"{name}_ssl", run.pick(by["prototypes"], by["random"]), by["random"])
            run.details[f"{name} rank correlation of ssl_prototypes and {task.scorer}"] = by[
                "correlation"
            ]


def _trained(alpha: float, keep: float, count: int) -> list[float]:
    return [simulated_error(alpha, keep, seed=seed) for seed in range(count)]


def _slopes(keeps: list[float], count: int) -> tuple[list[float], list[float]]:
    """Slope of log error over log of kept examples, of each student, pruned and not."""

    def slopes(first: float, last: float) -> list[float]:
        pairs = zip(
            _trained(_FIRST / first, first, count), _trained(_LAST / last, last, count), strict=True
        )
        return [math.log(after / before) / math.log(_LAST / _FIRST) for before, after in pairs]

    return slopes(*keeps), slopes(1.0, 1.0)


def _all_arms(task: PruneTask, draws: int) -> list[_Arms]:
    return [_arms(task, number) for number in range(draws)]


def _arms(task: PruneTask, draw: int) -> _Arms:
    train, test = task.draw(draw)

    def learned(rows: int, scorer: str, side: Any, keep: float) -> float:
        return accuracy(kept(train.take(np.arange(rows)), scorer, side, keep, draw), test, draw)

    return _Arms(
        easy_few=learned(task.few, task.scorer, "easy", 0.3),
        hard_few=learned(task.few, task.scorer, "hard", 0.3),
        easy_many=learned(task.many, task.scorer, "easy", 0.5),
        hard_many=learned(task.many, task.scorer, "hard", 0.5),
        prototypes=learned(task.many, "ssl_prototypes", "hard", 0.7),
        random=learned(task.many, "random", "hard", 0.7),
        correlation=task.correlation(train, draw),
    )
