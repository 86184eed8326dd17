"""Names under which trainers draw their curves, in TensorBoard and in W&B."""

from __future__ import annotations

from shoal.cost.imports.log import GIB

# Name of a curve in small letters -> quantity and the factor to plain units.
NAMES = {
    # torchtitan
    "throughput(tps)": ("device_tokens_per_s", 1.0),
    "tflops": ("device_flops", 1e12),
    "mfu(%)": ("mfu", 0.01),
    "time_metrics/end_to_end(s)": ("step_s", 1.0),
    "memory/max_reserved(gib)": ("memory_bytes", float(GIB)),
    "loss_metrics/global_avg_loss": ("loss", 1.0),
    # Megatron-LM and its descendants
    "iteration-time": ("step_s", 1.0),
    "iteration_time": ("step_s", 1.0),
    "throughput": ("device_flops", 1e12),
    "mem-max-reserved-bytes": ("memory_bytes", 1.0),
    "mem-max-allocated-bytes": ("memory_bytes", 1.0),
    "lm loss": ("loss", 1.0),
    # Hugging Face trainers
    "train/loss": ("loss", 1.0),
    "train/tokens_per_second": ("tokens_per_s", 1.0),
    "train/train_tokens_per_second": ("tokens_per_s", 1.0),
    "train/train_samples_per_second": ("samples_per_s", 1.0),
    # DeepSpeed's monitor
    "train/samples/train_loss": ("loss", 1.0),
    # Shoal's own
    "step/step_s": ("step_s", 1.0),
    "step/tokens_per_s": ("tokens_per_s", 1.0),
    "step/mfu": ("mfu", 1.0),
    "step/memory_bytes": ("memory_bytes", 1.0),
    "step/loss": ("loss", 1.0),
    # what people write by hand
    "loss": ("loss", 1.0),
    "train_loss": ("loss", 1.0),
    "step_time": ("step_s", 1.0),
    "train/step_time": ("step_s", 1.0),
    "step_s": ("step_s", 1.0),
    "tokens_per_s": ("tokens_per_s", 1.0),
    "tokens_per_sec": ("tokens_per_s", 1.0),
    "tokens/sec": ("tokens_per_s", 1.0),
    "samples/sec": ("samples_per_s", 1.0),
    "mfu": ("mfu", 1.0),
}


def known(name: str) -> tuple[str, float] | None:
    """(quantity, factor) of a curve; None for one that is about something else."""
    return NAMES.get(name.strip().lower())
