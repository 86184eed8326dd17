"""Feed-forward layers: SwiGLU, dense and as a mixture of experts.

Shapes: N tokens, D hidden, F ffn_hidden, E experts, K choices of a token, M rows, R rows of the
router's matrix.

Source: Shazeer, GLU Variants Improve Transformer, 2020; Jiang et al., Mixtral of
Experts, 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.core.errors import ModelError
from shoal.core.parts import table
from shoal.kernel.fused.torch_training import gate
from shoal.kernel.grouped.product import multiply
from shoal.kernel.protocols import Ready
from shoal.model.config import ModelConfig
from shoal.model.desync import own, shared
from shoal.model.permutation import RoutingPermutation
from shoal.model.routing import (
    RoutingRequest,
    RoutingResult,
    Tokens,
    add_loss,
    balance_sums,
    best,
    squared_log_sums,
    tally,
)

if TYPE_CHECKING:
    from shoal.ir.comm import Comm
    from shoal.model.protocols import Gate

__all__ = ["Experts", "SwiGLU", "gate"]


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``; rows of ``gate_up_proj``: F of gate, F of up."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden, 2 * config.ffn_hidden, bias=config.ffn_bias)
        self.down_proj = nn.Linear(config.ffn_hidden, config.hidden, bias=config.ffn_bias)
        self.width, self.apart = config.ffn_hidden, config.architecture.residual.apart
        self.kernel: Ready | None = None  # see shoal.model.accelerate and shoal.model.trained

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Each token by itself."""
        gates = own(self.gate_up_proj(x_BTD), self.apart, (self.width, self.width))
        out: Tensor = self.down_proj(shared((self.kernel or gate)(gates), self.apart))
        return out


