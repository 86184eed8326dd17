"""A step's time on a CPU from its rates and the model's shape, operator by operator.

A matrix product takes its FLOP over the measured rate at its size, and then its weights over
the bandwidth of the memory that holds the model. Attention copies the keys and values of a
request side by side and reads them; every other operator takes its bytes over the bandwidth
that elementwise operators reach; each operator costs its launch, and each step and each
request some work on the host.

Sources: Williams et al., Roofline, 2009; Yuan et al., LLM Inference Unveiled: Survey and
Roofline Model Insights, 2024 (decode steps are bound by weights and cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.core.errors import require
from shoal.cost.arithmetic import attention_width, block_weights, linears, parameters
from shoal.cost.kernels.bounds import reached
from shoal.cost.kernels.serving_engines import ENGINES, ServingEngine
from shoal.cost.latent import latent_of
from shoal.cost.price.ops import TILED, operators
from shoal.cost.price.rates import RankRates
from shoal.ir import Machine, ModelShape, Parallel

BYTES = {"fp32": 4.0, "bf16": 2.0}
"""Bytes of a weight and of a key's element, by precision."""

# Share of a device's memory that a server may fill; the rest is for what is not counted.
FILL = {"gpu": 0.92, "cpu": 0.85}
# What its process holds before the model: framework, libraries, allocator.
RUNTIME_BYTES = {"cpu": 0.45e9, "gpu": 1.5e9}
# Operators of one layer for each group of decodes and for each prompt: copy, mask, attend.
ATTENTION_CALLS = 10
# Share of the keys that a decode's attention copies from the blocks: read and written.
COPY_PASSES = 2.0
# Operators of a step find their operands displaced from the caches; the probe
# repeats one operator on the same arrays.
DISPLACED = 1.75


class Terms(NamedTuple):
    """Seconds of a step by cause.

    Args:
        matmul: matrix products that are limited by FLOP.
        attention: attention, its copies included.
        memory: reading weights; elementwise operators.
        overhead: launching operators; the host's own work.
        communication: what ranks send each other.
    """

    matmul: float
    attention: float
    memory: float
    overhead: float
    communication: float = 0.0

    @property
    def total(self) -> float:
        """Their sum."""
        return self.matmul + self.attention + self.memory + self.overhead + self.communication


def cache_bytes_per_token(shape: ModelShape, precision: str) -> float:
    """Bytes of the keys and values of one token in all layers."""
    if latent := latent_of(shape):
        return shape.num_layers * (latent.kv + latent.rotary) * BYTES[precision]
    heads = shape.num_kv_heads * shape.architecture.streams.num
    return 2.0 * shape.num_layers * heads * shape.head_dim * BYTES[precision]


def activation_bytes(shape: ModelShape, tokens: int, requests: int, precision: str) -> float:
    """Bytes of the largest moment of a step of ``tokens``, and of its ``requests`` logits."""
    width = BYTES[precision]
    ffn = max(shape.ffn_hidden, shape.expert_hidden * max(1, shape.top_k))
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    # The residual stream, its norm, and either queries, keys and values or the inner layer.
    block = tokens * (3 * shape.hidden + max(2 * heads, 3 * ffn)) * width
    # Logits are turned to fp32, sorted and summed where sampling asks for it.
    return block + requests * shape.vocab_size * (width + 12.0)


