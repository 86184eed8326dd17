"""A model whose operators are those kernels that are fastest here; for inference alone.

Nothing of the model's meaning changes and no weight is rounded: its linear layers, norms,
rotations, activations and its head are computed by what dispatch takes for them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shoal.core.errors import KernelError
from shoal.kernel.calls import PointwiseCall
from shoal.kernel.dispatch import dispatch, operators
from shoal.kernel.grouped.call import GroupedLinear
from shoal.kernel.protocols import Ready
from shoal.kernel.tensors import name_of
from shoal.model.attention import Attention
from shoal.model.feedforward import Experts, SwiGLU
from shoal.model.linear import DispatchedLinear
from shoal.model.lowbit import LowBitLinear
from shoal.model.norm import RMSNorm
from shoal.model.rope import tables_at
from shoal.model.transformer import Transformer


def accelerate(
    model: Transformer,
    wanted: Mapping[str, str] | None = None,
    *,
    positions: int | None = None,
    exact: bool = False,
    pack: bool = True,
    gates: bool = True,
) -> Transformer:
    """Let dispatch compute the operators of ``model``, in place.

    Args:
        model: without gradients.
        wanted: operator -> backend that must be taken for it.
        positions: most tokens of a sequence; the model's own, if not given.
        exact: the bits of a token's results do not depend on other tokens.
        pack: weights need not stay where they are, if a kernel has them in another order.
        gates: gates and what they gate may be computed with their product, with nothing between.

    Raises:
        KernelError: an operator or backend does not exist, or refuses this model.
    """
    wanted = dict(wanted or {})
    for op in wanted:
        if op not in operators():
            raise KernelError(f"kernel.{op}: no such operator; there are {', '.join(operators())}")
    pieces = _Pieces(model, wanted, positions or model.config.max_position, exact, pack)
    head = pieces.linear(model.output_weight, None)
    model.head = head
    if model.output is not None:
        model.output = head
    _dispatch(model, pieces, gates)
    return model


def accelerate_layers(layers: nn.Module, model: Transformer) -> None:
    """Let dispatch compute layers that are made of a model's and are no part of it, in place."""
    _dispatch(layers, _Pieces(model, {}, model.config.max_position, False, True), True)


def _dispatch(layers: nn.Module, pieces: _Pieces, gates: bool) -> None:
    for module in list(layers.modules()):
        if isinstance(module, RMSNorm):
            module.kernel = pieces.norm(module)
        elif isinstance(module, SwiGLU):
            gated = pieces.gated(module) if gates else None
            if gated is None:
                module.kernel = pieces.swiglu(module.gate_up_proj.out_features)
            else:
                module.gate_up_proj = gated  # type: ignore[assignment]
                module.kernel = _as_it_is
        elif isinstance(module, Experts):
            module.grouped = pieces.grouped()
            if pieces.exact:
                # The library's sums depend on how many tokens visit an expert.
                module.kernel = pieces.swiglu(2 * pieces.config.ffn_hidden)
                module.use(lambda weight: pieces.linear(weight, None), release=pieces.pack)
        elif isinstance(module, Attention):
            module.kernel = pieces.rope(module)
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, pieces.linear(child.weight, child.bias))
            elif isinstance(child, LowBitLinear):
                child.use(wanted=pieces.wanted.get("linear_lowbit"), exact=pieces.exact)


def _as_it_is(gated: torch.Tensor) -> torch.Tensor:
    return gated


class _Pieces:
    """The kernels of one model; what layers share is prepared once."""

    def __init__(
        self,
        model: Transformer,
        wanted: Mapping[str, str],
        positions: int,
        exact: bool,
        pack: bool,
    ) -> None:
        weight = model.embed.weight
        self.config, self.wanted = model.config, wanted
        self.exact, self.pack = exact, pack
        self._dtype, self._device = name_of(weight.dtype), "cuda" if weight.is_cuda else "cpu"
        with torch.inference_mode(False):
            place_P = torch.arange(positions, dtype=torch.float32, device=weight.device)
            cos, sin = tables_at(place_P, *model.unstretched, torch.float32)
            self._tables = cos[:, 0].contiguous(), sin[:, 0].contiguous()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DispatchedLinear:
        wanted = self.wanted.get("linear")
        return DispatchedLinear(weight, bias, wanted=wanted, exact=self.exact, pack=self.pack)

    def norm(self, module: RMSNorm) -> Ready:
        width = len(module.weight)
        return self._ready("rms_norm", width, width, module.weight, module.eps)

    def gated(self, module: SwiGLU) -> DispatchedLinear | None:
        """Gates and what they gate in one kernel, or None.

        None where no kernel does both for any number of rows, or where others were asked for.
        """
        inner = module.gate_up_proj
        if not (self.pack and isinstance(inner, nn.Linear)) or "swiglu" in self.wanted:
            return None
        wanted = self.wanted.get("linear")
        plain = DispatchedLinear(
            inner.weight, inner.bias, wanted=wanted, exact=self.exact, pack=False
        )
        kernel = plain.packing()
        if kernel is None or not kernel.gates:
            return None
        return DispatchedLinear(
            inner.weight, inner.bias, wanted=kernel.backend, exact=self.exact, gated=True
        )

    def grouped(self) -> str | None:
        """The backend that was asked for; without, counts decide in every step."""
        wanted = self.wanted.get("grouped_linear")
        if wanted is None:
            return None
        config = self.config
        call = GroupedLinear(
            config.num_experts, config.num_experts, config.ffn_hidden, config.hidden,
            dtype=self._dtype, device=self._device,  # type: ignore[arg-type]
        )  # fmt: skip
        return dispatch(call, wanted=wanted, exact=self.exact).backend

    def swiglu(self, width: int) -> Ready:
        return self._ready("swiglu", width, width // 2)

    def rope(self, module: Attention) -> Ready:
        every = (module.num_heads + 2 * module.num_kv_heads) * module.head_dim
        norms = [None if norm is None else norm.weight for norm in (module.q_norm, module.k_norm)]
        return self._ready(
            "rope", every, every, *self._tables, *norms,
            module.num_heads, module.num_kv_heads, self.config.rms_norm_eps,
        )  # fmt: skip

    def _ready(self, op: str, n: int, out: int, *constants: object) -> Ready:
        call = PointwiseCall(op, 1, n, out, self._dtype, self._device)  # type: ignore[arg-type]
        kernel = dispatch(call, wanted=self.wanted.get(op), exact=self.exact)
        return kernel.prepare(call, *constants)
