"""What long context costs at the peak of the hardware: four numbers that follow from the cache.

How many users a device holds, how long a prompt takes to read, how long an answer takes to write,
and how long it takes to put one user's cache aside and bring it back. All are of ideal hardware:
every operation at peak, every byte at full bandwidth; an efficiency is a factor that the caller
gives.

Legend: S tokens of context, L layers, h width of the queries of all heads, P parameters that
multiply each token, s bytes of a parameter, kappa bytes of cache a token.

Source: Fu, Challenges in Deploying Long-Context Transformers: A Theoretical Peak Performance
Analysis, 2024. *Differs*: the attention of a prompt is counted exactly by default (two products,
the causal half of each); the paper's own figures follow from half of that, see :data:`ATTENTION`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Self

from shoal.core.errors import PlanError, require
from shoal.cost.arithmetic import linears, parameters
from shoal.ir import Machine, ModelShape

BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5}
"""Bytes of one number, by dtype."""

Convention = Literal["causal", "unmasked", "paper"]

ATTENTION: dict[str, float] = {"causal": 2.0, "unmasked": 4.0, "paper": 1.0}
"""FLOP of a prompt's attention over L S^2 h. Both products take 2 S^2 h each: 4 where nothing is
masked (what operator counters say), 2 for the pairs that a causal mask leaves. The paper's figures
of 14 s and 0.9 s follow from 1."""

# B/s of PCIe in one direction with 16 lanes: version 5 of these devices, 4 of others.
_PCIE_5 = ("H100", "H200", "B200", "MI300X")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongModel:
    """What of a model matters here; a value, so that what-ifs are ``replace``.

    Args:
        params: parameters that multiply every token.
        last_params: those that multiply only tokens whose next one is wanted: the output matrix.
        weight_bytes: B of all weights, read once per step, independent of the batch.
        width: h, query heads times the width of one.
        kv_bytes: kappa, B of keys and values of one token.
        window: tokens that each sees; None for all before it.
    """

    name: str
    params: float
    last_params: float = 0.0
    weight_bytes: float
    layers: int
    width: int
    kv_bytes: float
    window: int | None = None

    @classmethod
    def of(cls, shape: ModelShape, *, precision: str = "bf16", kv: str | None = None) -> Self:
        """The model of a shape.

        Raises:
            ConfigError: an unknown dtype.
        """
        for where, dtype in (("precision", precision), ("kv", kv or precision)):
            require(dtype in BYTES, where, dtype, expected=f"one of {', '.join(BYTES)}")
        blocks = [one for one in linears(shape) if one.role != "output"]
        return cls(
            name=shape.name,
            params=sum(one.flops_per_token for one in blocks) / 2,
            last_params=float(shape.vocab_size * shape.hidden),
            weight_bytes=parameters(shape) * BYTES[precision],
            layers=shape.num_layers,
            width=shape.num_heads * shape.head_dim,
            kv_bytes=2.0
            * shape.num_layers
            * shape.num_kv_heads
            * shape.head_dim
            * BYTES[kv or precision],
        )

    def cache_bytes(self, tokens: float) -> float:
        """B of the cache of a context."""
        return self.kv_bytes * (tokens if self.window is None else min(tokens, self.window))

    def prefill_flops(self, tokens: float, convention: Convention = "causal") -> float:
        """FLOP of reading a prompt: ``2 P S + a L S^2 h``, and the last token's logits."""
        require(
            convention in ATTENTION,
            "attention",
            convention,
            expected=f"one of {', '.join(ATTENTION)}",
        )
        # A window leaves S W - W^2 / 2 of the S^2 / 2 pairs that a causal mask leaves.
        seen = tokens if self.window is None else min(tokens, self.window)
        square = 2 * tokens * seen - seen**2
        attention = ATTENTION[convention] * self.layers * square * self.width
        return 2 * self.params * tokens + 2 * self.last_params + attention

    def step_flops(self, contexts: Sequence[float]) -> float:
        """FLOP of the next token of each of these contexts."""
        seen = sum(self.cache_bytes(one) for one in contexts) / self.kv_bytes
        products = 2 * (self.params + self.last_params) * len(contexts)
        return products + 4 * self.layers * self.width * seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """A device, or several that share every layer, at their peak.

    Args:
        memory_bytes: B of device memory.
        bandwidth: B/s of it.
        link: B/s to host memory, each way.
    """

    name: str
    flops: float
    memory_bytes: float
    bandwidth: float
    link: float

    def __post_init__(self) -> None:
        for field in ("flops", "memory_bytes", "bandwidth", "link"):
            value = getattr(self, field)
            require(
                value > 0 and math.isfinite(value),
                f"device.{field}",
                value,
                expected="a number above 0",
            )

    @classmethod
    def of(
        cls, machine: Machine, *, precision: str = "bf16", tp: int = 1, link: float | None = None
    ) -> Self:
        """``tp`` devices of a machine; their exchange costs nothing here.

        Args:
            machine: what there is.
            precision: dtype of the products.
            tp: devices that share every layer.
            link: B/s to the host of one device; PCIe of its generation if not given.

        Raises:
            ConfigError: no devices.
            PlanError: the machine does not say how fast it is.
        """
        require(tp >= 1, "tp", tp, expected="at least 1 device")
        device, memory = machine.device, machine.device.main_memory
        rates = {**device.matmul_flops, **device.peak_flops}
        require(
            precision in rates,
            f"device {device.name}: peak_flops.{precision}",
            None,
            expected=f"a rate; it has {', '.join(sorted(rates)) or 'none'}",
            error=PlanError,
        )
        require(
            memory.read_bandwidth is not None,
            f"device {device.name}: read_bandwidth of {memory.name}",
            None,
            expected="a rate",
            hint="probe the machine, or add it to its file",
            error=PlanError,
        )
        assert memory.read_bandwidth is not None
        if link is None:
            pcie = 6.4e10 if any(name in device.name for name in _PCIE_5) else 3.2e10
            # Without a device of its own, both sides are the same memory: read and written.
            link = memory.read_bandwidth / 2 if device.kind == "cpu" else pcie
        return cls(
            name=machine.name if tp == 1 else f"{tp}x{machine.name}",
            flops=tp * rates[precision],
            memory_bytes=float(tp * memory.capacity_bytes),
            bandwidth=tp * memory.read_bandwidth,
            link=tp * link,
        )


