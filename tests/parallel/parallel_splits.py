"""Models, jobs and splits that the tests of equality share."""

from __future__ import annotations

import itertools
from typing import Any

from shoal.ir import TrainJob
from shoal.model.config import ModelConfig

AXES = ("dp", "tp", "pp", "cp")

# Splits of four ranks: every pair of axes above one, every schedule, sharding and kind of
# context parallelism, sequence parallelism, both ways to share the vocabulary.
FOUR: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"dp": 4}, {"shard": "zero1"}),
    ({"dp": 4}, {"shard": "zero3"}),
    ({"dp": 4}, {"shard": {"name": "hybrid", "within": 2}}),
    ({"tp": 4, "sp": True}, {}),
    ({"pp": 4}, {}),
    ({"cp": 4}, {}),
    ({"dp": 2, "tp": 2}, {"shard": "zero2"}),
    ({"dp": 2, "pp": 2, "schedule": "gpipe"}, {"recompute": "stage"}),
    ({"dp": 2, "cp": 2, "context": "ring"}, {"shard": "zero3"}),
    ({"tp": 2, "pp": 2, "vpp": 2, "schedule": "interleaved", "sp": True}, {}),
    ({"tp": 2, "cp": 2, "sp": True}, {"recompute": "full"}),
    ({"pp": 2, "cp": 2, "schedule": "zb_h1"}, {}),
    ({"pp": 4, "vocab": "pp"}, {}),
    ({"pp": 2, "vpp": 2, "tp": 2, "schedule": "vhalf", "vocab": "pp", "vocab_barriers": 2}, {}),
    ({"pp": 2, "vpp": 2, "dp": 2, "schedule": "zbv"}, {"shard": "zero1"}),
)


def config(**changes: Any) -> ModelConfig:
    """A model of eight layers that every split of up to eight ranks divides."""
    return ModelConfig(
        **{
            "family": "llama",
            "vocab_size": 53,
            "hidden": 24,
            "num_layers": 8,
            "num_heads": 16,
            "num_kv_heads": 8,
            "head_dim": 4,
            "ffn_hidden": 32,
            "max_position": 64,
            **changes,
        }
    )


def job(parallel: dict[str, Any], **changes: Any) -> TrainJob:
    """Small steps whose gradients are clipped, so that the global norm matters."""
    return TrainJob(
        **{
            "model": "shoal-0.3m",
            "seq_len": 16,
            "global_batch": 8,
            "microbatch": 2,
            "precision": "fp32",
            "parallel": parallel,
            "grad_clip": 0.05,
            "steps": 3,
            **changes,
        }
    )


def pairs(splits: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Pairs of axes that are both above one in some split."""
    return {
        pair
        for split in splits
        for pair in itertools.combinations(AXES, 2)
        if all(split.get(axis, 1) > 1 for axis in pair)
    }
