"""What :class:`~shoal.claims.lab.attention_kernels.tiled.Tiled` computes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.claims.lab.attention_kernels.base import Prepared
from shoal.claims.lab.attention_kernels.blocks import block_table
from shoal.ir.mask import Mask


class _Row(NamedTuple):
    """A block of queries, keys of its seen tiles, what is hidden, who sees nothing."""

    queries: slice
    runs: tuple[slice, ...]
    hidden: Tensor | None
    blind: Tensor | None


def tiled_attention(mask: Mask, block: int, device: torch.device) -> Prepared:
    """Attention that computes the seen tiles of ``mask`` alone."""
    rows = _rows(mask, block, device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Tiled.apply(q, k, v, rows)  # type: ignore[no-untyped-call]
        return out

    return run


def _rows(mask: Mask, block: int, device: torch.device) -> tuple[_Row, ...]:
    table = block_table(mask, block)
    rows = []
    for index, seen in enumerate(table):
        if not seen.any():
            continue
        start = index * block
        queries = np.arange(start, min(start + block, mask.num_queries))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], seen > 0, [0]]))).tolist()
        runs = tuple(
            slice(low * block, min(high * block, mask.num_keys))
            for low, high in zip(edges[::2], edges[1::2], strict=True)
        )
        hidden = blind = None
        if (seen == 1).any():
            keys = np.concatenate([np.arange(run.start, run.stop) for run in runs])
            cells = mask.dense(queries, keys)
            nothing = np.logical_not(cells.any(axis=1, keepdims=True))
            hidden = torch.from_numpy(~cells & ~nothing).to(device)
            if nothing.any():
                blind = torch.from_numpy(nothing).to(device)
        rows.append(_Row(slice(start, start + len(queries)), runs, hidden, blind))
    return tuple(rows)


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rows: tuple[_Row, ...]) -> Tensor:
        out = torch.zeros_like(q)
        for row in rows:
            query = _group(q[:, :, row.queries], k.shape[1])
            weights = _weights(query, _taken(k, row.runs), row, q.shape[1])
            _ungroup(out, row, weights.to(q.dtype) @ _taken(v, row.runs))
        ctx.save_for_backward(q, k, v)
        ctx.rows = rows
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        kv_heads = k.shape[1]
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        q_grad = torch.zeros_like(q)
        k_grad, v_grad = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
        for row in ctx.rows:
            query, out_grad = (_group(x[:, :, row.queries], kv_heads) for x in (q, grad))
            keys, values = _taken(k, row.runs), _taken(v, row.runs)
            weights = _weights(query, keys, row, q.shape[1])
            if row.blind is not None:
                nothing = row.blind.expand(-1, 1).repeat(q.shape[1] // kv_heads, 1)
                out_grad = out_grad.masked_fill(nothing, 0.0)
            _give(v_grad, row.runs, weights.to(q.dtype).transpose(-1, -2) @ out_grad)
            weights_grad = (out_grad @ values.transpose(-1, -2)).to(wide)
            delta = (weights_grad * weights).sum(-1, keepdim=True)
            scores_grad = weights_grad.sub_(delta).mul_(weights).mul_(q.shape[-1] ** -0.5)
            scores_grad = scores_grad.to(q.dtype)
            _ungroup(q_grad, row, scores_grad @ keys)
            _give(k_grad, row.runs, scores_grad.transpose(-1, -2) @ query)
        return q_grad, k_grad.to(k.dtype), v_grad.to(v.dtype), None


def _group(x: Tensor, kv_heads: int) -> Tensor:
    """[B, H, n, d] as [B, K, H / K * n, d]."""
    batch, heads, rows, dim = x.shape
    return x.reshape(batch, kv_heads, heads // kv_heads * rows, dim)


def _ungroup(out: Tensor, row: _Row, found: Tensor) -> None:
    """Write [B, K, H / K * n, d] to the queries of ``out``; zero for those that see nothing."""
    target = out[:, :, row.queries]
    value = found.view(target.shape)
    target.copy_(value if row.blind is None else value.masked_fill(row.blind, 0.0))


def _taken(x: Tensor, runs: tuple[slice, ...]) -> Tensor:
    pieces = [x[:, :, run] for run in runs]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2)


def _give(total: Tensor, runs: tuple[slice, ...], share: Tensor) -> None:
    widths = [run.stop - run.start for run in runs]
    for run, piece in zip(runs, torch.split(share, widths, 2), strict=True):
        total[:, :, run] += piece


def _weights(query: Tensor, keys: Tensor, row: _Row, heads: int) -> Tensor:
    """Softmax [B, K, H / K * n, m] over the row's keys, wide."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = ((query * query.shape[-1] ** -0.5) @ keys.transpose(-1, -2)).to(wide)
    if row.hidden is not None:
        shape = scores.shape
        per_head = scores.view(shape[0], heads, -1, shape[-1])
        per_head.masked_fill_(row.hidden, float("-inf"))
    return torch.softmax(scores, -1)
