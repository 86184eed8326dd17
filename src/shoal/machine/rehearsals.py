"""The training steps that the probe of this machine has run, from which others are predicted.

One small model under one split after another: what a step takes beyond its operators alone
(ranks that wait for each other, copies of gathered weights, caches that ranks of one core take
from each other) is measured here once, and :mod:`shoal.cost.price.rehearsed` carries it over to
other models, batches and splits.
"""

from __future__ import annotations

from shoal.ir import ModelShape, TrainJob

REHEARSED = ModelShape(
    name="rehearsal",
    num_layers=4,
    hidden=320,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
    ffn_hidden=832,
    vocab_size=3072,
    max_position=1024,
    gated=True,
    tied=True,
    qk_norm=True,
)
"""The model of every rehearsal."""

_ASKED = {"model": "rehearsal", "seq_len": 192, "global_batch": 8, "steps": 1, "precision": "fp32"}


def _job(microbatch: int, **stated: object) -> TrainJob:
    return TrainJob.model_validate({**_ASKED, "microbatch": microbatch, **stated})


REHEARSALS: dict[str, TrainJob] = {
    "one": _job(4),
    "one bf16": _job(4, precision="bf16"),
    "dp2": _job(4, parallel={"dp": 2}),
    "dp2 bf16": _job(4, parallel={"dp": 2}, precision="bf16"),
    "zero3": _job(2, parallel={"dp": 2}, shard="zero3"),
    "tp2": _job(4, parallel={"tp": 2}),
    "sp2": _job(4, parallel={"tp": 2, "sp": True}),
    "cp2": _job(4, parallel={"cp": 2}),
    "pp2": _job(1, parallel={"pp": 2}),
    "dp4": _job(2, parallel={"dp": 4}),
    "tp2 of 4": _job(2, parallel={"dp": 2, "tp": 2}),
    "tp4": _job(4, parallel={"tp": 4}),
    "cp2 of 4": _job(2, parallel={"dp": 2, "cp": 2}),
    "pp2 of 4": _job(1, parallel={"dp": 2, "pp": 2}),
    "pp4": _job(1, parallel={"pp": 4}),
}
"""Name -> job; the names stand in the notes of a machine's measurements."""
