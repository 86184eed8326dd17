"""Successive halving: measure many a little, and the better ones longer.

Every configuration gets a small share of a measurement. Of those that worked the best go on to a
share that is larger by ``factor``, until the last are measured wholly. An objective that cannot
be asked for a part is measured wholly at once: then this is random search.

Source: Jamieson and Talwalkar, Non-stochastic Best Arm Identification and Hyperparameter
Optimization, 2016.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from annotated_types import Ge, Gt, Le

from shoal.core.parts import part
from shoal.plan.tune.protocols import (
    Objective,
    PartialObjective,
    Progress,
    SearchSpace,
    Trial,
    TuningResult,
    check,
    order,
)


@part
class Halving:
    """Successive halving: short trials of many configurations, longer trials of the best ones.

    Args:
        factor: one in ``factor`` configurations is kept, and its share of a full trial grows by
            ``factor``.
        least: share of a full trial in the first round, in (0, 1].
    """

    factor: Annotated[int, Ge(2)] = 3
    least: Annotated[float, Gt(0), Le(1)] = 1 / 9

    def tune(
        self,
        space: SearchSpace,
        objective: Objective,
        trials: int,
        *,
        seed: int = 0,
        history: Sequence[Trial] = (),
        elsewhere: Sequence[Trial] = (),
        progress: Progress | None = None,
    ) -> TuningResult:
        """See :class:`~shoal.plan.tune.protocols.Tuner`.

        ``trials`` are the configurations of the first round.
        """
        seen = check(space, trials, history)
        rows = space.indices()
        free = [row for row in order(space, seed, elsewhere) if tuple(rows[row]) not in seen]
        result: dict[int, Trial] = {}
        going = [int(row) for row in free[: max(0, trials - len(history))]]
        request: object = objective
        partial = request if isinstance(request, PartialObjective) else None
        share = self.least if partial is not None else 1.0
        while going:
            for row in going:
                config = space.config(rows[row])
                if partial is not None and share < 1:
                    outcome = partial.part(config, share)
                    result[row] = Trial(config=config, **outcome.model_dump(exclude={"config"}))
                else:
                    result[row] = Trial.of(config, objective)
                if progress is not None:
                    progress(len(history) + len(result), trials, f"{share:.0%} of a measurement")
            if share >= 1:
                break
            ranked = sorted(
                (row for row in going if result[row].value is not None),
                key=lambda row: -(result[row].value or 0.0),
            )
            going = ranked[: math.ceil(len(going) / self.factor)]
            share = min(1.0, share * self.factor)
        made = (*history, *result.values())
        return TuningResult(tuner="halving", space=space, trials=made, seed=seed)
