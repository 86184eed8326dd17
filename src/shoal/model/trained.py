"""A model whose norms, rotations and activations are fused kernels that have a gradient.

Weights are read where they are used, so parameters may be sharded, cast or replaced before and
after. The products, and the router of experts, stay PyTorch's.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from shoal.kernel.calls import Device, Dtype
from shoal.kernel.dispatch import dispatch
from shoal.kernel.fused.choice import call_of, choose
from shoal.kernel.protocols import Ready
from shoal.model.attention import Attention
from shoal.model.config import ModelConfig
from shoal.model.feedforward import Experts, SwiGLU
from shoal.model.norm import RMSNorm


def train_with(
    module: nn.Module,
    config: ModelConfig,
    wanted: Mapping[str, str],
    dtype: Dtype,
    *,
    device: Device = "cpu",
    compiled: bool = False,
) -> None:
    """Let kernels compute the operators of a model in training, in place.

    Args:
        module: the model, or a part of it.
        config: of the whole model.
        wanted: operator -> backend; what is not named stays as the model has it.
        dtype: of the computation.
        device: where.
        compiled: the model goes through ``torch.compile``.

    Raises:
        KernelError: an operator or backend does not exist, or refuses this model.
    """
    shape = config.shape()
    taken = choose(wanted, shape, dtype, device=device, compiled=compiled)

    def ready(op: str, *constants: object) -> Ready | None:
        if op not in wanted or taken[op] == "torch":  # of which the model is made anyway
            return None
        call = call_of(op, shape, 1, dtype, device)
        return dispatch(call, wanted=taken[op]).prepare(call, *constants)

    gate = ready("swiglu")
    for part in module.modules():
        if isinstance(part, RMSNorm):
            part.trained = ready("rms_norm", part.eps)
        elif isinstance(part, SwiGLU | Experts):
            part.kernel = gate
            if isinstance(part, Experts):
                part.grouped = taken.get("grouped_linear")
        elif isinstance(part, Attention):
            part.trained = ready("rope", part.num_heads, part.num_kv_heads, config.rms_norm_eps)
