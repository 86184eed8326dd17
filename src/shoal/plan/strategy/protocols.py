"""What a planner of training jobs promises."""

from __future__ import annotations

from typing import Protocol

from shoal.ir import Machine, TrainJob, TrainPlan


class Planner(Protocol):
    """A part of kind ``planner``."""

    def plan(self, job: TrainJob, machine: Machine) -> list[TrainPlan]:
        """Plans of ``job`` on ``machine``, best first; those that fit before those that do not.

        What the job states is kept (see :mod:`shoal.plan.strategy.space`); the rest is
        chosen. Every plan is concrete: running its job needs no further choice. If no
        plan fits, the first is the one that misses by least, and its notes say what would.

        Raises:
            PlanError: no legal split exists.
            ModelError: there is no such model.
        """