@dataclass(frozen=True, slots=True)
class RequiredReduction:
    """By what the cost at a long context must fall to be that at a short one.

    Args:
        number: concurrency, prefill, decode or switch.
        factor: what multiplies cache (or, of prefill, FLOP); 1 where nothing is needed.
        of: what it multiplies: cache or FLOP.
    """

    number: str
    factor: float
    of: Literal["cache", "FLOP"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongContext:
    """A model on a device: the four numbers at any context length.

    Args:
        activation_bytes: B that are neither weights nor cache.
        compute_efficiency: share of the peak FLOP/s that is reached; 1 for the peak.
        memory_efficiency: share of the peak bandwidth; 1 for the peak.
        attention: how the FLOP of a prompt's attention are counted.

    Raises:
        PlanError: the weights do not fit; the message has the number of devices that would hold
            them.
    """

    model: LongModel
    device: Peaks
    activation_bytes: float = 0.0
    compute_efficiency: float = 1.0
    memory_efficiency: float = 1.0
    attention: Convention = "causal"

    def __post_init__(self) -> None:
        for name in ("compute_efficiency", "memory_efficiency"):
            value = getattr(self, name)
            require(0 < value <= 1, name, value, expected="a fraction in (0, 1]")
        require(
            self.activation_bytes >= 0,
            "activation_bytes",
            self.activation_bytes,
            expected="0 or more",
        )
        fixed = self.model.weight_bytes + self.activation_bytes
        number = math.ceil(fixed / self.device.memory_bytes + 1e-12)
        require(
            fixed < self.device.memory_bytes,
            f"{self.model.name} on {self.device.name}",
            f"{self.model.weight_bytes / 1e9:,.1f} GB of weights",
            expected=f"less than its {self.device.memory_bytes / 1e9:,.1f} GB of memory",
            hint=f"share it over {number} of them (tp), or use fewer bits",
            error=PlanError,
        )

    @property
    def room(self) -> float:
        """B for caches."""
        return self.device.memory_bytes - self.model.weight_bytes - self.activation_bytes

    @property
    def critical_length(self) -> float:
        """Tokens whose cache takes as long to read as the weights: ``S* = s P / kappa``."""
        return self.model.weight_bytes / self.model.kv_bytes

    @property
    def compute_bound_tokens(self) -> float:
        """Tokens in a step from which products, not weights, are what it waits for."""
        return self._flops * self.model.weight_bytes / (2 * self.model.params * self._bandwidth)

    def users(self, tokens: float) -> float:
        """Contexts that fit, as a fraction: below 1 not even one does."""
        return self.room / self.model.cache_bytes(_checked(tokens))

    def concurrency(self, tokens: float) -> int:
        """Contexts that fit."""
        return int(self.users(tokens))

    def prefill_s(self, tokens: float) -> float:
        """S of reading a prompt."""
        compute = self.model.prefill_flops(_checked(tokens), self.attention) / self._flops
        moved = self.model.weight_bytes + self.model.cache_bytes(tokens)
        return max(compute, moved / self._bandwidth)

    def step_s(self, contexts: Sequence[float]) -> float:
        """S of the next token of each of these contexts; weights are read once for all."""
        cache = sum(self.model.cache_bytes(one) for one in contexts)
        compute = self.model.step_flops(contexts) / self._flops
        return max(compute, (self.model.weight_bytes + cache) / self._bandwidth)

    def decode_s(self, tokens: float, batch: int = 1) -> float:
        """S of the next token of ``batch`` contexts of ``tokens``; 0 is the empty context."""
        require(tokens >= 0, "tokens", tokens, expected="0 or more")
        return self.step_s([tokens] * batch)

    def attention_share(self, tokens: float, batch: int = 1) -> float:
        """Share of a decode step's bytes that are cache."""
        cache = batch * self.model.cache_bytes(tokens)
        return cache / (cache + self.model.weight_bytes)

    def switch_s(self, tokens: float) -> float:
        """S of moving one context's cache to the host or back, one way."""
        return self.model.cache_bytes(_checked(tokens)) / self.device.link

    def needed(self, long: float, short: float) -> tuple[RequiredReduction, ...]:
        """What must fall, and by what factor, for ``long`` to cost what ``short`` costs.

        Weights cost the same at any length, so every factor is that of the cache alone; what
        a prompt costs is FLOP, of which no reduction of the cache takes any away.
        """
        _checked(short)
        cache = min(1.0, self.model.cache_bytes(short) / self.model.cache_bytes(_checked(long)))
        flops = self.model.prefill_flops(short, self.attention) / self.model.prefill_flops(
            long, self.attention
        )
        return (
            RequiredReduction("concurrency", cache, "cache"),
            RequiredReduction("prefill", min(1.0, flops), "FLOP"),
            RequiredReduction("decode", cache, "cache"),
            RequiredReduction("switch", cache, "cache"),
        )

    def on(self, device: Peaks) -> Self:
        """The same on another device.

        Raises:
            PlanError: the weights do not fit there.
        """
        return replace(self, device=device)

    @property
    def _flops(self) -> float:
        return self.compute_efficiency * self.device.flops

    @property
    def _bandwidth(self) -> float:
        return self.memory_efficiency * self.device.bandwidth


def lengths(first: float = 4096, last: float = 10_000_000) -> tuple[int, ...]:
    """Context lengths from ``first`` to ``last``, each twice the one before.

    Raises:
        ConfigError: the first is not positive or above the last.
    """
    require(
        1 <= first <= last,
        "tokens",
        (first, last),
        expected="a length of at least 1, and a longest that is not shorter",
    )
    doubled = [int(first) * 2**power for power in range(int(math.log2(last / first)) + 1)]
    return (*doubled, *(() if doubled[-1] == int(last) else (int(last),)))


def _checked(tokens: float) -> float:
    require(
        tokens >= 1,
        "tokens",
        tokens,
        expected="a context of at least 1 token",
    )
    return tokens
