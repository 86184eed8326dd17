"""What Fuyou needs of each tier, and what its steps should take, before anything is allocated.

Symbols: N tokens of a micro-batch, D hidden, F feed-forward width, V vocabulary, L layers.

Source: Liao et al., Fuyou, 2024, section 4.5; with this house's states (fp32 weight, gradient and
two moments: 16 bytes a parameter).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.core.sizes import human_bytes
from shoal.cost.arithmetic import flops_per_token
from shoal.cost.price.host_link import copy_bytes_per_s
from shoal.cost.price.shares import microbatch_of
from shoal.ir import Estimate, Interval
from shoal.memory.offload.options import short_budgets
from shoal.memory.streaming.needs import (
    BOUNCE,
    BOUNCED,
    HOST_OF_A_GPU,
    INCOMING,
    OUTGOING,
    PROBED,
    Staging,
    disk_bandwidth,
    peak_flops,
    sizes,
    vectors,
)
from shoal.plan.memory.swap import SwapIteration, Swappable, SwapTensor, Times, choose

if TYPE_CHECKING:
    from shoal.ir import Machine, Work
    from shoal.memory.fuyou.part import Fuyou

_SECTOR = 4096
_STATES = 2
# Token ids, tables of the rotation and other small things.
_ASIDE = 2**17
# Gradients in memory of both processes, and pieces that are worked on there.
SLOTS, STAGED = 6, 4
# Logits that the loss holds at a time (see shoal.model.loss).
_LOGITS = 2**24


@dataclass(frozen=True)
class FuyouPrediction:
    """Of one job.

    Args:
        estimate: bytes by tier and seconds that are not hidden.
        least: bytes of the device without anything that comes early.
        staged: bytes of the host without activations.
        iteration: the last micro-batch of a step.
        ordered: what can be swapped.
        chosen: how much of it is.
    """

    estimate: Estimate
    least: float
    staged: float
    iteration: SwapIteration
    ordered: Swappable
    chosen: Times


def staged_bytes(numels: list[int], itemsize: int, states: int, piece: int, ahead: int) -> int:
    """Bytes of the host that transfers and the optimizer's process go through.

    Args:
        numels: elements of every parameter.
        itemsize: of an element.
        states: of the optimizer.
        piece: most elements that are updated at once.
        ahead: most elements that are read ahead.
    """
    staging = Staging.of(max(numels), itemsize, 0, piece)
    share = -(-staging.sub_group * itemsize // _SECTOR) * _SECTOR
    shared = share * (SLOTS + STAGED * (1 + states))
    buffers = -(-min(ahead, sum(numels)) * itemsize // staging.incoming)
    rings = (INCOMING + buffers) * staging.incoming + (OUTGOING + 1) * share
    return shared + rings + 2 * BOUNCED * BOUNCE


@dataclass(frozen=True)
class _Shape:
    """Bytes and rates of a job on a machine."""

    tokens: float
    size: float
    hidden: float
    heads: float
    num_heads: float
    qkv: float
    width: float
    layers: int
    vocab: float
    qk_norm: bool

    @classmethod
    def of(cls, work: Work) -> _Shape:
        job, shape = work.job, work.shape
        width = (shape.expert_hidden if shape.num_experts else shape.ffn_hidden) * max(
            1, shape.top_k if shape.num_experts else 1
        )
        return cls(
            tokens=float(microbatch_of(job) * job.seq_len),
            size=2.0 if job.precision == "bf16" else 4.0,
            hidden=shape.hidden,
            heads=shape.num_heads * shape.head_dim,
            num_heads=shape.num_heads,
            qkv=(shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim,
            width=width,
            layers=shape.num_layers,
            vocab=shape.vocab_size,
            qk_norm=shape.qk_norm,
        )

    @property
    def stream(self) -> float:
        """Bytes of the residual stream."""
        return self.tokens * self.hidden * self.size

    def always(self, seq_len: int, head_dim: int) -> float:
        """Bytes that every block sends away: inputs of its two halves, and of their norms."""
        fine = 2 * (self.tokens * 4.0 + _SECTOR)
        tables = 2 * (seq_len * head_dim * 4.0 + _SECTOR)
        return self.layers * (4 * (self.stream + _SECTOR) + 2 * fine) + tables + self.stream

    def swappable(self) -> list[tuple[float, float]]:
        """(bytes, operations) of what a block can send away."""
        n, a = self.tokens, self.size
        # Where no kernel norms and rotates at once: four products, two sums and their joining, of
        # halves of queries and keys.
        turned = n * (self.qkv + self.heads) / 2 * a * 4 if self.qk_norm else 0.0
        return [
            (n * self.qkv * a, 2 * n * self.hidden * self.qkv),
            *([(turned, 0.0)] if turned else []),
            (n * self.heads * a, 0.0),
            (n * (self.heads * a + 4.0 * self.num_heads), 2 * n * n * self.heads),
            (2 * n * self.width * a, 4 * n * self.hidden * self.width),
            (n * self.width * a, 0.0),
            (n * self.width * a, 0.0),
        ]


def predicted(part: Fuyou, work: Work, machine: Machine) -> FuyouPrediction:
    """Bytes by tier and times of a job."""
    job, shape = work.job, work.shape
    own = _Shape.of(work)
    numels = [*sizes(shape), *vectors(shape)]
    staged = float(staged_bytes(numels, 4, _STATES, part.sub_group_numel, part.prefetch_numel))
    always = own.always(job.seq_len, shape.head_dim)
    block = own.swappable()
    routed = 2.0 if shape.num_experts else 1.0
    movable = routed * own.layers * sum(nbytes + _SECTOR for nbytes, _ in block)
    rows = float(sum(-(-4 * count // _SECTOR) * _SECTOR for count in numels))
    least = _device_bytes(own, work)
    early = min(4.0 * part.prefetch_numel, rows) + (always + movable) * min(1.0, 3 / own.layers)
    device = least + early
    if part.device_budget is not None:
        device = max(least, min(device, float(part.device_budget)))
    host = staged + always + movable
    if part.host_budget is not None:
        host = max(staged, min(host, float(part.host_budget)))
    disk = rows * (2 + _STATES) + max(float(PROBED * BOUNCE), always + movable)
    iteration = _iteration(work, machine, rows=rows, always=always, free=host - staged)
    peak, memory = peak_flops(work, machine), machine.device.main_memory.read_bandwidth or 1e10
    tensors = [
        SwapTensor(nbytes=max(1, int(nbytes)), again_s=flops / peak + 2 * nbytes / memory)
        for nbytes, flops in block
    ] * own.layers
    ordered = Swappable(tensors)
    if part.swap == "auto":
        _, times = choose(iteration, ordered)
    else:
        requests = {"all": ordered.nbytes[-1], "none": 0}
        count = ordered.first(requests[part.swap] if isinstance(part.swap, str) else part.swap)
        times = iteration.times(ordered.nbytes[count], ordered.again_s[count])
    computed = (iteration.before + 1) * (iteration.forward_s + iteration.backward_s)
    seconds = max(0.0, times.seconds - computed)
    # Of a GPU's step the update is no part of its own; a CPU does it beside the passes.
    update = {} if machine.device.kind == "cpu" else {"optimizer": 0.0}
    estimate = Estimate(
        step_s=Interval.around(seconds, 0.5),
        terms_s={"memory": seconds, **update},
        memory_bytes={"device": device, "host": host, "disk": disk},
    )
    return FuyouPrediction(estimate, least, staged, iteration, ordered, times)


def _device_bytes(own: _Shape, work: Work) -> float:
    """Most bytes of the device at one time, if nothing comes early.

    The largest of three moments: the loss, with the output matrix, its gradient and the logits; the
    backward pass of a half of a block, with its weights, what it saved and what leaves; and that of
    the embedding.
    """
    n, a, hidden, width = own.tokens, own.size, own.hidden, own.width
    low = 1.5 if a == 2.0 else 1.0  # a weight, and its copy to compute with
    table = own.vocab * hidden * 4.0
    rows = min(n, max(1.0, _LOGITS // own.vocab))
    logits = rows * own.vocab * a
    largest = max(2 * width, own.qkv)
    leaving = 2 * n * largest * a
    loss = leaving + 3 * own.stream + (3 if low > 1 or rows < n else 2) * table + 2 * logits
    experts = max(1, work.shape.num_experts)
    matrices = 4.0 * hidden * (work.shape.expert_hidden or width) * experts
    if not work.shape.num_experts:
        matrices = 4.0 * hidden * width
    # Of the second half, from behind: down, the activation, and gate and up. What it saved goes as
    # gradients come, and one of these is on its way out.
    shown = n * a * width
    second = max(
        (3 * low + low) * matrices + 5 * shown,
        (2 * low + 1) * matrices + 7 * shown,
        (2 * low + 2 * low + 1) * matrices + 2 * shown,
        3 * low * matrices + 4 * shown + leaving,
    )
    second += 4 * own.stream
    square = 4.0 * hidden * own.heads
    first = 4.0 * hidden * own.qkv * 2 * low + square * (low + 1) + matrices
    first += n * a * (2 * own.qkv + 4 * own.heads) + n * 8.0 * own.num_heads + 4 * own.stream
    embedding = 3 * table + 2 * own.stream
    if work.shape.num_experts:
        second += n * a * 4 * hidden * work.shape.top_k
    batch = work.job.global_batch * work.job.seq_len * 16.0
    return max(loss, second, first, embedding) + batch + _ASIDE


def _iteration(
    work: Work, machine: Machine, *, rows: float, always: float, free: float
) -> SwapIteration:
    """A step as the machine's rates have it."""
    job = work.job
    passes = max(1, job.global_batch // microbatch_of(job))
    tokens = microbatch_of(job) * job.seq_len
    computed = flops_per_token(work.shape, job.seq_len) * tokens / peak_flops(work, machine)
    link, disk = copy_bytes_per_s(machine), disk_bandwidth(machine)
    gpu = machine.device.kind != "cpu"
    return SwapIteration(
        forward_s=computed / 3,
        backward_s=computed * 2 / 3,
        forward_fetched=rows,
        backward_fetched=rows,
        gradients=rows,
        optimizer_read=rows * (1 + _STATES),
        optimizer_written=rows * (1 + _STATES),
        update_s=rows / 4.0 / HOST_OF_A_GPU if gpu else 0.0,
        always=always,
        free_host=max(0.0, free),
        down=link,
        up=link,
        read=disk,
        write=disk,
        before=passes - 1,
    )


def notes(part: Fuyou, found: FuyouPrediction) -> tuple[str, ...]:
    """What a plan should say."""
    said: list[str] = []
    chosen = found.chosen
    forward, backward = chosen.binds
    said.append(
        f"offload: fuyou swaps {human_bytes(chosen.swapped)} of "
        f"{human_bytes(found.ordered.nbytes[-1])} of activations a micro-batch and computes the "
        f"rest again; the forward pass is bound by {forward}, the backward pass by {backward}"
    )
    said += short_budgets(part, {"device": found.least})
    if part.host_budget is not None and found.staged > part.host_budget:
        said.append(
            f"offload: host_budget {human_bytes(part.host_budget)} is below the "
            f"{human_bytes(found.staged)} of staging buffers; give more, or a smaller "
            "sub_group_numel or prefetch_numel"
        )
    if backward in ("read", "write"):
        rate = found.iteration.read
        slow = chosen.backward_s[backward] / max(1e-9, chosen.backward_s["compute"])
        said.append(
            f"offload: the disk ({human_bytes(rate)}/s) is too slow to hide: the backward pass "
            f"needs it {slow:.1f} times as long as it computes; a disk of "
            f"{human_bytes(rate * slow)}/s or a larger batch would do"
        )
    return tuple(said)
