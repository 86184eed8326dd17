"""What the claims about ragged lengths share: real lengths of documents, and a model of 7 B."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from shoal.claims.ranks import on_ranks, slowest
from shoal.cost.training.sequences import SequenceCost

if TYPE_CHECKING:
    from shoal.claims.frame import ClaimRun
    from shoal.ir import ModelShape

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


def race_ranks(
    run: ClaimRun,
    chosen: np.ndarray,
    longest: int,
    turns: int,
    exchange: Literal["ring", "ulysses"],
    ours: Mapping[str, Any],
) -> None:
    """Steps of two real processes, in turn: ours, packed rows, and sequences one by one.

    ``real_ranks`` compares ours with the faster baseline; the A/A run has each a second time.
    """
    scaled = np.maximum(1, np.rint(chosen * (longest / chosen.max()))).astype(np.int64)
    packed = {"name": "packed", "capacity_tokens": longest // 2, "cp": 2, "exchange": exchange}
    baselines = {"packed": packed, "one by one": {"name": "alone", "exchange": exchange}}
    again = {f"{name} again": choice for name, choice in baselines.items()}
    assigners = baselines | run.pick({ours["name"]: dict(ours)}, again)
    ranks = on_ranks(
        f"{_RANKS}:time_plans", 2, timeout_s=600.0, lengths=scaled.tolist(), assigners=assigners,
        turns=turns, flops_per_s=5e10,
    )  # fmt: skip
    timed = {name: slowest(ranks, name) for name in assigners}
    middle = {name: statistics.median(seconds) for name, seconds in timed.items()}
    faster = min(baselines, key=lambda name: middle[name])
    run.put("real_ranks", timed[run.pick(ours["name"], f"{faster} again")], timed[faster])
    run.profile = ", ".join(f"{name} {1e3 * s:.0f} ms" for name, s in middle.items())
