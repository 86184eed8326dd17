"""What the claims about ragged lengths share: real lengths of documents, and a model of 7 B."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shoal.cost.training.sequences import SequenceCost

if TYPE_CHECKING:
    from shoal.ir import ModelShape

__all__ = ["cost_of", "gradient_s", "lengths", "raced", "wide"]

_RANKS = "shoal.claims.experiments.ragged_ranks"


@functools.cache
def lengths() -> np.ndarray:
    """Bytes of every file of the standard library that is not empty, int64 [files]."""
    from shoal.corpora.stdlib import Stdlib

    sizes = [len(document.text.encode()) for document in Stdlib().documents()]
    return np.array([size for size in sizes if size], dtype=np.int64)


def wide(kv_heads: int = 32) -> ModelShape:
    """A model of 32 layers, 4096 wide."""
    from shoal.ir import ModelShape

    return ModelShape(
        name=f"7B with {kv_heads} key/value heads",
        num_layers=32,
        hidden=4096,
        num_heads=32,
        num_kv_heads=kv_heads,
        head_dim=128,
        ffn_hidden=11008,
        vocab_size=32000,
        max_position=2**17,
    )


def cost_of(
    kv_heads: int, flops_per_s: float, links: tuple[tuple[int, float], ...]
) -> SequenceCost:
    """Of :func:`wide` in bf16 on ranks of one rate."""
    return SequenceCost.of(wide(kv_heads), flops_per_s, links)


def gradient_s(kv_heads: int, ranks: int, bandwidth: float) -> float:
    """Seconds that a ring takes to sum the gradients in bf16, of which nothing is hidden."""
    from shoal.cost.arithmetic import parameters

    return 2 * 2.0 * parameters(wide(kv_heads)) * (ranks - 1) / ranks / bandwidth


def raced(
    chosen: np.ndarray,
    longest: int,
    turns: int,
    exchange: Literal["ring", "ulysses"],
    ours: Mapping[str, Any] | None,
) -> tuple[dict[str, tuple[float, ...]], str, str]:
    """Steps of two real processes, in turn: ours, packed rows, and sequences one by one.

    Args:
        chosen: lengths of documents, which are scaled.
        longest: tokens of the longest one.
        turns: of each.
        exchange: how both baselines share a sequence.
        ours: the assigner that is judged; None for the faster baseline against itself.

    Returns:
        Seconds of the slower rank, by name; the name of ours, and of the faster baseline.
    """
    from shoal.parallel.comm.processes import run_processes

    scaled = np.maximum(1, np.rint(chosen * (longest / chosen.max()))).astype(np.int64)
    packed = {"name": "packed", "capacity_tokens": longest // 2, "cp": 2, "exchange": exchange}
    alone = {"name": "alone", "exchange": exchange}
    assigners: dict[str, Any] = {"packed": packed, "one by one": alone}
    if ours is None:
        assigners |= {"packed again": packed, "one by one again": alone}
    else:
        assigners[ours["name"]] = dict(ours)
    given = {
        "lengths": scaled.tolist(),
        "assigners": assigners,
        "turns": turns,
        "flops_per_s": 5e10,
    }
    ranks = run_processes(f"{_RANKS}:time_plans", 2, given, timeout_s=600.0)
    timed = {
        name: tuple(max(both) for both in zip(*(rank[name] for rank in ranks), strict=True))
        for name in assigners
    }
    faster = min(("packed", "one by one"), key=lambda name: statistics.median(timed[name]))
    return timed, f"{faster} again" if ours is None else ours["name"], faster
