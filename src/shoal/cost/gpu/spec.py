"""Engines: how a program runs a training step on accelerators; and what shapes leave unsaid.

A :class:`~shoal.ir.TrainJob` names what Shoal's own runtime can run; published runs were made by
other engines, with other precisions and kernels. A job is priced for the engine that runs it.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Literal

from shoal.cost.arithmetic import linears
from shoal.ir import ModelShape

Recompute = Literal["none", "selective", "elementwise", "half", "full", "stage"]


@dataclass(frozen=True)
class Linear:
    """Linear attention by gated delta rules: what a shape's heads do not say.

    Args:
        layers: that have it; the others have the attention of the shape.
        key_heads: heads of its queries, and of its keys.
        value_heads: heads of its values.
        width: of a head.
    """

    layers: int
    key_heads: int
    value_heads: int
    width: int


@functools.cache
def linear_of(shape: ModelShape) -> Linear | None:
    """The linear attention that a shape's source describes, if it has some."""
    match = re.search(
        r"gated delta on (\d+) layers: (\d+) heads of keys, (\d+) of values, width (\d+)",
        shape.source,
    )
    return Linear(*map(int, match.groups())) if match else None


@functools.cache
def window_of(shape: ModelShape) -> tuple[int, float]:
    """(tokens that a query sees at most, or 0; share of layers) that a shape's source states."""
    match = re.search(r"sliding window (\d+) on every other layer", shape.source)
    return (int(match.group(1)), 0.5) if match else (0, 0.0)


def groups_of(shape: ModelShape) -> tuple[int, int]:
    """(groups of experts that a token may reach, all groups); (1, 1) where any expert may be."""
    match = re.search(r"experts of (\d+) of (\d+) groups", shape.source)
    return (int(match.group(1)), int(match.group(2))) if match else (1, 1)


def whole_norm(shape: ModelShape) -> bool:
    """Queries and keys are normed over all heads together, not head by head."""
    return "norm over all heads" in shape.source


@dataclass(frozen=True)
class EngineSpec:
    """How an engine runs a step: settings from its documentation or code.

    Args:
        name: of the program.
        style: fused, where chains of elementwise operators are single kernels; eager, where none
            is; gpu, as Shoal's own runtime, where norms are.
        attention: plain, flash1, flash2, or best: the fastest kernel of the device's generation.
        tensor_overlap: share of tensor-parallel communication that overlaps with products.
        data_overlap: communication of gradients (and gathered weights) overlaps with the backward
            pass.
        grad_bytes: bytes of a gradient on the wire.
        sharded_update: the optimizer's state is divided over the data-parallel ranks.
        pipe_overlap: communication between stages overlaps with computation.
        graphs: kernels are launched by recorded graphs, not one by one.
        fused_experts: experts run as grouped products, their tokens move in fused kernels.
        dedup: tokens are sent to another domain once for all experts there, and are forwarded
            inside.
        expert_overlap: share of the exchange of experts' tokens that is hidden where the job says
            overlap: experts; 0 where the passes of two micro-batches cannot take turns.
        loss_bytes: bytes that the loss reads and writes for one logit, forward and backward.
        optimizer_bytes: bytes that the update reads and writes for one parameter; 0 where the
            optimizer part of the job says it.
        casts: weights are fp32, copied to the compute type in every forward pass; gradients are
            accumulated by separate operators.
        products: type of a block's products where a job's precision does not say it: fp8, mxfp8,
            fp8-rows or fp4.
        again: what runs again where the job says nothing: none, selective (attention's inside) or
            half (of each block).
        selective: what runs again where the job says selective: elementwise operators, or half: of
            the products every other one too.
        low: types of products that it has beside those of the compute type, each with the way in
            which it quantises them.
        copies: gathered buffers are copied to the parameters, and gradients to send buffers.
        masters: weights are held in the compute type, and the optimizer has those in fp32.
        launched_as: the emitter in whose words it is launched; none for Shoal itself.
        window: keys that a query sees at most, 0 for all; and on which share of layers.
        uneven: blocks are cut so that the slowest stage is as fast as it can be, even where they
            divide evenly.
    """

    name: str
    style: Literal["fused", "eager", "gpu"] = "fused"
    attention: str = "best"
    tensor_overlap: float = 0.0
    data_overlap: bool = True
    grad_bytes: float = 4.0
    sharded_update: bool = True
    pipe_overlap: bool = False
    graphs: bool = False
    fused_experts: bool = True
    dedup: bool = False
    expert_overlap: float = 0.0
    loss_bytes: float = 40.0
    optimizer_bytes: float = 30.0
    casts: bool = False
    products: str = ""
    again: Recompute = "none"
    selective: Literal["elementwise", "half"] = "elementwise"
    low: tuple[tuple[str, str], ...] = ()
    copies: bool = False
    masters: bool = False
    launched_as: str = ""
    window: tuple[int, float] = (0, 0.0)
    uneven: bool = False

    @property
    def fused(self) -> bool:
        """Chains of elementwise operators are single kernels."""
        return self.style == "fused"

    def compiled(self) -> EngineSpec:
        """The same with chains of elementwise operators, and of the loss, compiled."""
        return replace(self, style="fused", loss_bytes=min(self.loss_bytes, 24.0))


SHOAL = EngineSpec(
    "shoal",
    style="gpu",
    attention="flash2",
    loss_bytes=20.0,
    fused_experts=False,
    sharded_update=False,
    optimizer_bytes=0.0,
    casts=True,
    uneven=True,
)
"""Shoal's own runtime."""


@functools.cache
def block_weights(shape: ModelShape) -> tuple[float, float, float]:
    """Weights of one dense block, of one sparse block without its experts, of its experts."""
    by: dict[str, float] = defaultdict(float)
    for x in linears(shape):
        # Of the rest of a block, only the dense feed-forward layer is counted.
        by[x.name if x.role == "block" else x.role] += x.N * x.K * x.copies
    dense = by["attention"] + by["ffn_in"] + by["ffn_out"]
    return dense, by["attention"] + by["mixture"], by["expert"]
