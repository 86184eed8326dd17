"""Seconds of a training step on accelerators: passes, pipeline, what ranks exchange, update.

Sources: Narayanan et al., 2021 (pipeline, interleaving); Korthikanti et al., 2022 (sequence
parallelism, selective recomputation); Rajbhandari et al., 2020, and Zhao et al., PyTorch
FSDP, 2023 (what is gathered when).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from shoal.cost.arithmetic import linears, mixture_layers
from shoal.cost.gpu.device import Accelerator, GpuCalibration
from shoal.cost.gpu.kernels import stream_s
from shoal.cost.gpu.layer import GpuPass, block, head
from shoal.cost.gpu.network import ring_s, send_s
from shoal.cost.gpu.spec import Run, latent_of
from shoal.ir import ModelShape

__all__ = ["GpuStep", "block_weights", "price"]

# Share of a pass behind which traffic of data-parallel ranks can hide.
HIDES = 0.85
# Kernels run so much longer while a collective takes units and memory from them.
CROWDED = 0.15
# What a step does once whatever its size: clip, schedule, log, fetch data.
ONCE_S = 5e-3


@dataclass(frozen=True)
class GpuStep:
    """What a step takes.

    Args:
        terms: cause -> seconds; their sum is the step.
        forward: one micro-batch's forward pass on the fullest stage.
        backward: its backward pass.
    """

    terms: dict[str, float]
    forward: GpuPass
    backward: GpuPass

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return sum(self.terms.values())


@functools.cache
def block_weights(shape: ModelShape) -> tuple[float, float, float]:
    """Weights of one dense block, of one sparse block without its experts, of its experts."""
    D = shape.hidden
    latent = latent_of(shape)
    by = {x.name: x.N * x.K * x.copies for x in linears(shape)}
    attention = by["qkv"] + by["attention_out"]
    if latent:
        H = shape.num_heads
        wide = latent.plain + latent.rotary
        attention = (
            (D * latent.query + latent.query * H * wide if latent.query else D * H * wide)
            + D * (latent.kv + latent.rotary)
            + latent.kv * H * (latent.plain + latent.value)
            + H * latent.value * D
        )
    dense = attention + by.get("ffn_in", 0) + by.get("ffn_out", 0)
    rest = attention + by.get("router", 0) + by.get("shared_in", 0) + by.get("shared_out", 0)
    return float(dense), float(rest), float(by.get("expert_in", 0) + by.get("expert_out", 0))


def price(run: Run, gpu: Accelerator, k: GpuCalibration) -> GpuStep:
    """Seconds of one step, by cause."""
    shape = run.shape
    sparse = mixture_layers(shape)
    dense = shape.num_layers - sparse
    nothing = (GpuPass(), GpuPass())
    plain = block(run, gpu, k, False) if dense else nothing
    mixed = block(run, gpu, k, True) if sparse else nothing
    ends = head(run, gpu, k)

    count = shape.num_layers
    layers, last = _stages(run, plain if dense else mixed, ends)
    share = layers / count
    ahead = plain[0].times(dense * share) + mixed[0].times(sparse * share)
    back = plain[1].times(dense * share) + mixed[1].times(sparse * share)
    m = run.passes
    final = last / layers
    if run.vocab == "pp" and run.pp > 1:
        ahead, back = ahead + ends[0], back + ends[1]
        tail_f, tail_b = ahead, back
    else:
        tail_f, tail_b = ahead.times(final) + ends[0], back.times(final) + ends[1]
    hop = _hop(run, gpu, k)
    usual = ahead.total + back.total
    tail = tail_f.total + tail_b.total
    slowest = max(usual, tail) if run.pp > 1 else tail
    # While the pipeline fills and drains, each stage waits for all others once.
    others = (usual * (run.pp - 1) + tail) / run.pp if run.pp > 1 else tail
    bubble = (run.pp - 1) / run.vpp * (others + hop) if run.pp > 1 else 0.0
    busiest = (tail_f + tail_b) if (tail >= usual or run.pp == 1) else (ahead + back)

    data = _data(
        run, gpu, k, layers, ahead if run.pp > 1 else tail_f, back if run.pp > 1 else tail_b
    )
    update = _update(run, gpu, k, share)
    terms = {
        "matmul": busiest.matmul * m,
        "attention": busiest.attention * m,
        "memory": busiest.memory * m,
        "overhead": busiest.host * m + ONCE_S,
        "tensor": busiest.tensor * m,
        "expert": busiest.expert * m,
        "context": busiest.context * m,
        "pipe": hop * m * run.vpp * (0.1 if run.engine.pipe_overlap else 1.0) if run.pp > 1 else 0,
        "data": data,
        "bubble": bubble,
        "optimizer": update,
    }
    assert slowest > 0
    return GpuStep(terms, ahead if run.pp > 1 else tail_f, back if run.pp > 1 else tail_b)


def _stages(
    run: Run, one: tuple[GpuPass, GpuPass], ends: tuple[GpuPass, GpuPass]
) -> tuple[float, float]:
    """Blocks of an ordinary and of the last stage.

    Blocks that divide evenly are so divided; others are placed so that the slowest stage,
    the last one with the output layer included, is as fast as can be.
    """
    L, pp = run.shape.num_layers, run.pp
    if pp == 1:
        return float(L), float(L)
    if L % pp == 0:
        return L / pp, L / pp
    each = one[0].total + one[1].total
    extra = ends[0].total + ends[1].total
    most = math.ceil(L / pp)
    best = (math.inf, float(most), float(most))
    for last in range(1, most + 1):
        others = math.ceil((L - last) / (pp - 1))
        best = min(best, (max(others * each, last * each + extra), float(others), float(last)))
    return best[1], best[2]


def _hop(run: Run, gpu: Accelerator, k: GpuCalibration) -> float:
    """Seconds in which one micro-batch's activations cross to the next stage and back."""
    if run.pp == 1:
        return 0.0
    size = 2.0 * run.micro_batch * run.seq_len / run.cp * run.shape.hidden / run.tp
    return 2 * send_s(size, run.tp * run.cp * run.dp, gpu, k)


