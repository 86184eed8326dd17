"""Attention of one block of queries over one block of keys, and how blocks are put together.

Shapes: B rows, H query heads, K key/value heads, n queries, m keys, d head_dim. Statistics
are wide: fp64 for fp64 inputs, else fp32.

Blocks of one query are merged by their logarithms of summed weights ``lse``, and gone
through backward one by one from the *global* ``lse`` and ``delta``, the row sums of
gradient times output.

Source: Dao et al., FlashAttention, 2022; Liu et al., Ring Attention, 2023.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shoal.parallel.context.pieces import AttentionPiece

# Scores that the plain kernel holds at a time.
_MAX_SCORES = 2**26


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type of statistics and of sums beside ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_sums(grad: Tensor, out: Tensor) -> Tensor:
    """Delta [B, H, n]: row sums of gradient times output, wide."""
    kind = wide(out.dtype)
    return (grad.to(kind) * out.to(kind)).sum(-1)


class AttentionTotal:
    """Output and statistics of some queries over all blocks seen so far.

    Args:
        q: [B, H, n, d].
    """

    def __init__(self, q: Tensor) -> None:
        kind = wide(q.dtype)
        self.q = q
        self.out = torch.zeros(q.shape, dtype=kind, device=q.device)
        self.lse = torch.full(q.shape[:-1], -math.inf, dtype=kind, device=q.device)

    def attend(self, k: Tensor, v: Tensor, pieces: Sequence[AttentionPiece]) -> None:
        """Add a block of keys and values [B, K, m, d]."""
        for piece in pieces:
            rows, queries, keys = piece.rows, piece.q, piece.k
            out, lse = _forward(self.q[rows, :, queries], k[rows, :, keys], v[rows, :, keys], piece)
            self._merge(self.out[rows, :, queries], self.lse[rows, :, queries], out, lse)

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add what another rank computed for all queries."""
        self._merge(self.out, self.lse, out, lse)

    @staticmethod
    def _merge(total: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
        weight = torch.sigmoid(lse - total_lse).masked_fill_(lse == -math.inf, 0.0)
        total.sub_(weight.unsqueeze(-1) * (total - out))
        torch.logaddexp(total_lse, lse, out=total_lse)


def backward_block(
    grad: Tensor,
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    delta: Tensor,
    pieces: Sequence[AttentionPiece],
    q_grad: Tensor,
    kv_grad: Tensor,
) -> None:
    """Add a block's gradients to ``q_grad`` [B, H, n, d] and ``kv_grad`` [2, B, K, m, d].

    Args:
        grad: of the output, [B, H, n, d].
        q: [B, H, n, d].
        kv: [2, B, K, m, d].
        lse: global, [B, H, n].
        delta: global, [B, H, n].
        pieces: what of the block is seen.
        q_grad: wide sum.
        kv_grad: wide sum.
    """
    function = flash_backward if q.device.type == "cpu" else plain_backward
    for piece in pieces:
        rows, queries, keys = piece.rows, piece.q, piece.k
        result = function(
            grad[rows, :, queries],
            q[rows, :, queries],
            kv[0, rows, :, keys],
            kv[1, rows, :, keys],
            lse[rows, :, queries],
            delta[rows, :, queries],
            piece,
        )
        q_grad[rows, :, queries] += result[0]
        kv_grad[0, rows, :, keys] += result[1]
        kv_grad[1, rows, :, keys] += result[2]


def _forward(q: Tensor, k: Tensor, v: Tensor, piece: AttentionPiece) -> tuple[Tensor, Tensor]:
    function = flash_forward if q.device.type == "cpu" else plain_forward
    return function(q, k, v, piece)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, piece: AttentionPiece) -> tuple[Tensor, Tensor]:
    """Output and lse by PyTorch's tiled kernel for CPUs."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, 0.0, piece.causal, attn_mask=_added(piece, q.dtype, q.device))
    if piece.cells is not None:
        # The kernel gives a query that sees nothing the statistic 0.
        blind = torch.from_numpy(~piece.cells.any(1))
        if bool(blind.any()):
            lse = lse.masked_fill(blind, -math.inf)
    return out, lse


def flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, piece: AttentionPiece
) -> tuple[Tensor, Tensor, Tensor]:
    """Wide gradients of q, k and v by PyTorch's tiled kernel for CPUs.

    In fp32 even for narrower inputs: for blocks of up to a thousand queries the kernel is
    faster so, and its sums are not rounded.
    """
    kind = wide(q.dtype)
    grad, q, k, v = (x.to(kind) for x in (grad, q, k, v))
    # The kernel wants the output only for its product with the gradient. A stand-in with
    # the same product, in the gradient's largest channel, spares who computes a block
    # for other ranks their outputs.
    largest = grad.abs().argmax(-1, keepdim=True)
    divisor = grad.gather(-1, largest)
    share = torch.where(divisor == 0, 0.0, delta.unsqueeze(-1) / divisor)
    stand_in = torch.zeros_like(grad).scatter_(-1, largest, share)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = kernel(
        grad,
        q,
        k,
        v,
        stand_in,
        _finite(lse),
        0.0,
        piece.causal,
        attn_mask=_added(piece, kind, q.device),
    )
    return dq, dk, dv


def plain_forward(q: Tensor, k: Tensor, v: Tensor, piece: AttentionPiece) -> tuple[Tensor, Tensor]:
    """Output and lse by matrix products, some queries at a time, for any device."""
    kind = wide(q.dtype)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=kind, device=q.device)
    for rows, keys in _tiles(q, k, piece):
        scores = block_scores(q[:, :, rows], k[:, :, keys], piece, rows.start)
        torch.logsumexp(scores, -1, out=lse[:, :, rows])
        weights = torch.exp(scores - _finite(lse[:, :, rows]).unsqueeze(-1))
        out[:, :, rows] = grouped(weights, v[:, :, keys].to(kind)).to(q.dtype)
    return out, lse


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, piece: AttentionPiece
) -> tuple[Tensor, Tensor, Tensor]:
    """Wide gradients of q, k and v by matrix products, some queries at a time."""
    kind, scale, kv_heads = wide(q.dtype), q.shape[-1] ** -0.5, k.shape[1]
    grad, q, k, v = (x.to(kind) for x in (grad, q, k, v))
    q_grad, k_grad, v_grad = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _tiles(q, k, piece):
        query, out_grad, key = q[:, :, rows], grad[:, :, rows], k[:, :, keys]
        weights = block_scores(query, key, piece, rows.start)
        weights.sub_(_finite(lse[:, :, rows]).unsqueeze(-1)).exp_()
        v_grad[:, :, keys] += summed(weights, out_grad, kv_heads)
        scores_grad = grouped(out_grad, v[:, :, keys].transpose(-1, -2))
        scores_grad.sub_(delta[:, :, rows].unsqueeze(-1)).mul_(weights).mul_(scale)
        q_grad[:, :, rows] = grouped(scores_grad, key)
        k_grad[:, :, keys] += summed(scores_grad, query, kv_heads)
    return q_grad, k_grad, v_grad


def _tiles(q: Tensor, k: Tensor, piece: AttentionPiece) -> Iterator[tuple[slice, slice]]:
    """Queries whose scores may be held at a time, and the keys that they can see."""
    batch, heads, queries, _ = q.shape
    step = max(1, _MAX_SCORES // (batch * heads * k.shape[2]))
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        yield slice(start, stop), slice(0, stop if piece.causal else k.shape[2])


def block_scores(q: Tensor, k: Tensor, piece: AttentionPiece, first: int = 0) -> Tensor:
    """Scaled scores, wide, [B, H, n, m]; -inf where nothing is seen.

    Args:
        q: queries of the piece from number ``first`` on, [B, H, n, d].
        k: the piece's keys, up to the last query's own place if it is causal.
        piece: the keys that are attended to.
        first: number of the first query.
    """
    kind = wide(q.dtype)
    scores = grouped(q.to(kind) * q.shape[-1] ** -0.5, k.to(kind).transpose(-1, -2))
    hidden = None
    if piece.causal:
        shape = scores.shape[-2:]
        hidden = torch.ones(shape, dtype=torch.bool, device=q.device).triu_(first + 1)
    elif piece.cells is not None:
        hidden = torch.from_numpy(~piece.cells[first : first + q.shape[2]]).to(q.device)
    return scores if hidden is None else scores.masked_fill_(hidden, -math.inf)


def grouped(left: Tensor, right: Tensor) -> Tensor:
    """[B, H, n, x] times [B, K, x, y], each of the K for a group of heads: [B, H, n, y]."""
    batch, heads, rows, inner = left.shape
    kv_heads = right.shape[1]
    left = left.reshape(batch, kv_heads, heads // kv_heads * rows, inner)
    return (left @ right).view(batch, heads, rows, right.shape[-1])


def summed(left: Tensor, right: Tensor, kv_heads: int) -> Tensor:
    """[B, H, n, m]^T times [B, H, n, d], summed over each group of heads: [B, K, m, d]."""
    batch, heads, rows, columns = left.shape
    both = heads // kv_heads * rows
    left = left.reshape(batch, kv_heads, both, columns)
    return left.transpose(-1, -2) @ right.reshape(batch, kv_heads, both, -1)


def _finite(lse: Tensor) -> Tensor:
    """A query that sees nothing has weights exp(-inf - 0) = 0 instead of NaN."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _added(piece: AttentionPiece, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """The mask that the tiled kernel adds to the scores."""
    if piece.cells is None:
        return None
    hidden = torch.from_numpy(~piece.cells).to(device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)
