"""A model in the style of Calculon: each operator by a table of efficiency over its size.

Source: Isaev et al., Calculon: a Methodology and Tool for High-Level Codesign of Systems and
Large Language Models, SC 2023: matrix FLOP at an efficiency that grows with the product's
size, vector operators by memory, tensor parallelism's traffic exposed, data parallelism's
hidden behind the backward pass, the interleaved bubble.
"""

from __future__ import annotations

from shoal.cost.gpu.device import Accelerator
from shoal.cost.published.baselines.counts import counts, link
from shoal.cost.published.runs import PublishedRun

# GFLOP of a product -> share of the peak; MB of an operator -> share of the memory's rate.
MATRIX = ((128.0, 0.85), (16.0, 0.80), (4.0, 0.70), (1.0, 0.50), (0.0, 0.30))
MEMORY = ((100.0, 0.90), (10.0, 0.80), (1.0, 0.60), (0.0, 0.40))
NEAR, FAR = 0.65, 0.90


def _share(table: tuple[tuple[float, float], ...], size: float) -> float:
    return next(share for least, share in table if size >= least)


def seconds(run: PublishedRun, gpu: Accelerator) -> float:
    """Seconds of one step."""
    c = counts(run)
    shape = run.shape
    low = run.precision not in ("bf16", "fp16", "fp32")
    peak = dict(gpu.peak)["bf16"]
    quick = peak * (2.0 if low and "fp8" in dict(gpu.matmul) else 1.0)
    one = c.linear / max(1.0, 4 * c.layers)
    linear = c.linear / (_share(MATRIX, one / 1e9) * quick)
    core = c.attention / (_share(MATRIX, c.attention / max(1.0, 2 * c.layers) / 1e9) * peak)
    # Norms, residuals, activations: some 20 widths of the residual stream for each token.
    moved = 2.0 * 20.0 * c.tokens * shape.hidden / run.tp
    if run.engine.attention == "plain":
        moved += 10.0 * shape.num_heads * run.micro_batch * run.seq_len**2 / run.tp
    vector = c.layers * moved / (_share(MEMORY, moved / 1e6) * gpu.stream)
    size = 2.0 * c.tokens * shape.hidden
    tensor = 0.0
    if run.tp > 1:
        eff = NEAR if run.tp <= gpu.domain else FAR
        tensor = c.layers * 2 * 2 * size * (run.tp - 1) / run.tp / (eff * link(gpu, run.tp, 1))
    forward = linear + core + vector + tensor
    backward = (1.0 if run.tuned == "lora" else 2.0) * (linear + core) + 2 * vector + tensor
    backward += c.again * forward
    each = forward + backward
    ranks = run.dp * run.cp
    eff = NEAR if ranks * run.tp <= gpu.domain else FAR
    traffic = (6.0 * c.passes if run.zero == 3 else 4.0) * c.weights * (ranks - 1) / ranks
    data = traffic / (eff * link(gpu, ranks, run.tp)) if run.tuned == "all" else 0.0
    hidden = (c.passes if run.zero == 3 else 1.0) * backward
    update = 30.0 * c.weights / (ranks if run.zero else 1) / (0.9 * gpu.stream)
    bubble = (run.pp - 1) / run.vpp * each
    return c.passes * each + bubble + max(0.0, data - hidden) + update
