"""One block, and the two ends of a model, on one rank: what its passes take, by cause."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from shoal.cost.gpu.device import Accelerator, GpuCalibration
from shoal.cost.gpu.kernels import attention_s, gemm_s, stream_s
from shoal.cost.gpu.network import all_to_all_s, ring_s
from shoal.cost.gpu.spec import Run, latent_of

__all__ = ["GpuPass", "block", "head"]

# Tile of a grouped product is shared by no two experts, and its rows are gathered.
GROUPED = 0.85
# Kernels of a block's forward pass: chains fused or not; quantisation adds its own.
CALLS = {True: 22, False: 40}
CALLS_LOW = 14
CALLS_EXPERTS = {True: 40, False: 60}
# Kernels that every local expert adds where experts are not one grouped product.
CALLS_EXPERT = {True: 30, False: 9}
# The backward pass launches so many kernels for one of the forward pass.
BACK = 1.8


@dataclass(frozen=True)
class GpuPass:
    """Seconds of one pass of one micro-batch on one rank, by cause.

    Args:
        matmul: products.
        attention: attention's kernels.
        memory: elementwise kernels.
        tensor: exposed traffic of tensor parallelism.
        expert: exposed traffic of expert parallelism.
        context: exposed traffic of context parallelism.
        host: seconds that the device waits for the host.
    """

    matmul: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    host: float = 0.0

    @property
    def device(self) -> float:
        """Seconds of kernels that compute."""
        return self.matmul + self.attention + self.memory

    @property
    def total(self) -> float:
        """All seconds."""
        return self.device + self.tensor + self.expert + self.context + self.host

    def __add__(self, other: GpuPass) -> GpuPass:
        return GpuPass(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.memory + other.memory,
            self.tensor + other.tensor,
            self.expert + other.expert,
            self.context + other.context,
            self.host + other.host,
        )

    def times(self, factor: float) -> GpuPass:
        """Every cause times ``factor``."""
        return GpuPass(
            self.matmul * factor,
            self.attention * factor,
            self.memory * factor,
            self.tensor * factor,
            self.expert * factor,
            self.context * factor,
            self.host * factor,
        )


def _low(precision: str) -> str:
    """Type of a block's products."""
    if precision.startswith(("fp8", "mxfp8")):
        return "fp8"
    return "fp4" if precision in ("fp4", "nvfp4") else precision


# Bytes that quantising one element of an operand reads and writes.
CAST = {"fp8": 4.0, "mxfp8": 4.0, "fp8-rows": 10.0, "fp4": 6.0, "nvfp4": 6.0}


class _Sum:
    """Adds up the kernels of a forward and a backward pass."""

    def __init__(self, run: Run, gpu: Accelerator, k: GpuCalibration, dtype: str) -> None:
        self.run, self.gpu, self.k, self.dtype = run, gpu, k, dtype
        self.cast = CAST.get(run.precision, 4.0) if dtype in ("fp8", "fp4") else 0.0
        self.forward = [0.0, 0.0, 0.0]
        self.backward = [0.0, 0.0, 0.0]
        self.linear = 0.0

    def product(
        self,
        M: float,
        N: float,
        K: float,
        *,
        dtype: str = "",
        groups: int = 1,
        frozen: bool = False,
    ) -> None:
        """A linear layer; the gradient of a frozen weight is not made."""
        dtype = dtype or self.dtype
        share = 1.0 if groups == 1 else 1.0 / GROUPED
        ahead = share * gemm_s(M, N, K, self.gpu, self.k, dtype, groups)
        inner = share * gemm_s(M, K, N, self.gpu, self.k, dtype, groups)
        # Gradients of weights are added up in their own type.
        adds = self.run.engine.grad_bytes
        outer = 0.0 if frozen else share * gemm_s(N, K, M, self.gpu, self.k, dtype, groups, adds)
        self.forward[0] += ahead
        self.backward[0] += inner + outer
        if dtype in ("fp8", "fp4"):
            self.forward[2] += stream_s(self.cast * groups * M * K, self.gpu, self.k)
            self.backward[2] += stream_s(self.cast * groups * M * N, self.gpu, self.k)

    def stream(self, forward: float, backward: float) -> None:
        """Elementwise kernels by the bytes that they move."""
        self.forward[2] += stream_s(forward, self.gpu, self.k)
        self.backward[2] += stream_s(backward, self.gpu, self.k)


