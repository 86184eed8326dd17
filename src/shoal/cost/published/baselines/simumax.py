"""A model in the style of SimuMax: each kind of operator at the efficiency of a table.

Source: SimuMax, a static analytical model for LLM distributed training, 2025: system files
name, for each kind of operator, a share of the peak (matmul, grouped matmul, attention
forward and backward), of the memory's rate, and of a link's rate with a latency; nothing of
tensor or expert parallelism overlaps. The shares are those of its fall-back entries.
"""

from __future__ import annotations

from shoal.cost.gpu.device import Accelerator
from shoal.cost.published.baselines.counts import counts, link
from shoal.cost.published.runs import PublishedRun

MATMUL, GROUPED, FORWARD, BACKWARD = 0.75, 0.50, 0.60, 0.55
MEMORY, LINK, LATENCY_S = 0.666, 0.70, 25e-6


def seconds(run: PublishedRun, gpu: Accelerator) -> float:
    """Seconds of one step."""
    c = counts(run)
    shape = run.shape
    low = run.precision not in ("bf16", "fp16", "fp32")
    peak = dict(gpu.peak)["bf16"]
    quick = peak * (2.0 if low and "fp8" in dict(gpu.matmul) else 1.0)
    matmul = MATMUL * (1 - c.sparse) + GROUPED * c.sparse
    linear = c.linear / (matmul * quick)
    causal = 0.5 if run.engine.attention != "plain" else 1.0
    ahead = causal * c.attention / (FORWARD * peak)
    behind = causal * 2.5 * c.attention / (BACKWARD * peak)
    met = shape.top_k + shape.num_shared_experts if c.sparse else 0
    width = shape.expert_hidden * met if c.sparse else shape.ffn_hidden
    moved = 2.0 * c.tokens * (10.0 * shape.hidden + 3.0 * width + 4.0 * met * shape.hidden)
    vector = c.layers * moved / run.tp / (MEMORY * gpu.stream)
    size = 2.0 * c.tokens * shape.hidden
    wire = 0.0
    if run.tp > 1:
        once = 2 * size * (run.tp - 1) / run.tp / (LINK * link(gpu, run.tp, 1)) + 2 * LATENCY_S
        wire += 2 * once * c.layers
    if run.ep > 1:
        sent = size / run.tp * shape.top_k * (run.ep - 1) / run.ep
        wire += 2 * c.layers * c.sparse * (sent / (LINK * link(gpu, run.ep, 1)) + LATENCY_S)
    forward = linear + ahead + vector + wire
    backward = (1.0 if run.tuned == "lora" else 2.0) * linear + behind + 1.5 * vector + wire
    backward += c.again * forward
    each = forward + backward
    ranks = run.dp * run.cp
    rate = LINK * link(gpu, ranks, run.tp)
    traffic = 6.0 * c.weights * (ranks - 1) / ranks / rate if run.tuned == "all" else 0.0
    data = c.passes * max(0.0, traffic - each) if run.zero == 3 else traffic
    update = 30.0 * c.weights / (ranks if run.zero else 1) / (MEMORY * gpu.stream)
    return c.passes * each + (run.pp - 1) / run.vpp * each + data + update
