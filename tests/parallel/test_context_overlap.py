"""Chunks travel while blocks are computed: proved on links and clocks that are virtual."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.claims.lab.thread_links import LinkComm, Links, run_linked
from shoal.core.parts import table
from shoal.ir.mask import Mask
from shoal.parallel.context.run.block import AttentionTotal, backward_block

WORLD, LENGTH, HEADS, DIM = 4, 32, 2, 8
CHUNK = 4 * LENGTH // WORLD * HEADS * DIM  # bytes of the queries of a rank in fp32
HERE = threading.local()


def _times(
    part: str, seconds: float, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    """Virtual seconds forward and backward if a block takes ``seconds``, a chunk one second."""

    def attend(self: AttentionTotal, k: Tensor, v: Tensor, pieces: Any) -> None:
        HERE.comm.compute(seconds)

    def backward(*args: Any) -> None:
        HERE.comm.compute(seconds)
        backward_block(*args)

    monkeypatch.setattr(AttentionTotal, "attend", attend)
    for module in ("ring", "tokenring", "all_gather"):
        name = f"shoal.parallel.context.run.{module}.backward_block"
        monkeypatch.setattr(name, backward)

    def rank(comm: LinkComm) -> tuple[float, float]:
        HERE.comm = comm
        q, k, v = (
            torch.zeros(1, HEADS, LENGTH // WORLD, DIM, dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        out = table("context").build(part).attend(q, k, v, [Mask.full(LENGTH)], comm)
        half = comm.now
        torch.autograd.backward(out, torch.zeros_like(out))
        return half, comm.now - half

    links = Links(latency_s=0.0, bandwidth=float(CHUNK))
    result = run_linked(WORLD, rank, links)
    return max(a for a, _ in result), max(b for _, b in result)


def test_a_ring_hides_what_computation_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = _times("zigzag", 5.0, monkeypatch)
    # Keys and values take 2 s a hop, their gradients 2 s more on the same links; of these
    # the last hop home comes after the last block.
    assert forward == pytest.approx(WORLD * 5.0)
    assert backward == pytest.approx(WORLD * 5.0 + 2.0)


def test_a_gather_hides_behind_the_own_block(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = _times("all_gather", 7.0, monkeypatch)
    assert forward == pytest.approx(WORLD * 7.0)
    assert backward == pytest.approx(WORLD * 7.0 + 6.0)  # and the reduce-scatter at the end


def test_tokenring_hides_all_but_the_last_return(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = _times("tokenring", 5.0, monkeypatch)
    statistics = 1 / DIM
    assert forward == pytest.approx(WORLD * 5.0 + 1 + statistics)
    assert backward == pytest.approx(WORLD * 5.0 + 1)


def test_tokenring_is_ahead_where_links_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, token = (sum(_times(part, 0.0, monkeypatch)) for part in ("zigzag", "tokenring"))
    assert ring / token >= 1.45  # statistics are an eighth of so narrow heads
    narrow = [sum(_times(p, 0.0, monkeypatch, torch.bfloat16)) for p in ("zigzag", "tokenring")]
    assert narrow[0] / narrow[1] >= 1.6
