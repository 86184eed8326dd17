"""What an emitter promises."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol, runtime_checkable

from shoal.ir import ServePlan, TrainPlan


@runtime_checkable
class Emitter(Protocol):
    """A part of kind ``emitter``: one engine that can run what was planned.

    The same plan always gives the same files. They hold what the plan decides and nothing of
    the machine that wrote them; what no plan knows (the data, the training script) is a
    variable of the environment that the script asks for by name.
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
