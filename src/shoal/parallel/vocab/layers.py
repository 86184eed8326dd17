"""Embedding and loss of which every tensor-parallel rank holds some rows of the vocabulary.

A rank looks up the ids that are its own and the ranks add up what they found. The loss needs
three numbers a token from every rank: its largest logit, its sum of exponentials and the
target's logit, from the rank that has it. Logits are made some tokens at a time, turned into their
gradient at once, and never gathered.

Shapes: N tokens, D hidden, V vocabulary, C = ceil(V / tp) local rows, of which those beyond V
are zero and take no part.

Source: Shoeybi et al., Megatron-LM, 2019, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.core.errors import DataError, require
from shoal.kernel.tensors import compute_dtype
from shoal.model.loss import IGNORE
from shoal.parallel.tensor.operators import leave
from shoal.parallel.tensor.slices import vocabulary_rows

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm

# Under this tag the meter counts the three numbers a token.
TAG = "vocabulary"

# Logits held at a time, and those of them in fp32 at a time (which should fit a cache).
_CHUNK_ELEMENTS = 2**24
_EXACT_ELEMENTS = 2**18


def check_ids(tokens: Tensor, vocab_size: int) -> None:
    """Refuse token ids that the vocabulary does not have.

    Raises:
        DataError: an id below 0, or of at least ``vocab_size``.
    """
    low, high = _extremes(tokens)
    require(
        low >= 0 and high < vocab_size,
        "token id",
        high if high >= vocab_size else low,
        expected=f"0 to {vocab_size - 1}",
        hint="prepare the corpus with the tokenizer of this model",
        error=DataError,
    )


def check_targets(targets: Tensor, vocab_size: int) -> None:
    """Refuse labels that the vocabulary does not have; -100 is none.

    Raises:
        DataError: a label below 0 that is not -100, or of at least ``vocab_size``.
    """
    low, high = _extremes(targets.where(targets != IGNORE, 0))
    require(
        low >= 0 and high < vocab_size,
        "label",
        high if high >= vocab_size else low,
        expected=f"0 to {vocab_size - 1}, or {IGNORE} for a token that counts nothing",
        hint="prepare the corpus with the tokenizer of this model",
        error=DataError,
    )


def _extremes(ids: Tensor) -> tuple[int, int]:
    if not ids.numel():
        return 0, 0
    low, high = torch.stack(torch.aminmax(ids)).tolist()  # one synchronisation on a GPU
    return low, high


class VocabularyTable(nn.Module):
    """Rows of the embedding, or of the output matrix: all of them, or one rank's.

    Args:
        vocab_size: rows V of the whole.
        comm: the ranks that share the rows; None if this rank has all.
    """

    def __init__(self, vocab_size: int, width: int, comm: Comm | None) -> None:
        super().__init__()
        self.vocab_size, self.comm = vocab_size, comm
        shards, shard = (1, 0) if comm is None else (comm.world, comm.rank)
        self.rows, padding = vocabulary_rows(vocab_size, shards, shard)
        self.weight = nn.Parameter(torch.empty(len(self.rows) + padding, width))

    def look_up(self, tokens_N: Tensor, *, sp: bool) -> Tensor:
        """Embeddings [N, D] in the dtype of the computation.

        With ``sp`` and rows that are shared, a rank gets its [n, D] of them.

        Raises:
            DataError: an id that the vocabulary does not have.
        """
        check_ids(tokens_N, self.vocab_size)
        if self.comm is None:
            x = F.embedding(tokens_N, self.weight)
            return x.to(compute_dtype(x))
        local = tokens_N - self.rows.start
        foreign = (local < 0) | (local >= len(self.rows))
        x = F.embedding(local.masked_fill(foreign, 0), self.weight)
        x = x.masked_fill(foreign.unsqueeze(1), 0.0)
        # One rank's row and zeros: the sum is exact in any dtype.
        return leave(x.to(compute_dtype(x)), self.comm, sp=sp)


def split_loss_sum(hidden_ND: Tensor, table: VocabularyTable, targets_N: Tensor) -> Tensor:
    """Sum over tokens of the cross-entropy, in nats, by ranks that share the vocabulary.

    Args:
        hidden_ND: final hidden states, whole and equal on all ranks. The gradient that they get
            is this rank's share; what passes on a sum of the shares comes before
            (``copy_to``, ``gather_tokens``).
        table: this rank's rows of the output matrix.
        targets_N: next tokens, int64; -100 counts nothing.

    Returns:
        A scalar in fp32 (fp64 for fp64 input), equal on all ranks.

    Raises:
        DataError: a label that the vocabulary does not have.
    """
    check_targets(targets_N, table.vocab_size)
    out: Tensor = _SplitLoss.apply(  # type: ignore[no-untyped-call]
        hidden_ND.to(compute_dtype(hidden_ND)),
        table.weight,
        targets_N,
        table,
        torch.is_grad_enabled(),
    )
    return out


class _SplitLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_CD: Tensor,
        targets_N: Tensor,
        table: VocabularyTable,
        differentiates: bool,
    ) -> Tensor:
        exact = torch.promote_types(hidden_ND.dtype, torch.float32)
        rows = len(table.rows)
        weight = weight_CD[:rows].to(hidden_ND.dtype)
        total = torch.zeros((), dtype=exact, device=hidden_ND.device)
        grad_hidden = torch.empty_like(hidden_ND) if differentiates else None
        grad_weight: Tensor | None = None
        # Every rank takes the same chunks, by the padded size, for they meet in each.
        size = max(1, _CHUNK_ELEMENTS // len(weight_CD))
        for first in range(0, len(hidden_ND), size):
            part = slice(first, first + size)
            x = hidden_ND[part]
            logits = x @ weight.T
            total += _loss_and_gradient(logits, targets_N[part], table, exact)
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[part])
                step = (logits.T @ x).to(weight_CD.dtype)
                grad_weight = step if grad_weight is None else grad_weight.add_(step)
        if grad_weight is not None and rows < len(weight_CD):
            grad_weight = F.pad(grad_weight, (0, 0, 0, len(weight_CD) - rows))
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled = grad_hidden * grad.to(grad_hidden.dtype)
        return scaled, grad_weight * grad.to(grad_weight.dtype), None, None, None


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, table: VocabularyTable, exact: torch.dtype
) -> Tensor:
    """The loss of some tokens; turns this rank's ``logits`` into their gradient, in place."""
    rows, comm = table.rows, table.comm
    assert comm is not None
    count = len(logits)
    counted = targets != IGNORE
    local = targets - rows.start
    mine = counted & (local >= 0) & (local < len(rows))
    index = local.masked_fill(~mine, 0).unsqueeze(1)
    # Largest logit; sum of exponentials relative to it, and the target's logit.
    top = torch.full((count,), float("-inf"), dtype=exact, device=logits.device)
    share = torch.zeros(2, count, dtype=exact, device=logits.device)
    if len(rows):
        share[1] = logits.gather(1, index).squeeze(1).to(exact).masked_fill_(~mine, 0.0)
        size = max(1, _EXACT_ELEMENTS // len(rows))
        for first in range(0, count, size):
            part = slice(first, first + size)
            values = logits[part].to(exact)
            top[part], place = values.max(1)
            softmax = torch.softmax(values, 1)
            # The largest probability is 1 / (sum of exponentials relative to the largest).
            share[0, part] = softmax.gather(1, place.unsqueeze(1)).squeeze(1).reciprocal_()
            logits[part] = softmax
    own_top, own_sum = top.clone(), share[0].clone()
    comm.all_reduce(top, tag=TAG, op="max").wait()
    share[0] *= (own_top - top).exp_()
    comm.all_reduce(share, tag=TAG).wait()
    loss = (share[0].log() + top - share[1]).masked_fill_(~counted, 0.0).sum()
    if len(rows):
        # From a softmax over this rank's rows to one over all of them.
        scale = own_sum.mul_((own_top - top).exp_()).div_(share[0]).mul_(counted)
        logits.mul_(scale.to(logits.dtype).unsqueeze(1))
        logits.scatter_add_(1, index, -mine.to(logits.dtype).unsqueeze(1))
    return loss
