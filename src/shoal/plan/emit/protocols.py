"""What an emitter promises."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

from shoal.ir import ServePlan, TrainPlan


@runtime_checkable
class PlanEmitter(Protocol):
    """A part of the kind that a kind of job names as ``emits``: writes files of its plans.

    The files are a function of the plan, independent of the machine that wrote them.
    """

    def refuses(self, plan: Any) -> tuple[str, ...]:
        """What of the plan cannot be expressed; each entry names the key, its value, and why."""

    def emit(self, plan: Any) -> dict[str, str]:
        """Name of a file, below the directory that is written -> its text.

        Raises:
            PlanError: the plan is refused.
        """


@runtime_checkable
class Emitter(Protocol):
    """A part of kind ``emitter``: writes the launch files of one engine.

    The files are a function of the plan, independent of the machine that wrote them. Values that
    are not in a plan (the data, the training script) are environment variables of the script.
    """

    job: ClassVar[Literal["train", "serve"]]

    def refuses(self, plan: TrainPlan | ServePlan) -> tuple[str, ...]:
        """What of the plan the engine cannot express; empty when it can do all of it.

        Each entry names the key, its value, and what the engine has instead.
        """

    def emit(self, plan: TrainPlan | ServePlan) -> dict[str, str]:
        """Name of a file -> its text.

        Raises:
            PlanError: the plan is of another kind of job, or the engine refuses it.
        """
