"""Both kernels of a block agree; blocks merge to the whole; large masked blocks are cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import shoal.parallel.context.pieces as module
import shoal.parallel.context.run.block as block
from shoal.ir.mask import Mask
from shoal.parallel.context.pieces import AttentionPiece, block_pieces
from shoal.parallel.context.run.block import (
    AttentionTotal,
    backward_block,
    flash_backward,
    flash_forward,
    plain_backward,
    plain_forward,
    row_sums,
)

ALL = slice(None)
CELLS = np.random.default_rng(0).random((12, 20)) < 0.4
CELLS[3] = False  # a query that sees nothing


@pytest.mark.parametrize("scores", [2**26, 2 * 4 * 20 * 5, 1])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("form", ["all", "cells", "causal"])
def test_the_kernels_agree(
    form: str, kv_heads: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "_MAX_SCORES", scores)
    rng = torch.Generator().manual_seed(1)
    keys = 12 if form == "causal" else 20
    q, grad = torch.randn(2, 2, 4, 12, 8, generator=rng, dtype=torch.float64)
    k, v = torch.randn(2, 2, kv_heads, keys, 8, generator=rng, dtype=torch.float64)
    piece = AttentionPiece(
        ALL, ALL, ALL, CELLS if form == "cells" else None, causal=form == "causal"
    )
    tiled, plain = flash_forward(q, k, v, piece), plain_forward(q, k, v, piece)
    for got, expected in zip(tiled, plain, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    out, lse = plain
    if form == "cells":
        assert bool((lse[:, :, 3] == -math.inf).all())
        assert bool((out[:, :, 3] == 0).all())
    grad[0, 0, 0] = 0  # no channel of this gradient can carry its row sum
    delta = row_sums(grad, out)
    for got, expected in zip(
        flash_backward(grad, q, k, v, lse, delta, piece),
        plain_backward(grad, q, k, v, lse, delta, piece),
        strict=True,
    ):
        assert bool(torch.isfinite(got).all())
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_blocks_merge_to_the_whole() -> None:
    rng = torch.Generator().manual_seed(2)
    q, k, v = torch.randn(3, 1, 2, 16, 8, generator=rng, dtype=torch.float64)
    whole, parts = AttentionTotal(q), AttentionTotal(q)
    masks, places = [Mask.sliding(16, 4)], np.arange(16)
    whole.attend(k, v, block_pieces(masks, 1, places, places))
    for start in (8, 0, 12, 4):
        keys = slice(start, start + 4)
        pieces = block_pieces(masks, 1, places, places[keys])
        parts.attend(k[:, :, keys], v[:, :, keys], pieces)
    torch.testing.assert_close(parts.out, whole.out, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(parts.lse, whole.lse, rtol=1e-13, atol=1e-13)


def test_pieces_are_trimmed_to_what_is_seen() -> None:
    mask, places = Mask.causal(16), np.arange(16)
    assert block_pieces([mask], 2, places[:4], places[8:]) == ()
    (early,) = block_pieces([mask], 2, places[8:], places[:4])
    assert early == AttentionPiece(slice(0, 2), slice(0, 8), slice(0, 4))
    (diagonal,) = block_pieces([mask], 2, places[4:8], places[4:8])
    assert diagonal.causal
    assert diagonal.cells is None
    # A zigzag rank's late chunk sees all of a later rank's early one, and nothing else does.
    (late,) = block_pieces([mask], 1, places[[0, 1, 14, 15]], places[[2, 3, 12, 13]])
    assert late == AttentionPiece(slice(0, 1), slice(2, 4), slice(0, 4))
    rows = block_pieces([mask, Mask.full(16)], 2, places[:4], places[8:])
    assert rows == (AttentionPiece(slice(1, 2), slice(0, 4), slice(0, 8)),)


def test_large_masked_blocks_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_CELLS", 64)
    rng = torch.Generator().manual_seed(4)
    q, k, v, grad = torch.randn(4, 1, 2, 32, 4, generator=rng, dtype=torch.float64)
    mask, places = Mask.sliding(32, 7, causal=False), np.arange(32)
    pieces = block_pieces([mask], 1, places, places)
    assert len(pieces) > 4
    seen = np.zeros((32, 32), dtype=bool)
    for piece in pieces:
        assert not seen[piece.q, piece.k].any()
        seen[piece.q, piece.k] = True if piece.cells is None else piece.cells
    assert np.array_equal(seen, mask.dense())
    total, one = AttentionTotal(q), AttentionTotal(q)
    total.attend(k, v, pieces)
    whole = (AttentionPiece(ALL, ALL, ALL, mask.dense()),)
    one.attend(k, v, whole)
    torch.testing.assert_close(total.out, one.out, rtol=1e-13, atol=1e-13)
    sums = []
    for some in (pieces, whole):
        q_grad, kv_grad = torch.zeros_like(q), torch.zeros(2, *k.shape, dtype=k.dtype)
        delta = row_sums(grad, one.out)
        kv = torch.stack([k, v])
        backward_block(grad, q, kv, one.lse, delta, some, q_grad, kv_grad)
        sums.append((q_grad, kv_grad))
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-12, atol=1e-12)