@functools.lru_cache(maxsize=16384)
def block(run: Run, gpu: Accelerator, k: GpuCalibration, sparse: bool) -> tuple[GpuPass, GpuPass]:
    """Forward and backward pass of one block for one micro-batch, recomputation included.

    Args:
        run: the step.
        gpu: the device.
        k: measured constants.
        sparse: the block has experts.
    """
    shape, engine, tp = run.shape, run.engine, run.tp
    D = shape.hidden
    n = run.micro_batch * run.seq_len / run.cp
    own = n / tp if run.sp else n
    c = 4.0 if run.precision == "fp32" else 2.0
    frozen = run.tuned == "lora"
    s = _Sum(run, gpu, k, _low(run.precision))
    fused = engine.fused

    q, kv, core_f, core_b = _attention(s, n, frozen)
    wide = 2 if shape.gated else 1
    # Norms, residuals, rotations; a norm in an eager mixed-precision model also converts.
    norm = (2.0, 3.0) if fused else (4.0, 6.0)
    s.stream(2 * norm[0] * c * own * D, 2 * norm[1] * c * own * D)
    s.stream(2 * 3 * c * own * D, (2 if fused else 6) * c * own * D)
    rotary = 2.0 if fused else 5.0
    s.stream(rotary * c * n * (q + kv), rotary * c * n * (q + kv))

    def gate(width: float) -> None:
        if shape.gated:
            s.stream((3 if fused else 5) * c * n * width, (5 if fused else 10) * c * n * width)
        else:
            s.stream((2 if fused else 4) * c * n * width, (3 if fused else 6) * c * n * width)

    forward_wire = backward_wire = 0.0
    local = 0
    if sparse:
        X = shape.expert_hidden
        local = max(1, shape.num_experts // run.ep)
        # Each tensor rank sends its own tokens to whole experts.
        mine = n / tp
        rows = mine * shape.top_k / local
        s.product(mine, shape.num_experts, D, dtype="bf16" if c == 2 else "fp32", frozen=frozen)
        s.product(rows, wide * X, D, groups=local, frozen=frozen)
        s.product(rows, D, X, groups=local, frozen=frozen)
        routed = mine * shape.top_k
        passes = 4.0 if engine.fused_experts else 8.0
        s.stream(passes * c * routed * D, passes * c * routed * D)
        gate(X * shape.top_k / tp)
        if shape.num_shared_experts:
            S = shape.num_shared_experts * X
            s.product(n, wide * S / tp, D, frozen=frozen)
            s.product(n, D, S / tp, frozen=frozen)
            gate(S / tp)
        copies = routed
        if engine.dedup and run.ep > gpu.domain:
            # Distinct domains among the experts of a token, drawn evenly.
            far = run.ep / gpu.domain
            copies = mine * far * (1 - (1 - 1 / far) ** shape.top_k)
        one = all_to_all_s(c * copies * D, run.ep, 1, gpu, k)
        forward_wire = backward_wire = 2 * one
    else:
        F = shape.ffn_hidden / tp
        s.product(n, wide * F, D, frozen=frozen)
        s.product(n, D, F, frozen=frozen)
        gate(F)

    tensor = 0.0
    if tp > 1:
        # Two all-reduces a pass, or as many pairs of gather and scatter.
        tensor = 2 * 2 * ring_s(c * n * D, tp, 1, gpu, k) * (1 - engine.tensor_overlap)
        if sparse and run.sp:
            tensor /= 2
    ring = _ring(run, gpu, k, n, kv, c)
    calls = CALLS[fused] + (CALLS_LOW if s.cast else 0)
    if sparse:
        calls += CALLS_EXPERTS[engine.fused_experts]
        calls += 0 if engine.fused_experts else CALLS_EXPERT[s.cast > 0] * local
    ahead = GpuPass(
        s.forward[0], core_f, s.forward[2], tensor, forward_wire, max(0.0, ring - core_f)
    )
    back = GpuPass(
        s.backward[0], core_b, s.backward[2], tensor, backward_wire, max(0.0, 2 * ring - core_b)
    )
    again = _again(run, ahead, core_f)
    ahead = _paced(ahead, calls, run, k)
    back = _paced(back + again, calls * BACK, run, k)
    return ahead, back


def _paced(own: GpuPass, calls: float, run: Run, k: GpuCalibration) -> GpuPass:
    """``own`` with the time that the device waits for the host's launches."""
    if run.engine.graphs:
        return own
    return own + GpuPass(host=max(0.0, calls * k.host - own.total))


def _again(run: Run, ahead: GpuPass, core: float) -> GpuPass:
    if run.recompute in ("full", "stage"):
        return ahead
    if run.recompute == "half":
        # Attention is kept; every other product and all elementwise operators run again.
        return GpuPass(matmul=0.5 * ahead.matmul, memory=ahead.memory)
    if run.recompute == "selective" and run.engine.attention == "plain":
        return GpuPass(attention=core)
    return GpuPass()


def _ring(run: Run, gpu: Accelerator, k: GpuCalibration, n: float, kv: float, c: float) -> float:
    """Seconds in which keys and values go round the context ranks, one block forward."""
    if run.cp == 1:
        return 0.0
    size = c * n * kv * run.cp
    return ring_s(size, run.cp, run.tp, gpu, k)


def _attention(s: _Sum, n: float, frozen: bool) -> tuple[float, float, float, float]:
    """Adds the projections; widths of queries and of keys with values, seconds of the core."""
    run, shape = s.run, s.run.shape
    tp, D = run.tp, shape.hidden
    heads = shape.num_heads / tp
    latent = latent_of(shape)
    if latent:
        wide, value = latent.plain + latent.rotary, latent.value
        if latent.query:
            s.product(n, latent.query, D, frozen=frozen)
            s.product(n, heads * wide, latent.query, frozen=frozen)
        else:
            s.product(n, heads * wide, D, frozen=frozen)
        s.product(n, latent.kv + latent.rotary, D, frozen=frozen)
        s.product(n, heads * (latent.plain + value), latent.kv, frozen=frozen)
        s.product(n, D, heads * value, frozen=frozen)
        q, kv = heads * wide, heads * (latent.plain + value)
    else:
        wide = value = shape.head_dim
        groups = max(1.0, shape.num_kv_heads / tp)
        q, kv = heads * wide, 2 * groups * wide
        s.product(n, q + kv, D, frozen=frozen)
        s.product(n, D, q, frozen=frozen)
    keys, share = run.window

    def core(backward: bool) -> float:
        def of(reach: float, causal: bool) -> float:
            return attention_s(
                heads=heads * run.micro_batch,
                queries=run.seq_len / run.cp,
                keys=reach,
                head_dim=wide,
                value_dim=value,
                kernel=run.engine.attention,
                gpu=s.gpu,
                k=s.k,
                backward=backward,
                causal=causal,
            )

        whole = of(run.seq_len, causal=True)
        if not keys or keys >= run.seq_len:
            return whole
        return (1 - share) * whole + share * of(keys, causal=False)

    return q, kv, core(False), core(True)


@functools.lru_cache(maxsize=4096)
def head(run: Run, gpu: Accelerator, k: GpuCalibration) -> tuple[GpuPass, GpuPass]:
    """Forward and backward pass of output layer and loss for one micro-batch."""
    shape = run.shape
    n = run.micro_batch * run.seq_len / run.cp
    ranks = run.tp if run.vocab == "tp" else run.tp * run.pp
    V, D = shape.vocab_size / ranks, shape.hidden
    dtype = "fp32" if run.precision == "fp32" else "bf16"
    frozen = run.tuned == "lora"
    s = _Sum(run, gpu, k, dtype)
    s.product(n, V, D, frozen=frozen)
    s.stream(0.6 * run.engine.loss_bytes * n * V, 0.4 * run.engine.loss_bytes * n * V)
    tensor = ring_s(2.0 * n * D, ranks, 1, gpu, k) if ranks > 1 else 0.0
    return (
        GpuPass(s.forward[0], 0.0, s.forward[2], tensor),
        GpuPass(s.backward[0], 0.0, s.backward[2], tensor),
    )
