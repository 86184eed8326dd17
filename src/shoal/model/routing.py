"""What routers know of the tokens of a pass, and what becomes of their choices.

The same on any number of ranks: chance is a hash of a token's number in the global batch, capacity
and balance are of whole sequences, which ranks that share one gather first, and what is added to
the loss is every rank's sum over its own tokens.

Shapes: N tokens of this rank, E experts, K choices of a token, M = N K choices, S sequences.

Source: Fedus et al., Switch Transformers, 2022, section 2.2 (capacity, balance); Zoph et al.,
ST-MoE, 2022, section 3.1 (z-loss).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.core.random import seed64
from shoal.model.dropout import uniform

if TYPE_CHECKING:
    from shoal.ir.comm import Comm
    from shoal.ir.routing import Routing

TAG = "routing"


@dataclass(frozen=True)
class StepRouting:
    """Consecutive sequences of one step of training.

    Args:
        row: number of the first sequence in the global batch.
        sequences: of that batch.
    """

    seed: int
    step: int
    row: int
    sequences: int

    def over(self, positions_T: Tensor, length: int, batch: int, *, training: bool) -> Tokens:
        """Tokens [N] = batch x positions, behind each other, of sequences of ``length``."""
        rows = torch.arange(self.row, self.row + batch, device=positions_T.device)
        number_N = (rows.unsqueeze(1) * length + positions_T).reshape(-1)
        return Tokens(self, number_N, length, batch, training)


@dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens of one pass.

    Args:
        of: their step.
        numbers: of the tokens in the global batch, int64 [N].
        length: tokens of a whole sequence.
        batch: sequences of the pass.
        training: choices are limited, drawn, counted and balanced.
    """

    of: StepRouting
    numbers: Tensor
    length: int
    batch: int
    training: bool

    def some(self, number_N: Tensor) -> Tokens:
        """Some of the tokens, given by their numbers."""
        return replace(self, numbers=number_N)

    @property
    def rows(self) -> Tensor:
        """Number [N] of each token's sequence in this pass."""
        return self.numbers // self.length - self.of.row

    def drawn(self, layer: int) -> Tensor:
        """A number in [0, 1) for each token, fp64."""
        key = seed64(self.of.seed, purpose="routing", step=self.of.step, layer=layer)
        return uniform(self.numbers, key)


class RoutingRequest(NamedTuple):
    """The input of a gate.

    Args:
        top_k: experts a token is sent to.
        normalise: the weights of a token add up to 1.
        own: the gate's parameters beside the router's matrix, by name.
        tokens: step and numbers of the tokens in the global batch; None in inference.
        keep: of scores [N, K] for experts [N, K], which are among the best of an expert; those
            that it has room for, by the model's capacity factor, or 1 if it has none.
    """

    top_k: int
    normalise: bool
    layer: int
    own: Mapping[str, Tensor]
    tokens: Tokens | None
    keep: Callable[[Tensor, Tensor], Tensor]


class RoutingResult(NamedTuple):
    """What a gate answers.

    Args:
        weights: of the outputs of the chosen experts [N, K].
        experts: their numbers [N, K].
        scores: by which an expert that has not room for all prefers a token [N, K].
        shares: scores of all experts [N, E], adding up to 1 for each token.
        keep: choices that hold, bool [N, K]; None where all do.
    """

    weights: Tensor
    experts: Tensor
    scores: Tensor
    shares: Tensor
    keep: Tensor | None = None


