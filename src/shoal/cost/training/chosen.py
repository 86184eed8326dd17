"""What the parts of a training job say of a step, remembered over many jobs on one machine."""

from __future__ import annotations

from typing import Any

from shoal.core.parts import Choice, table
from shoal.cost.arithmetic import parameters
from shoal.cost.price.ops import FrozenPasses
from shoal.cost.training.frozen import base_of
from shoal.ir import Estimate, Machine, Parallel, Work


class ChosenParts:
    """Parts that jobs choose, each built once, and those of their numbers that splits share.

    Args:
        machine: the machine.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._parts: dict[tuple[str, Choice], Any] = {}
        self._updates: dict[tuple[object, ...], Estimate] = {}
        # Beside each value its key's objects, so that no other takes their place.
        self._aside: dict[tuple[object, ...], tuple[object, float]] = {}
        self._numbers: dict[tuple[object, ...], float] = {}

    def _part(self, kind: str, choice: Choice) -> Any:
        key = (kind, choice)
        if key not in self._parts:
            self._parts[key] = table(kind).build(choice, where=kind)
        return self._parts[key]

    def _update(self, work: Work) -> Estimate:
        """The optimizer's own estimate, which no split changes."""
        key = (work.job.optimizer, work.shape, work.job.precision)
        if key not in self._updates:
            part = self._part("optimizer", work.job.optimizer)
            self._updates[key] = part.estimate(work, self.machine)
        return self._updates[key]

    def _made(self, work: Work) -> Work:
        """The same with the model that fine-tuning computes, where that is not the base."""
        if work.job.finetune is None:
            return work
        shape = getattr(self._part("peft", work.job.finetune), "shape", None)
        return work if shape is None else work.model_copy(update={"shape": shape(work.shape)})

    def _trained(self, work: Work) -> float:
        """Share of the parameters that have gradients and moments."""
        if work.job.finetune is None:
            return 1.0
        part = self._part("peft", work.job.finetune)
        if getattr(part, "forward_only", False):
            return 0.0
        return min(1.0, float(part.parameters(work.shape)) / parameters(work.shape))

    def _frozen(self, work: Work) -> FrozenPasses | None:
        """What the frozen weights take to be multiplied; None where all weights are trained."""
        if work.job.finetune is None:
            return None
        return base_of(work.job, work.shape, self._part("peft", work.job.finetune)).passes

    def _others(self, work: Work) -> float:
        """Seconds of a step by the parts that neither compute nor communicate.

        A part's estimate may depend on the batch and on who shares it, on nothing else of a split.
        """
        job = work.job
        chosen = (("corpus", job.data), ("packing", job.packing), ("lr_schedule", job.lr_schedule))
        key = (
            *(id(choice) for _, choice in chosen),
            *(work.shape.name, job.seq_len, job.global_batch, job.microbatch, job.threads),
            *(job.parallel.dp, job.parallel.world),
        )
        if key not in self._aside:
            seconds = sum(
                sum(self._part(kind, choice).estimate(work, self.machine).terms_s.values())
                for kind, choice in chosen
            )
            self._aside[key] = chosen, seconds
        return self._aside[key][1]

    def _idle(self, split: Parallel, passes: int) -> float:
        """Bubble of a step, as a share of its micro-batches' seconds."""
        return self._of_schedule("bubble", split, passes) if split.pp > 1 else 0.0

    def _in_flight(self, split: Parallel, passes: int) -> float:
        """Micro-batches that a rank keeps at a time."""
        return self._of_schedule("in_flight", split, passes) if split.pp > 1 else 1.0

    def _of_schedule(self, method: str, split: Parallel, passes: int) -> float:
        key = (method, split.schedule, split.pp, passes, split.vpp)
        if key not in self._numbers:
            part = self._part("schedule", split.schedule)
            self._numbers[key] = getattr(part, method)(split.pp, passes, split.vpp)
        return self._numbers[key]
