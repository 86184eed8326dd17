"""Small models and jobs that claims run; needs no torch."""

from __future__ import annotations

from typing import Any

from shoal.ir import TrainJob
from shoal.model.config import ModelConfig

__all__ = ["apart", "llama", "mixture", "train_job"]


def llama(
    hidden: int,
    layers: int,
    heads: int,
    *,
    kv_heads: int = 0,
    vocab: int = 256,
    ffn: int = 0,
    length: int = 256,
    **changes: Any,
) -> ModelConfig:
    """A small decoder.

    Args:
        hidden: width.
        layers: blocks.
        heads: query heads; as wide as the hidden state together, if ``head_dim`` says nothing else.
        kv_heads: key/value heads; one a query head if not given.
        vocab: size of the vocabulary.
        ffn: width of the feed-forward layers; three times the hidden one if not given.
        length: longest context.
        changes: other fields.
    """
    fields: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads or heads,
        "head_dim": hidden // heads,
        "ffn_hidden": ffn or 3 * hidden,
        "max_position": length,
    }
    return ModelConfig(**(fields | changes))


def mixture(hidden: int, layers: int, experts: int, width: int) -> ModelConfig:
    """A small mixture of experts of this width, two of which serve a token."""
    return llama(
        hidden, layers, 4, vocab=64, ffn=width, length=64, name="mixture", family="mixtral",
        head_dim=8, num_experts=experts, top_k=2,
    )  # fmt: skip


def train_job(**fields: Any) -> TrainJob:
    """A job in fp32; its model is only a name, for the configuration comes beside it."""
    return TrainJob.model_validate({"model": "shoal-0.3m", "precision": "fp32", **fields})


def apart(split: dict[str, Any], config: ModelConfig, *, steps: int = 1) -> float:
    """Largest relative difference of training with this split to one process, in float64."""
    from shoal.claims.lab.same_as_one import same_as_one

    job = train_job(
        seq_len=16, global_batch=4, microbatch=1, parallel=split, grad_clip=0.05, steps=1
    )
    return same_as_one(job, config, steps=steps).largest
