"""What the benchmark of attention is asked and what it says."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from shoal.core.config import Value
from shoal.core.errors import require

# ok: within tolerance. wrong: computed, and not. unsupported: refused, with the reason.
# failed: it raised an error, which is the reason.
Status = Literal["ok", "wrong", "unsupported", "failed"]

# Largest |x - reference| over largest |reference|, of the output and of each gradient.
TOLERANCES = {"fp64": 1e-10, "fp32": 2e-5, "bf16": 3e-2, "fp16": 4e-3}


class RankNetwork(Value):
    """The ranks of context parallelism: how fast they compute, and the links between them.

    Args:
        flops: FLOP/s of one rank, of seen cells.
        bandwidth: byte/s of one link in one direction.
        latency_s: of one link.
        shape: ``mesh``, a link between every two ranks, or ``ring``.
        ranks_per_node: ranks of one node, neighbours by number.
        node_bandwidth: byte/s of a link between nodes.
        node_latency_s: of a link between nodes.
    """

    flops: float = 1e14
    bandwidth: float = 5e10
    latency_s: float = 5e-6
    shape: Literal["mesh", "ring"] = "mesh"
    ranks_per_node: int = 4
    node_bandwidth: float = 1.25e10
    node_latency_s: float = 1e-5

    @model_validator(mode="after")
    def _positive(self) -> Self:
        for name in ("flops", "bandwidth", "node_bandwidth", "ranks_per_node"):
            value = getattr(self, name)
            require(value > 0, f"network.{name}", value, expected="above 0")
        for name in ("latency_s", "node_latency_s"):
            value = getattr(self, name)
            require(value >= 0, f"network.{name}", value, expected="seconds, 0 or more")
        return self


class AttentionSettings(Value):
    """What is compared, and on what.

    Args:
        kernels: parts of kind ``attention_kernel``.
        masks: names of patterns.
        methods: parts of kind ``context``.
        lengths: tokens of a sequence, of the kernels.
        context_lengths: tokens of a sequence, of the context-parallel methods.
        ranks: numbers of context-parallel ranks.
        batch: sequences.
        heads: query heads.
        kv_heads: key/value heads, a divisor of them.
        head_dim: width of a head.
        dtype: fp64, fp32, bf16 or fp16.
        device: where the kernels run, cpu or cuda.
        backward: gradients are checked and timed too.
        timed: kernels are timed; else only checked.
        repeats: timed rounds.
        block: edge of the blocks of block-sparse masks.
        threads: of torch; 0 leaves it as it is.
        seed: of masks, inputs and the order of timing.
        network: what the context-parallel ranks run on.
    """

    kernels: tuple[str, ...]
    masks: tuple[str, ...]
    methods: tuple[str, ...]
    lengths: tuple[int, ...] = (1024, 2048)
    context_lengths: tuple[int, ...] = (1024,)
    ranks: tuple[int, ...] = (2, 4, 8)
    batch: int = 1
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    dtype: str = "fp32"
    device: Literal["cpu", "cuda"] = "cpu"
    backward: bool = True
    timed: bool = True
    repeats: int = 5
    block: int = 64
    threads: int = 0
    seed: int = 0
    network: RankNetwork = RankNetwork()

    @model_validator(mode="after")
    def _legal(self) -> Self:
        require(bool(self.masks), "masks", "none", expected="at least one")
        require(
            bool(self.kernels or self.methods),
            "kernels, cp",
            "none",
            expected="one or more of them",
        )
        require(
            self.dtype in TOLERANCES,
            "dtype",
            self.dtype,
            expected=f"one of {', '.join(TOLERANCES)}",
        )
        for name in ("batch", "heads", "kv_heads", "head_dim", "repeats", "block"):
            require(getattr(self, name) >= 1, name, getattr(self, name), expected="at least 1")
        require(
            self.heads % self.kv_heads == 0,
            "kv_heads",
            self.kv_heads,
            expected=f"a divisor of the {self.heads} query heads",
        )
        for length in (*self.lengths, *self.context_lengths):
            below = length // self.block * self.block
            require(
                length >= self.block and length % self.block == 0,
                "lengths",
                length,
                expected=f"multiples of the masks' block of {self.block}",
                hint=f"use {below} or {below + self.block}, or another block"
                if below
                else f"use {self.block}, or a smaller block",
            )
        require(self.threads >= 0, "threads", self.threads, expected="0 or more")
        for world in self.ranks:
            require(1 <= world <= 64, "ranks", world, expected="1 to 64")
        return self


class Timing(Value):
    """Seconds of several rounds.

    Args:
        median_s: median.
        low_s: lower quartile.
        high_s: upper quartile.
        tflops: 1e12 FLOP/s of the median, by seen cells.
    """

    median_s: float
    low_s: float
    high_s: float
    tflops: float


class KernelRow(Value):
    """One kernel under one mask.

    Args:
        kernel: the kernel.
        mask: the pattern.
        length: tokens.
        status: see :data:`Status`.
        reason: why it is unsupported, wrong or failed.
        error: largest relative error of output and gradients against float64.
        seen_cells: cells of the mask, of one head and sequence.
        computed_cells: cells whose score the kernel computes.
        forward: time of a forward pass.
        backward: time of a backward pass.
        saved_bytes: kept from forward to backward besides inputs.
        peak_bytes: largest sum of live results during forward and backward.
    """

    kernel: str
    mask: str
    length: int
    status: Status
    reason: str = ""
    error: float | None = None
    seen_cells: int
    computed_cells: int | None = None
    forward: Timing | None = None
    backward: Timing | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None

    @property
    def waste(self) -> float | None:
        """Computed cells over seen ones."""
        if self.computed_cells is None or not self.seen_cells:
            return None
        return self.computed_cells / self.seen_cells


class ContextRow(Value):
    """One context-parallel method under one mask.

    Args:
        method: the method.
        mask: the pattern.
        length: tokens.
        ranks: number of ranks.
        status: see :data:`Status`.
        reason: why it is unsupported, wrong or failed.
        error: largest relative error of output and gradients against float64.
        forward_s: until the last rank has its output, on the links' clock.
        backward_s: from there until the last rank has its gradients.
        busy_s: of the rank that computes longest.
        balance: largest over mean FLOPs of the ranks.
        wire_bytes: bytes of all ranks by class of link.
    """

    method: str
    mask: str
    length: int
    ranks: int
    status: Status
    reason: str = ""
    error: float | None = None
    forward_s: float | None = None
    backward_s: float | None = None
    busy_s: float | None = None
    balance: float | None = None
    wire_bytes: dict[str, float] = {}

    @property
    def step_s(self) -> float | None:
        """Forward and backward."""
        return None if self.forward_s is None else self.forward_s + (self.backward_s or 0.0)

    @property
    def exposed_s(self) -> float | None:
        """What is left of the step beside the longest computation: communication in the open."""
        if self.step_s is None or self.busy_s is None:
            return None
        return max(0.0, self.step_s - self.busy_s)


class AttentionReport(Value):
    """Everything that was seen.

    Args:
        settings: what was asked.
        kernels: a row for each kernel, mask and length.
        context: a row for each method, mask, length and number of ranks.
        documents: number of real documents that lengths were drawn from.
    """

    settings: AttentionSettings
    kernels: tuple[KernelRow, ...] = ()
    context: tuple[ContextRow, ...] = ()
    documents: int = 0

    def counts(self) -> dict[str, int]:
        """Rows by status."""
        counts = dict.fromkeys(("ok", "wrong", "unsupported", "failed"), 0)
        rows: list[KernelRow | ContextRow] = [*self.kernels, *self.context]
        for row in rows:
            counts[row.status] += 1
        return counts
