"""A model in the style of llm-analysis: all FLOP at one efficiency, traffic beside it.

Source: Li, LLM-Analysis: Latency and Memory Analysis of Transformer Models for Training and
Inference, 2023: latency of a block is its FLOP over peak x efficiency, plus all-reduces of
tensor parallelism; gathering of sharded weights overlaps with computing. Its examples set
the efficiency of FLOP to 0.5 and that of links to 0.6.
"""

from __future__ import annotations

from shoal.cost.gpu.device import Accelerator
from shoal.cost.published.baselines.counts import counts, link
from shoal.cost.published.runs import PublishedRun

FLOPS, LINK, MEMORY = 0.5, 0.6, 0.9


def seconds(run: PublishedRun, gpu: Accelerator) -> float:
    """Seconds of one step."""
    c = counts(run)
    low = run.precision not in ("bf16", "fp16", "fp32")
    peak = dict(gpu.peak)["bf16"] * (2.0 if low and "fp8" in dict(gpu.matmul) else 1.0)
    factor = (2.0 if run.tuned == "lora" else 3.0) + c.again
    busy = factor * (c.linear + c.attention) / (FLOPS * peak)
    size = 2.0 * c.tokens * run.shape.hidden
    reduces = 4 + 2 * c.again
    tensor = 0.0
    if run.tp > 1:
        tensor = c.layers * reduces * 2 * size * (run.tp - 1) / run.tp
        tensor /= LINK * link(gpu, run.tp, 1)
    ranks = run.dp * run.cp
    rate = LINK * link(gpu, ranks, run.tp)
    gathers = (2.0 + 2.0 + 2.0) if run.zero == 3 else 0.0
    each = max(busy, gathers * c.weights * (ranks - 1) / ranks / rate) + tensor
    reduce = 0.0 if run.zero == 3 or ranks == 1 else 4.0 * c.weights / rate
    bubble = (run.pp - 1) / run.vpp * each
    update = 30.0 * c.weights / (ranks if run.zero else 1) / (MEMORY * gpu.stream)
    return c.passes * each + bubble + max(0.0, reduce - busy) + update
