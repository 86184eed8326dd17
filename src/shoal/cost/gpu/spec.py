"""A training step on accelerators as the price model sees it: how, exactly, it is run.

A :class:`~shoal.ir.TrainJob` names what Shoal's own runtime can run; published runs were
made by other engines, with other precisions and kernels. Both become a :class:`Run`.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from shoal.ir import ModelShape

__all__ = ["EngineSpec", "Latent", "Run", "latent_of"]

Recompute = Literal["none", "selective", "half", "full", "stage"]


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention: what a shape's heads do not say.

    Args:
        query: rank of the compressed queries; 0 if they are not compressed.
        kv: rank of the compressed keys and values.
        plain: width of a head without positions.
        rotary: width of a head with positions, whose keys all heads share.
        value: width of a head's values.
    """

    query: int
    kv: int
    plain: int
    rotary: int
    value: int


@functools.cache
def latent_of(shape: ModelShape) -> Latent | None:
    """The latent attention that a shape's source describes, if it has one."""
    if shape.attention != "MLA":
        return None
    result = {
        key: int(match.group(1)) if (match := re.search(rf"\b{key} (\d+)", shape.source)) else 0
        for key in ("q_lora", "kv_lora", "nope", "rope", "v")
    }
    if not result["kv_lora"]:
        return None
    return Latent(result["q_lora"], result["kv_lora"], result["nope"], result["rope"], result["v"])


@dataclass(frozen=True)
class EngineSpec:
    """How a program runs a step: settings that its documentation or its code states.

    Args:
        name: of the program.
        fused: chains of elementwise operators are single kernels.
        attention: plain, flash1, flash2, or best: the fastest kernel of the device's generation.
        tensor_overlap: share of tensor parallelism's traffic that travels behind products.
        data_overlap: gradients (and gathered weights) travel behind the backward pass.
        grad_bytes: bytes of a gradient on the wire.
        sharded_update: the optimizer's state is divided over the data-parallel ranks.
        pipe_overlap: activations travel between stages behind computation.
        graphs: kernels are launched by recorded graphs, not one by one.
        fused_experts: experts run as grouped products, their tokens move in fused kernels.
        dedup: tokens cross to another domain once for all experts there.
        loss_bytes: bytes that the loss reads and writes for one logit, forward and backward.
        optimizer_bytes: bytes that the update reads and writes for one parameter.
    """

    name: str
    fused: bool = True
    attention: str = "best"
    tensor_overlap: float = 0.0
    data_overlap: bool = True
    grad_bytes: float = 4.0
    sharded_update: bool = True
    pipe_overlap: bool = False
    graphs: bool = False
    fused_experts: bool = True
    dedup: bool = False
    loss_bytes: float = 40.0
    optimizer_bytes: float = 30.0


@dataclass(frozen=True)
class Run:
    """One training step, in full.

    Args:
        shape: the model.
        seq_len: tokens of a sequence.
        micro_batch: sequences of one pass.
        global_batch: sequences of a step.
        engine: how it is run.
        dp: data-parallel ranks.
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        cp: context-parallel ranks.
        ep: expert-parallel ranks.
        vpp: chunks of a stage.
        sp: norms and residuals are divided over the tensor ranks.
        zero: what is divided over data-parallel ranks, 0 to 3.
        schedule: 1f1b, interleaved_1f1b, or gpipe.
        vocab: who shares the output layer: tp, or all stages (pp).
        recompute: what runs again: nothing; attention's inside; half of each block; all.
        precision: bf16, fp16, fp32, fp8 (per tensor), mxfp8, fp8-rows or fp4.
        tuned: all weights are trained, or only adapters beside them (lora).
        causal_window: keys that a query sees at most, 0 for all; and on which share of layers.
    """

    shape: ModelShape
    seq_len: int
    micro_batch: int
    global_batch: int
    engine: EngineSpec
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    vpp: int = 1
    sp: bool = False
    zero: int = 0
    schedule: str = "1f1b"
    vocab: Literal["tp", "pp"] = "tp"
    recompute: Recompute = "none"
    precision: str = "bf16"
    tuned: Literal["all", "lora"] = "all"
    window: tuple[int, float] = (0, 0.0)

    @property
    def devices(self) -> int:
        """All ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def passes(self) -> float:
        """Micro-batches of a rank in a step."""
        return max(1.0, self.global_batch / self.dp / self.micro_batch)
