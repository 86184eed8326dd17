"""What the claims about ragged lengths share: real lengths of documents, and a model of 7 B."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from shoal.cost.sequences import SequenceCost

if TYPE_CHECKING:
    from shoal.ir import ModelShape

__all__ = ["cost_of", "gradient_s", "lengths", "wide"]


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
