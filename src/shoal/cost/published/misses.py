"""Why a prediction is off: what is known of the row that the model does not have."""

from __future__ import annotations

import re

from shoal.cost.arithmetic import mixture_layers
from shoal.cost.published.rows import TrainReplay

# Pattern of the row's id -> what is known.
_KNOWN = (
    (
        r"vocabpar-2k-v256k-baseline",
        "two numbers are published: 17.3 % in its README, 25.9 % in its table",
    ),
    (
        r"nanotron-80b-4n",
        "far below the same model on 8 nodes; its memory is nearly full",
    ),
    (
        r"nanotron-.*-64n",
        "from 32 to 64 nodes the source's speed about halves in every cell",
    ),
    (
        r"torchtitan-(8b-8|405b-512)-cp[248]",
        "ring attention of that release did not balance the causal mask",
    ),
    (r"fp8rowwise", "row-wise scaling ran outside compiled kernels in that release"),
    (
        r"llama2|lora-gb200-(72|144|512)",
        "few milliseconds a step and device: fixed costs of the engine",
    ),
    (
        r"deepspeed-azure-(1000|2000)b",
        "weights of one block are gathered over 1024 GPUs; the batch was recalled",
    ),
)


def reason_of(item: TrainReplay, error: float) -> str:
    """What may explain an error, in a clause."""
    row = item.row
    for pattern, text in _KNOWN:
        if re.search(pattern, row.id):
            return text
    if row.remembered:
        return "the value or its settings were recalled, not read"
    if mixture_layers(item.run.shape) and error > 0 and row.metric == "tokens_per_s_per_gpu":
        if not item.run.engine.fused_experts:
            return "host-bound experts of early releases: kernels launched expert by expert"
        return "recomputation and dispatcher of experts are not stated"
    if item.open:
        return f"not stated: {', '.join(sorted(item.open))}"
    if item.filled:
        return f"completed by rule: {item.filled[-1]}"
    return "unexplained"
