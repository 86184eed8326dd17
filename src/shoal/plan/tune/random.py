"""Random search: configurations as they come.

Source: Bergstra and Bengio, Random Search for Hyper-parameter Optimization, 2012.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.core.parts import part
from shoal.plan.tune.protocols import (
    Objective,
    Progress,
    SearchSpace,
    Trial,
    TuningResult,
    check,
    order,
)


@part
class Random:
    """Draw configurations uniformly at random; the baseline of the other tuners."""

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
        seen = check(space, trials, history)
        rows = space.indices()
        made = list(history)
        for place in order(space, seed, elsewhere):
            if len(made) >= trials:
                break
            row = tuple(int(at) for at in rows[place])
            if row not in seen:
                made.append(Trial.of(space.config(row), objective))
                if progress is not None:
                    progress(len(made), trials, "")
        return TuningResult(tuner="random", space=space, trials=tuple(made), seed=seed)
