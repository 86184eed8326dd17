"""Bytes of one accelerator while it trains, coarse: what decides whether a run fits."""

from __future__ import annotations

import math

from shoal.cost.arithmetic import mixture_layers
from shoal.cost.gpu.spec import block_weights
from shoal.cost.published.runs import PublishedRun


def memory_bytes(run: PublishedRun) -> float:
    """Weights, gradients, states and the activations of the first stage."""
    shape = run.shape
    sparse = mixture_layers(shape)
    dense, rest, experts = block_weights(shape)
    layers = math.ceil(shape.num_layers / run.pp)
    share = layers / shape.num_layers
    common = ((shape.num_layers - sparse) * dense + sparse * rest) * share
    common = (common + shape.vocab_size * shape.hidden * (1 if run.pp > 1 else 2)) / run.tp
    local = common + sparse * experts * share / run.ep
    ranks = run.dp * run.cp
    if run.tuned == "lora":
        states = 2.0 * local / (ranks if run.zero == 3 else 1)
    elif run.zero == 3:
        states = 18.0 * local / ranks + 4.0 * local / layers
    elif run.zero >= 1:
        states = 6.0 * local + 12.0 * local / ranks
    else:
        states = 18.0 * local
    n = run.micro_batch * run.seq_len / run.cp
    D, F = shape.hidden, shape.ffn_hidden if not sparse else shape.expert_hidden * shape.top_k
    if run.recompute == "full":
        each = 2.0 * n * D / (run.tp if run.sp else 1)
        kept = layers * each + 34.0 * n * D / run.tp
    else:
        whole = 10.0 * n * D / (run.tp if run.sp else 1)
        inner = (2.0 * n * (4 * D) + 2.0 * n * F * (4 if shape.gated else 2)) / run.tp
        plain = 5.0 * shape.num_heads * run.micro_batch * run.seq_len**2 / run.tp
        if run.engine.attention != "plain" or run.recompute == "selective":
            plain = 0.0
        kept = layers * (whole + inner + plain)
    flight = min(run.passes, run.pp) if run.pp > 1 else 1.0
    if run.vpp > 1:
        flight *= 1 + (run.pp - 1) / (run.pp * run.vpp)
    logits = 8.0 * n * shape.vocab_size / run.tp if run.pp == 1 else 0.0
    return states + kept * flight + logits + 2e9