def _local(run: Run, share: float) -> tuple[float, float]:
    """Weights of one rank that all data-parallel ranks hold, and those of its experts."""
    shape = run.shape
    sparse = mixture_layers(shape)
    dense, rest, experts = block_weights(shape)
    ends = shape.vocab_size * shape.hidden * (1.0 if run.pp > 1 or shape.tied else 2.0)
    common = ((shape.num_layers - sparse) * dense + sparse * rest) * share + ends
    return common / run.tp, sparse * experts * share / run.ep


def _data(
    run: Run, gpu: Accelerator, k: GpuCalibration, layers: float, ahead: GpuPass, back: GpuPass
) -> float:
    """Exposed seconds of what data-parallel ranks exchange in a step."""
    if run.tuned == "lora" and run.zero < 3:
        return 0.0
    engine, m = run.engine, run.passes
    common, experts = _local(run, layers / run.shape.num_layers)
    ranks = run.dp * run.cp
    thin = max(1, ranks * run.tp // run.ep) if experts else 1

    def ring(bytes_each: float) -> float:
        own = ring_s(bytes_each * common, ranks, run.tp, gpu, k)
        return own + ring_s(bytes_each * experts, thin, run.ep, gpu, k)

    if run.zero == 3:
        # A ring's latency is paid once a block.
        start = ring_s(1.0, ranks, run.tp, gpu, k) * layers
        gather, scatter = ring(2.0) + start, ring(engine.grad_bytes) + start
        if run.tuned == "lora":
            scatter = 0.0
        if not engine.data_overlap:
            return m * (2 * gather + scatter)
        exposed = max(0.0, gather - HIDES * ahead.total)
        exposed += max(0.0, gather + scatter - HIDES * back.total)
        hidden = min(gather, HIDES * ahead.total) + min(gather + scatter, HIDES * back.total)
        # The first gather and the last scatter have nothing to hide behind.
        return m * (exposed + CROWDED * hidden) + (gather + scatter) / max(1.0, layers)
    sharded = run.zero >= 1 or engine.sharded_update
    scatter = ring(engine.grad_bytes)
    gather = ring(2.0) if sharded else scatter
    if not engine.data_overlap:
        return scatter + gather
    exposed = max(0.05 * scatter, scatter - HIDES * back.total)
    if sharded:
        exposed += max(0.05 * gather, gather - HIDES * ahead.total)
    else:
        exposed = max(0.05 * scatter, scatter + gather - HIDES * back.total)
    return exposed + CROWDED * min(scatter + gather, HIDES * (ahead.total + back.total))


def _update(run: Run, gpu: Accelerator, k: GpuCalibration, share: float) -> float:
    """Seconds of the optimizer's pass over its state."""
    if run.tuned == "lora":
        return 0.0
    common, experts = _local(run, share)
    ranks = run.dp * run.cp
    if run.zero >= 1 or run.engine.sharded_update:
        own = common / ranks + experts / max(1, ranks * run.tp // run.ep)
    else:
        own = common + experts
    return stream_s(run.engine.optimizer_bytes * own, gpu, k)