class Roofline:
    """Predicted seconds of steps of one model on the CPU of a machine.

    Args:
        precision: fp32 or bf16, of weights and cache.
        threads: threads that compute; 0 for all cores.
        ranks: processes that compute beside each other, and share it.
        weight_bytes: bytes that are read of a weight of a block; None for those of ``precision``.
        head_bytes: bytes of the key or the value of one token and head; None likewise.
        engine: that runs the steps.

    Raises:
        ConfigError: another precision.
        MachineError: the machine has no value for a required rate.
    """

    def __init__(
        self,
        machine: Machine,
        shape: ModelShape,
        precision: str,
        threads: int = 0,
        *,
        ranks: int = 1,
        weight_bytes: float | None = None,
        head_bytes: float | None = None,
        engine: ServingEngine = ENGINES["shoal"],
    ) -> None:
        require(precision in BYTES, "precision", precision, expected=" or ".join(BYTES))
        self.machine, self.shape, self.precision = machine, shape, precision
        self._rates = RankRates(machine, Parallel(tp=ranks), threads)
        self._engine = engine
        packed = engine.packed if engine.packed and weight_bytes is not None else precision
        self._matmul = self._rates.matmul_curve(packed).scaled(engine.products)
        self._stream = self._rates.stream_curve()
        self._itemsize = BYTES[precision] if weight_bytes is None else weight_bytes
        self._head = shape.head_dim * BYTES[precision] if head_bytes is None else head_bytes
        blocks = block_weights(shape)
        size = (parameters(shape) - blocks) * BYTES[precision] + blocks * self._itemsize
        self._weights = self._weight_bandwidth(size)
        self._by_tokens: dict[int, tuple[float, float, float]] = {}
        self._by_rows: dict[int, tuple[float, float]] = {}

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.terms(chunks).total

    def terms(self, chunks: Sequence[tuple[int, int]]) -> Terms:
        """Seconds of a step of ``chunks`` (tokens before, tokens in it), by cause."""
        shape = self.shape
        tokens = decodes = len(chunks)
        prompts, pairs, copied = 0, 0.0, 0
        keys = decodes
        for start, length in chunks:
            keys += start
            if length != 1:
                keys -= start + 1
                tokens += length - 1
                prompts += 1
                pairs += length * (start + (length + 1) / 2)
                copied += start + length if start else 0
        decodes -= prompts
        matmul, memory, calls = self._blocks(tokens)
        rows = self._logits(decodes + prompts)
        attention = self._attention(keys, pairs, copied)
        calls += ATTENTION_CALLS * shape.num_layers * (min(decodes, 1) + prompts)
        engine = self._engine
        launch = engine.calls * calls * self.machine.device.op_overhead_s * self._rates.crowding
        return Terms(
            matmul + rows[0],
            attention,
            memory + rows[1],
            launch + engine.step_s + engine.sequence_s * len(chunks),
        )

    def _weight_bandwidth(self, size: float) -> float:
        """Byte/s at which weights are read: every step reads all of them, one after another."""
        tiers = self.machine.device.streamed_memory
        if not tiers:
            return self._stream(size)
        # A level that is only just large enough has been displaced in part.
        tier = next((tier for tier in tiers if tier.capacity_bytes >= 1.5 * size), tiers[-1])
        assert tier.read_bandwidth is not None
        return tier.read_bandwidth * self._rates.used / self._rates.cores / self._rates.crowding

    def _product(
        self, M: float, N: float, K: float, count: float, itemsize: float
    ) -> tuple[float, float]:
        """(by FLOP, by bytes of the weights) of ``count`` products [M, K] x [K, N]."""
        flops = count * 2.0 * M * N * K / self._matmul((M * N * K) ** (1 / 3))
        weights = count * N * K * itemsize / self._weights
        return flops, weights

    def _blocks(self, tokens: int) -> tuple[float, float, float]:
        """(matmul s, memory s, operators) of all blocks for ``tokens``, attention left out."""
        if tokens not in self._by_tokens:
            matmul = memory = calls = 0.0
            for linear in linears(self.shape):
                if linear.role == "output":
                    continue
                # Few tokens reach few of the experts, and only their weights are read.
                reached = 1.0 - (1.0 - linear.share) ** tokens if linear.share < 1 else 1.0
                flops, weights = self._product(
                    linear.share * tokens / reached,
                    linear.N,
                    linear.K,
                    linear.layers * linear.copies * reached,
                    self._itemsize,
                )
                matmul += flops
                memory += weights
            every = operators(
                self.shape, seq_len=tokens, microbatch=1, precision=self.precision, style="cpu"
            )
            for op in every:
                if op.name in _TRAINING:
                    continue
                # Experts that no token reaches launch nothing.
                share = self._reached(tokens) if op.name.startswith("expert") else 1.0
                if op.kind == "memory":
                    traffic = DISPLACED * op.count * op.forward_bytes
                    memory += traffic / self._stream(max(1.0, op.size_bytes))
                calls += share * op.count * op.forward_calls
            self._by_tokens[tokens] = matmul, memory, calls
        return self._by_tokens[tokens]

    def _reached(self, tokens: int) -> float:
        """Share of the experts that a step of ``tokens`` reaches."""
        shape = self.shape
        return reached(tokens, shape.top_k, shape.num_experts) if shape.num_experts else 1.0

    def _logits(self, rows: int) -> tuple[float, float]:
        """(matmul s, memory s) of the output matrix and of choosing from it."""
        if rows not in self._by_rows:
            shape = self.shape
            width = BYTES[self.precision]
            flops, weights = self._product(rows, shape.vocab_size, shape.hidden, 1.0, width)
            # Converted to fp32 and searched.
            cells = 12.0 * rows * shape.vocab_size
            self._by_rows[rows] = flops, weights + cells / self._stream(max(1.0, cells))
        return self._by_rows[rows]

    def _attention(self, keys: int, pairs: float, copied: int) -> float:
        """Seconds of attention in all layers.

        Args:
            keys: that decodes read.
            pairs: of a query and a key in prompts.
            copied: keys that prompts copy from blocks.
        """
        shape = self.shape
        kv = 2.0 * shape.num_kv_heads * self._head
        if latent := latent_of(shape):
            kv = (latent.kv + latent.rotary) * self._head / shape.head_dim
        flops = 4.0 * shape.num_heads * attention_width(shape) * pairs
        traffic = DISPLACED * kv * ((COPY_PASSES + 1.0) * keys + COPY_PASSES * copied)
        seconds = traffic / self._stream(max(1.0, traffic))
        # Passes of fp32 over the weights inside the tiled kernel.
        weights = TILED[self.precision][0] * 4.0 * shape.num_heads * pairs
        seconds += flops / self._matmul(256.0) + weights / self._stream(2.0**20)
        return shape.num_layers * seconds


# Operators of a training step that a serving step has not, or that are counted here.
_TRAINING = frozenset(
    {"attention", "attention_backward", "weight_cast", "gradient_sum", "logits", "loss"}
)
