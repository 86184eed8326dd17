"""The closed formulas of Megatron-LM for GPT models: size, work, days, traffic, bubble.

They describe the paper's own model (biases, learned positions, tied embedding, ungated
feed-forward of 4h) with every block recomputed. For any other shape :mod:`shoal.cost.arithmetic`
counts and :mod:`shoal.cost.training.step` prices.

Legend: l blocks, h hidden, V vocabulary, s tokens of a sequence, B sequences of a batch, b of a
micro-batch, n devices, t tensor-, p pipeline-, d data-parallel ranks, v stages of a rank, m
micro-batches.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM, 2021, sections 2.2, 3 and 5; Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models, 2022 (activations of a block).
"""

from __future__ import annotations

from shoal.core.errors import PlanError, require

_SECONDS_A_DAY = 86400.0


def parameters(num_layers: int, hidden: int, vocab_size: int, seq_len: int) -> float:
    """Parameters: ``12 l h^2 (1 + 13 / 12h + (V + s) / 12lh)``."""
    rest = 13 / (12 * hidden) + (vocab_size + seq_len) / (12 * num_layers * hidden)
    return 12 * num_layers * hidden**2 * (1 + rest)


def training_days(parameters: float, tokens: float, devices: int, flops_per_device: float) -> float:
    """Days of a training, every block recomputed: ``8 T P / (n X)``.

    Args:
        parameters: P.
        tokens: T.
        devices: n.
        flops_per_device: X, achieved FLOP/s of one device.
    """
    require(devices >= 1, "devices", devices, expected="at least 1", error=PlanError)
    require(
        flops_per_device > 0,
        "flops_per_device",
        flops_per_device,
        expected="FLOP/s above 0",
        error=PlanError,
    )
    return 8.0 * tokens * parameters / (devices * flops_per_device) / _SECONDS_A_DAY


def bubble(pp: int, microbatches: int, vpp: int = 1) -> float:
    """Idle time of a pipeline as a share of its ideal time: ``(p - 1) / (v m)``."""
    _positive(pp=pp, microbatches=microbatches, vpp=vpp)
    return (pp - 1) / (vpp * microbatches)


def boundary_bytes(
    microbatch: int,
    seq_len: int,
    hidden: int,
    *,
    tp: int = 1,
    vpp: int = 1,
    scatter_gather: bool = False,
    width: float = 2.0,
) -> float:
    """Bytes a device sends to the next stage for one micro-batch, forward: ``b s h`` elements.

    With ``vpp`` stages a rank the boundary is crossed so many times as often; with
    ``scatter_gather`` every tensor rank sends its own 1 / t, and the receivers gather the rest
    inside their node.
    """
    _positive(tp=tp, vpp=vpp)
    return width * vpp * microbatch * seq_len * hidden / (tp if scatter_gather else 1)


def checkpoints(layers: int, input_bytes: float, between_bytes: float) -> tuple[int, float]:
    """How many inputs a stage of ``layers`` blocks should keep, and the bytes it then holds.

    c inputs and the inside of l / c blocks take ``c A_in + (l / c) A_between``, least at
    ``c = sqrt(l A_between / A_in)``; here c is the best divisor of l.
    """
    _positive(layers=layers)
    require(
        input_bytes > 0 and between_bytes >= 0,
        "bytes of a block",
        (input_bytes, between_bytes),
        expected="an input above 0 and the rest at least 0",
        error=PlanError,
    )
    numbers = [c for c in range(1, layers + 1) if layers % c == 0]
    held = {c: c * input_bytes + (layers // c) * between_bytes for c in numbers}
    best = min(numbers, key=lambda c: held[c])
    return best, held[best]


def _positive(**given: int) -> None:
    for name, value in given.items():
        require(value >= 1, name, value, expected="at least 1", error=PlanError)
