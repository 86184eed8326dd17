"""What an emitter promises."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, runtime_checkable

from shoal.ir import ServePlan, TrainPlan


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