class Experts(nn.Module):
    """SwiGLU experts, of which each token visits some, which the gate chooses.

    Tokens are sorted by expert, so that every expert is two matrix products; the sums are taken
    in a fixed order, so that a pass can be repeated exactly.

    Args:
        held: experts that are here, if not all.
        width: of the slice of them that is here, if not all.

    Attributes:
        peers: who has other tokens of the same sequences, axis by axis.
        checked: scores that are not numbers are refused, since ranks would wait for each other.
        copies: ranks that route the same tokens, and share the gradients.
        tallies: first sequence of a micro-batch -> tokens that chose each expert, choices that
            were dropped, and sums of the balance loss and the z-loss; see
            :func:`~shoal.model.routing.tally`.
    """

    kernel: Ready | None = None  # see shoal.model.accelerate and shoal.model.trained
    # By parameter: what multiplies with each expert's part of it, where that is not the library.
    multiply: Mapping[nn.Parameter, Sequence[Callable[[Tensor], Tensor]]] = {}
    # The kernel of grouped_linear that must be taken, where one is wanted.
    grouped: str | None = None
    peers: Sequence[Comm] = ()
    copies = 1
    checked = False

    def __init__(
        self, config: ModelConfig, layer: int = 0, *, held: int = 0, width: int = 0
    ) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.layer = config.num_experts, config.top_k, layer
        self.normalise, self.moe = config.norm_topk_prob, config.architecture.moe
        self.gate: Gate = table("gate").build(self.moe.gate)
        held, width = held or config.num_experts, width or config.ffn_hidden
        self.gate_up_proj = nn.Parameter(torch.empty(held, 2 * width, config.hidden))
        self.down_proj = nn.Parameter(torch.empty(held, config.hidden, width))
        shapes = self.gate.shapes(config.hidden, config.num_experts)
        rows, _ = shapes.pop("router.weight")
        self.router = nn.Linear(config.hidden, rows, bias=False)
        for name, shape in shapes.items():
            trained = name not in self.gate.kept
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=trained))
        self._routers = tuple(shapes)
        self.tallies: dict[int, Tensor] = {}

    def use(self, linear: Callable[[Tensor], Callable[[Tensor], Tensor]], *, release: bool) -> None:
        """Multiply with the matrix [O, I] of every expert by what ``linear`` makes of it.

        Args:
            linear: may keep the matrix, or something else in its place.
            release: the parameters themselves are not needed any more.
        """
        result: dict[nn.Parameter, Sequence[Callable[[Tensor], Tensor]]] = {}
        for weight_EOI in (self.gate_up_proj, self.down_proj):
            if isinstance(weight_EOI, nn.Parameter):
                result[weight_EOI] = [linear(weight) for weight in weight_EOI.unbind(0)]
                if release:
                    weight_EOI.data = weight_EOI.new_empty(0)
        self.multiply = result

    def forward(self, x_BTD: Tensor, *, tokens: Tokens | None = None) -> Tensor:
        """Weighted sum of the chosen experts, token by token.

        Args:
            x_BTD: tokens, of any shape before the last dimension.
            tokens: what is known of them; not in inference.

        Raises:
            ModelError: the router's scores are not numbers, or its gate needs to see whole
                sequences and ``tokens`` is not given.
        """
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        routed, loss = self.routed(x_ND, tokens)
        out_ND = self.mixed(x_ND, routed)
        if loss is not None:
            out_ND = add_loss(out_ND, loss)
        return out_ND.view_as(x_BTD)

    def routed(self, x_ND: Tensor, tokens: Tokens | None) -> tuple[RoutingResult, Tensor | None]:
        """Who goes where, and what is to be added to the loss for it."""
        logits_NR = self.router(x_ND)
        exact = torch.promote_types(logits_NR.dtype, torch.float32)
        logits_NE = self.gate.scores(logits_NR.to(exact), self.own)
        keep = partial(self._room, tokens=tokens)
        routing_request = RoutingRequest(
            self.top_k, self.normalise, self.layer, self.own, tokens, keep
        )
        if self.checked and not bool(torch.isfinite(logits_NE).all()):
            raise ModelError(
                f"blocks.{self.layer}.mlp.router: scores that are not numbers; lower the learning "
                "rate, or go back to a checkpoint before they came up"
            )
        routed = self.gate.route(logits_NE, routing_request)
        if tokens is None:
            return routed, None
        loads = routed.experts, routed.keep
        if tokens.training and self.moe.capacity_factor is not None and self.gate.decodes:
            keep_NK = self._room(routed.scores, routed.experts, tokens, routed.keep)
            routed = routed._replace(keep=keep_NK)
        loss = self._balance(routed, logits_NE, loads, tokens) if tokens.training else None
        return routed, loss

    def take_router(self, other: Experts) -> None:
        """Send tokens where ``other`` does; its parameters become this one's too."""
        for name in ("num_experts", "top_k", "normalise", "layer", "moe", "gate", "_routers"):
            setattr(self, name, getattr(other, name))
        self.router, self.tallies = other.router, {}
        for name, parameter in other.own.items():
            self.register_parameter(name, nn.Parameter(parameter, parameter.requires_grad))

    @torch.no_grad()
    def settle(self, load_E: Tensor) -> None:
        """A step has updated the model: the gate updates what it keeps.

        Args:
            load_E: tokens of all ranks that chose each expert.
        """
        self.gate.settle(self.own, load_E)

    @property
    def own(self) -> dict[str, Tensor]:
        """Parameters of the router beside its matrix, by name."""
        return {name: getattr(self, name) for name in self._routers}

    def _room(
        self,
        score_NK: Tensor,
        expert_NK: Tensor,
        tokens: Tokens | None,
        keep_NK: Tensor | None = None,
    ) -> Tensor:
        if tokens is None:
            raise ModelError(
                f"gate {self.moe.gate.name}: experts choose among the tokens of a whole sequence, "
                "and a decoded token comes alone; decode a model with another gate"
            )
        return best(
            score_NK, expert_NK, tokens, self.moe, self.num_experts, self.top_k, self.peers, keep_NK
        )

    def _balance(
        self,
        routed: RoutingResult,
        logits_NE: Tensor,
        chosen: tuple[Tensor, Tensor | None],
        tokens: Tokens,
    ) -> Tensor | None:
        """Note what the router did, and what is to be added to the loss for it."""
        moe, zero = self.moe, logits_NE.new_zeros(())
        unequal = balance_sums(routed, tokens, self.peers) if moe.aux_loss else zero
        large = squared_log_sums(logits_NE, tokens) if moe.z_loss else zero
        self.tallies[tokens.of.row] = tally(
            *chosen, routed.keep, self.num_experts, (unequal, large)
        )
        if not (moe.aux_loss or moe.z_loss):
            return None
        return (moe.aux_loss * unequal + moe.z_loss * large) / (self.copies * tokens.of.sequences)

    def mixed(self, x_ND: Tensor, routed: RoutingResult) -> Tensor:
        """The weighted sum [N, D] of what the experts make of their tokens."""
        at = RoutingPermutation(routed.experts, self.num_experts, routed.keep)
        counts = at.counts_E.tolist()
        if not any(counts):
            return torch.zeros_like(x_ND)
        gated = (self.kernel or gate)(self.product(at.permute(x_ND), self.gate_up_proj, counts))
        rows_MD = self.product(gated, self.down_proj, counts)
        return at.unpermute(rows_MD, routed.weights).to(x_ND.dtype)

    def product(self, rows_MI: Tensor, weight_EOI: Tensor, counts: list[int]) -> Tensor:
        """Each expert's matrix with its own rows, which lie behind each other; [M, O]."""
        every = self.multiply.get(weight_EOI) if isinstance(weight_EOI, nn.Parameter) else None
        if every is None:
            return multiply(rows_MI, weight_EOI, counts, backend=self.grouped)
        return torch.cat(
            [
                linear(rows)
                for rows, linear in zip(torch.split(rows_MI, counts), every, strict=True)
                if len(rows)
            ]
        )
