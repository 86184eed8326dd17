"""What a source would have reported for a step of so many seconds, by its own formula."""

from __future__ import annotations

from shoal.cost.arithmetic import attention_width, mixture_layers
from shoal.cost.gpu.spec import block_weights
from shoal.cost.published.rows import PublishedRow
from shoal.cost.published.runs import PublishedRun

# TFLOP/s of these count the recomputed forward pass (factor 8 or 96 instead of 6 or 72).
_RECOMPUTED = {"megatron-sc21", "bigscience", "deepspeed", "mt-nlg", "frontier", "opt"}


def model_flops(run: PublishedRun, *, square: bool = True) -> float:
    """FLOP of the forward pass of one token; ``square`` counts the keys after it too."""
    shape = run.shape
    dense, rest, experts = block_weights(shape)
    sparse = mixture_layers(shape)
    share = shape.top_k / shape.num_experts if sparse else 0.0
    weights = (shape.num_layers - sparse) * dense + sparse * (rest + share * experts)
    weights += shape.vocab_size * shape.hidden
    width = shape.num_heads * attention_width(shape)
    attention = 4.0 * shape.num_layers * width * run.seq_len * (1.0 if square else 0.5)
    return 2.0 * weights + attention


def reported(row: PublishedRow, run: PublishedRun, seconds: float, peak: float) -> float:
    """The quantity of a row for a step of ``seconds``."""
    tokens = float(run.global_batch * run.seq_len)
    if row.metric == "step_s":
        return seconds
    if row.metric == "tokens_per_s_per_gpu":
        return tokens / seconds / run.devices
    factor = 4.0 if row.metric == "hfu" else 3.0
    if row.metric == "tflops_per_gpu" and row.group in _RECOMPUTED:
        factor = 4.0
    rate = factor * model_flops(run) * tokens / seconds / run.devices
    if row.metric == "tflops_per_gpu":
        return rate / 1e12
    used = float(row.raw.get("peak_tflops_used") or 0) * 1e12 or peak
    return rate / used
