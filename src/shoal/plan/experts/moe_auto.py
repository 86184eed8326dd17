"""Chunks of experts' tokens and slices of gradients for a job that leaves them to its planner.

Tasks of a layer are fitted to what is known of the machine, its links and products; the numbers
are those at which the layer's passes, and the backward pass of all blocks, are simulated fastest.

Source: Pan et al., FSMoE, 2025, sections 4 and 5.
"""

from __future__ import annotations

from typing import Any

from shoal.core.errors import PlanError
from shoal.cost.arithmetic import mixture_layers
from shoal.cost.price.shares import microbatch_of
from shoal.cost.training.moe_tasks import MoeLayer, layer_of
from shoal.ir import Machine, ModelShape, Parallel, TrainJob
from shoal.plan.experts.moe_gradients import partition
from shoal.plan.experts.moe_overlap import choose

AUTO = "auto"


def slices_of(layer: MoeLayer, shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """Bytes beside the experts and beside the rest of each block's backward pass."""
    blocks = mixture_layers(shape)
    results = [[0, 0] for _ in range(shape.num_layers)]
    for one in partition([layer] * blocks).slices:
        results[shape.num_layers - blocks + one.layer][one.where == "dense"] = int(one.bytes)
    return tuple((beside, rest) for beside, rest in results)


class ChunkChooser:
    """Chooses for many jobs of one model and machine; what is alike is solved once.

    Args:
        shape: the model.
        machine: several nodes.
    """

    def __init__(self, shape: ModelShape, machine: Machine) -> None:
        self._shape, self._machine = shape, machine
        self._found: dict[tuple[Parallel, int], dict[str, Any]] = {}

    def planned(self, job: TrainJob) -> TrainJob:
        """The job with numbers for what was left open; of a job that says all, itself.

        Raises:
            PlanError: there are no experts on a grid of their own, or it is not known which ranks
                share a node.
        """
        split = job.parallel
        if AUTO not in (split.expert_chunks, split.gradient_slices):
            return job
        tokens = max(1, microbatch_of(job) * job.seq_len // split.cp // split.tp)
        key = (split, tokens)
        if key not in self._found:
            self._found[key] = self._chosen(split, tokens, job.seq_len)
        return job.model_copy(update={"parallel": split.model_copy(update=self._found[key])})

    def _chosen(self, split: Parallel, tokens: int, seq_len: int) -> dict[str, Any]:
        where = "expert_chunks" if split.expert_chunks == AUTO else "gradient_slices"
        if not split.folded:
            raise PlanError(
                f"parallel.{where} = auto: there are no experts on a grid of their own; give "
                "parallel.ep, or leave it out"
            )
        try:
            layer = layer_of(self._shape, self._machine, split, tokens, seq_len)
        except PlanError as cause:
            raise PlanError(f"parallel.{where} = auto: {cause}; or give numbers") from cause
        result: dict[str, Any] = {}
        if split.expert_chunks == AUTO:
            result["expert_chunks"] = (choose(layer.forward).r, choose(layer.backward).r)
        if split.gradient_slices == AUTO:
            result["gradient_slices"] = slices_of(layer, self._shape)
        return result