@torch.no_grad()
def best(
    score_NK: Tensor, expert_NK: Tensor, tokens: Tokens, moe: Routing, experts: int, top_k: int,
    peers: Sequence[Comm], held_NK: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Which choices an expert has room for: those of the highest scores, then of the first tokens.

    Args:
        score_NK: of every choice.
        expert_NK: whom it is of.
        tokens: of this rank.
        moe: capacity factor and scope.
        experts: how many there are, E.
        top_k: experts a token is sent to.
        peers: who has other tokens of the same sequences, axis by axis.
        held_NK: choices that count at all; all, if not given.

    Returns:
        [N, K], bool.
    """
    number_N, rows = tokens.numbers, len(tokens.numbers)
    whole = moe.scope == "full-sequence"
    score_MK, code_MK = _rounded(score_NK), number_N.unsqueeze(1) * experts + expert_NK
    if held_NK is not None:
        code_MK = code_MK.masked_fill(~held_NK, -1)
    first = 0
    for comm in peers if whole else ():
        first += comm.rank * len(score_MK)
        score_MK, code_MK = _gathered(score_MK, comm), _gathered(code_MK, comm)
    score_M, code_M = score_MK.reshape(-1), code_MK.reshape(-1)
    # By expert and sequence, then by score, then by token: sorted in the reverse order.
    order = torch.argsort(code_M, stable=True)
    order = order[torch.argsort(score_M[order], stable=True, descending=True)]
    sequence_M = code_M // experts // tokens.length if whole else torch.zeros_like(code_M)
    group_M = torch.where(code_M < 0, -1, sequence_M * experts + code_M % experts)
    order = order[torch.argsort(group_M[order], stable=True)]
    group = group_M[order]
    place = torch.arange(len(group), device=group.device) - torch.searchsorted(group, group)
    length = tokens.length if whole else rows
    keep_M = torch.empty_like(code_M, dtype=torch.bool)
    keep_M[order] = (place < moe.capacity(length, top_k, experts)) & (group >= 0)
    return keep_M.view_as(score_MK)[first : first + rows]


def _rounded(score_NK: Tensor) -> Tensor:
    """Scores that differ by rounding alone made equal.

    Two equal tokens that begin a sequence have the same states in the same model, but not to the
    last bit in every split of it; which of them is left out must not depend on that.
    """
    bits = 36 if score_NK.dtype == torch.float64 else 18
    return (score_NK * 2.0**bits).round()


def _gathered(x_NK: Tensor, comm: Comm) -> Tensor:
    """Rows of all ranks, in rank order."""
    if comm.world == 1:
        return x_NK
    out = x_NK.new_empty(comm.world * len(x_NK), *x_NK.shape[1:])
    comm.all_gather(out, x_NK.contiguous(), tag=TAG).wait()
    return out


def balance_sums(routed: RoutingResult, tokens: Tokens, peers: Sequence[Comm]) -> Tensor:
    """The loss of unequal loads, summed over this rank's tokens; 1 for a sequence of equal ones.

    The shares of choices are of whole sequences, and only the mean score has a gradient: so the
    ranks' sums, and their gradients, add up to what one process has.
    """
    choices, experts = routed.experts.shape[1], routed.shares.shape[1]
    place_NK = tokens.rows.unsqueeze(1) * experts + routed.experts
    counted = torch.bincount(place_NK.reshape(-1), minlength=tokens.batch * experts)
    counts_SE = counted.to(routed.shares.dtype)
    for comm in peers:
        if comm.world > 1:
            comm.all_reduce(counts_SE, tag=TAG).wait()
    share_SE = counts_SE.view(tokens.batch, experts) / (tokens.length * choices)
    return (share_SE[tokens.rows] * routed.shares).sum() * experts / tokens.length


def squared_log_sums(logits_NE: Tensor, tokens: Tokens) -> Tensor:
    """The z-loss, summed over this rank's tokens; of a sequence it is the mean over its tokens."""
    return (torch.logsumexp(logits_NE, -1) ** 2).sum() / tokens.length


@torch.no_grad()
def tally(
    expert_NK: Tensor,
    chosen_NK: Tensor | None,
    keep_NK: Tensor | None,
    experts: int,
    losses: tuple[Tensor, Tensor],
) -> Tensor:
    """What the router did [E + 3], fp64: choices of each expert, dropped ones, and two losses.

    Args:
        expert_NK: the choices.
        chosen_NK: which of them count; all, if not given.
        keep_NK: which of those hold; all, if not given.
        experts: how many there are, E.
        losses: sums of the balance loss and of the z-loss.
    """
    every_NK = torch.ones_like(expert_NK, dtype=torch.bool)
    counts_NK = every_NK if chosen_NK is None else chosen_NK
    load_E = torch.bincount(
        expert_NK.reshape(-1), weights=counts_NK.reshape(-1).double(), minlength=experts
    )
    lost = (counts_NK & ~(every_NK if keep_NK is None else keep_NK)).sum()
    return torch.cat([load_E, torch.stack([lost.double(), *(x.double() for x in losses)])])


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Returns ``x``; in the backward pass ``loss`` gets a gradient of 1.

    So the loss of an inner layer need not be passed to the end of the model.
    """
    out: Tensor = _AddLoss.apply(x, loss)  # type: ignore[no-untyped-call]
    return out
