"""Exhaustive search: every configuration, where that is affordable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from annotated_types import Ge

from shoal.core.errors import PlanError, require
from shoal.core.parts import part
from shoal.plan.tune.protocols import Objective, Progress, SearchSpace, Trial, TuningResult, check


@part
class Exhaustive:
    """Try every configuration; ``trials`` has no effect.

    Args:
        most: largest number of configurations; more raise an error.
    """

    most: Annotated[int, Ge(1)] = 3000

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

        Raises:
            PlanError: more configurations than ``most``.
        """
        seen = check(space, trials, history)
        require(
            space.size <= self.most,
            "tune.space",
            space.size,
            expected=f"at most {self.most} configurations",
            hint="fix some of the axes, raise most, or use the tuner bayes",
            error=PlanError,
        )
        made = list(history)
        for row in space.indices():
            if tuple(int(at) for at in row) not in seen:
                made.append(Trial.of(space.config(row), objective))
                if progress is not None:
                    progress(len(made), space.size, "")
        return TuningResult(tuner="exhaustive", space=space, trials=tuple(made), seed=seed)
