"""What the parts of a training job promise to the loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from shoal.ir import Estimate, Machine, TrainPlan, TrainReport, Work
from shoal.ir.comm import Updater

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Launcher", "LrSchedule", "Optimizer", "Starter", "Updater"]


class Optimizer(Protocol):
    """A part of kind ``optimizer``."""

    lr: float
    whole_matrices: ClassVar[bool]
    """The update of a matrix needs all of it on one rank."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Unsharded state bytes of the model and seconds of its whole update on one rank."""

    def build(self, parameters: Mapping[str, Tensor]) -> Updater:
        """Start on these parameters, by name; local parts where they are sharded."""


class LrSchedule(Protocol):
    """A part of kind ``lr_schedule``."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Nothing."""

    def factor(self, step: int, total: int) -> float:
        """The learning rate of ``step`` in [0, total) as a factor of the peak rate."""


class Launcher(Protocol):
    """A part of kind ``launch``: writes what another system needs to start the ranks."""

    def files(self, plan: TrainPlan) -> dict[str, str]:
        """File name -> content; the first is the one to start with."""


@runtime_checkable
class Starter(Protocol):
    """A launcher that starts the ranks itself and waits for them."""

    def run(
        self,
        plan: TrainPlan,
        run_dir: Path,
        *,
        resume: bool = False,
        start: str | None = None,
        restarts: int = 0,
        watch: Callable[[dict[str, Any]], None] | None = None,
    ) -> TrainReport:
        """Run a plan; the arguments are those of :func:`shoal.train.run.execute`.

        Raises:
            ShoalError: the run cannot start, or a rank failed.
        """
