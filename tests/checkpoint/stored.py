"""What the tests of the store save, cut and spoil."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.store import Piece, Store

MODEL = {"hidden": 64, "rope": {"base": 10000.0}, "layers": [1, 2]}
META = {"model": MODEL, "seed": 7, "data": {"position": 12}, "optimizer": "adamw"}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.w": torch.randn(6, 5, generator=generator),
        "model.b": torch.randn(7, generator=generator).bfloat16(),
        "optimizer.count": torch.tensor(seed),
    }


def split(tensor: torch.Tensor, dim: int, parts: int) -> list[Piece]:
    """Pieces as ``torch.chunk`` cuts them: the last ones may be smaller or missing."""
    pieces, start = [], 0
    for chunk in tensor.chunk(parts, dim):
        offset = [0] * tensor.dim()
        offset[dim] = start
        start += chunk.shape[dim]
        pieces.append(Piece(chunk, tuple(tensor.shape), tuple(offset)))
    return pieces


def save_on_ranks(
    store: Store, step: int, per_rank: list[dict[str, Any]], meta: dict[str, Any] | None = None
) -> list[Exception | None]:
    """Save from one thread a rank; the outcome of each."""
    world = len(per_rank)
    meeting = threading.Barrier(world)
    outcomes: list[Exception | None] = [None] * world

    def run(rank: int) -> None:
        try:
            store.save(
                step,
                per_rank[rank],
                META if meta is None else meta,
                rank=rank,
                world=world,
                barrier=lambda: (meeting.wait(30), None)[1],
            )
        except Exception as cause:
            outcomes[rank] = cause

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes


def flip(path: Path, position: int, mask: int = 1) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= mask
    path.write_bytes(raw)


class ThreadPeers:
    """Ranks that are threads.

    Args:
        rank: number of this one.
        shared: what :func:`thread_peers` makes for all.
    """

    def __init__(self, rank: int, shared: tuple[threading.Barrier, list[bytes]]) -> None:
        self.rank = rank
        self.world = len(shared[1])
        self._meeting, self._said = shared

    def barrier(self) -> None:
        self._meeting.wait(30)

    def gather(self, data: bytes) -> list[bytes]:
        self._said[self.rank] = data
        self._meeting.wait(30)
        result = list(self._said)
        self._meeting.wait(30)
        return result

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        rows = [
            json.loads(one) for one in self.gather(json.dumps([*map(bytes.hex, messages)]).encode())
        ]
        return [bytes.fromhex(row[self.rank]) for row in rows]


def on_ranks(world: int, work: Callable[[ThreadPeers], Any]) -> list[Any]:
    """What ``work`` returned or raised on each of some ranks that are threads."""
    shared = threading.Barrier(world), [b""] * world
    outcomes: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(ThreadPeers(rank, shared))
        except Exception as cause:
            outcomes[rank] = cause
            shared[0].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return outcomes
