"""A model whose layers of experts are cut in chunks: what a micro-batch takes, forward and back.

Source: Pan et al., FSMoE, 2025.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from shoal.core.errors import PlanError, require
from shoal.cost.arithmetic import mixture_layers
from shoal.cost.shapes import resolve
from shoal.cost.training.moe_makespan import makespan
from shoal.cost.training.moe_tasks import MoeLayer, layer_of
from shoal.ir import Machine, Parallel
from shoal.plan.experts.moe_gradients import Partition, partition
from shoal.plan.experts.moe_overlap import MOST, PassChunks, choose


class MoeStepPlan(NamedTuple):
    """How a model's layers of experts are cut, and what that gains.

    Args:
        parallel: the grid of the experts; tp ranks share an expert, as etp.
        layer: a block, its tasks fitted.
        blocks: with experts.
        forward: chunks of a layer's forward pass.
        backward: chunks of its backward pass, without gradients of other layers.
        gradients: the backward pass of all blocks.
    """

    parallel: Parallel
    layer: MoeLayer
    blocks: int
    forward: PassChunks
    backward: PassChunks
    gradients: Partition

    @property
    def seconds(self) -> float:
        """Of a micro-batch through all blocks, forward and back, and the sums of gradients."""
        return self.blocks * (self.forward.seconds + self.layer.dense_s) + self.gradients.seconds

    @property
    def uncut_s(self) -> float:
        """The same in one chunk, gradients summed at the end."""
        layer, line = self.layer, self.layer.all_reduce
        each = makespan(layer.forward, 1) + makespan(layer.backward, 1)
        each += layer.dense_s + layer.dense_backward_s
        return self.blocks * each + line.alpha + line.beta * self.blocks * layer.gradient

    def rows(self) -> Iterator[tuple[str, PassChunks, float]]:
        """Name, chunks, and seconds uncut, of both passes."""
        yield "forward", self.forward, makespan(self.layer.forward, 1)
        yield "backward", self.backward, makespan(self.layer.backward, 1)

    def as_record(self) -> dict[str, Any]:
        """As JSON can say it."""
        return {
            "ep": self.parallel.ep,
            "etp": self.parallel.etp,
            "dispatch": self.parallel.expert_dispatch,
            "blocks": self.blocks,
            **{
                name: {**one._asdict(), "uncut_s": uncut, "faster": uncut / one.seconds}
                for name, one, uncut in self.rows()
            },
            "tasks": {
                name: {"alpha_s": task.alpha, "work_s": task.work}
                for name, task in zip(
                    ("exchange", "gather", "experts"), self.layer.forward[:3], strict=True
                )
            },
            "backward_r": list(self.gradients.r),
            "slices": [one._asdict() for one in self.gradients.slices],
            "tail_bytes": self.gradients.tail,
            "tail_s": self.gradients.tail_s,
            "seconds": self.seconds,
            "uncut_s": self.uncut_s,
        }


def planned(
    model: str,
    machine: Machine,
    *,
    tokens: int = 4096,
    seq_len: int = 4096,
    ep: int | None = None,
    etp: int | None = None,
    dispatch: str = "flat",
    most: int = MOST,
) -> MoeStepPlan:
    """Choose the chunks of a model's layers of experts.

    Args:
        model: name, directory or file of a mixture of experts.
        machine: several nodes.
        tokens: of a rank and micro-batch.
        seq_len: of a sequence.
        ep: ranks that share out the experts; None for as many nodes as divide them.
        etp: ranks that share an expert; None for all of a node that divide its width.
        dispatch: the way of rows between nodes: flat, 1dh or 2dh.
        most: chunks to look at.

    Raises:
        PlanError: a model without experts, ranks that they cannot be shared by, or a machine
            whose nodes are not known.
    """
    shape = resolve(model)
    require(
        mixture_layers(shape) > 0,
        "model",
        model,
        expected="a mixture of experts, such as Mixtral-8x7B-v0.1",
        error=PlanError,
    )
    etp = etp or math.gcd(machine.devices_per_node, shape.expert_hidden)
    ep = ep or math.gcd(machine.num_devices // etp, shape.num_experts)
    for name, ranks, whole, what in (
        ("ep", ep, shape.num_experts, "experts"),
        ("etp", etp, shape.expert_hidden, "the width of an expert"),
    ):
        require(
            whole % ranks == 0,
            f"parallel.{name}",
            ranks,
            expected=f"a divisor of {what}, {whole}",
            error=PlanError,
        )
    require(
        machine.num_devices % (ep * etp) == 0,
        "parallel.ep * parallel.etp",
        ep * etp,
        expected=f"a divisor of the {machine.num_devices} devices of {machine.name}",
        error=PlanError,
    )
    # Who shares attention does not matter here: a rank has its tokens either way.
    split = Parallel.model_validate(
        {"dp": machine.num_devices, "ep": ep, "etp": etp, "expert_dispatch": dispatch}
    )
    layer = layer_of(shape, machine, split, tokens, seq_len)
    blocks = mixture_layers(shape)
    return MoeStepPlan(
        split,
        layer,
        blocks,
        choose(layer.forward, most=most),
        choose(layer.backward, most=most),
        partition([layer] * blocks, most=most),
    )
