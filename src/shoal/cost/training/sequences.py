"""What a training step costs sequence by sequence: alpha s^2 + beta s + gamma, and the exchange.

A sequence of s tokens takes ``quadratic_s`` s^2 for its attention and ``linear_s`` s for all else,
forward and backward; every pass takes ``fixed_s`` beside. d ranks that share sequences divide both
terms, and exchange keys and values along a ring, which is hidden where attention takes longer, or
swap heads for sequence (Ulysses), which is not.

Sources: Wang et al., FlexSP, 2024, section 4.1 (the model); Ge et al., ByteScale, 2025, section 5
(activations that go to the host behind a layer's computing).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shoal.core.errors import require
from shoal.cost.arithmetic import activation_bytes, flops_by_op
from shoal.cost.context.traffic import ring_traffic, ulysses_traffic
from shoal.cost.price.host_link import copy_bytes_per_s
from shoal.cost.price.rates import RankRates, ranks_per_host
from shoal.ir import Machine, ModelShape, Parallel

Exchange = Literal["ring", "ulysses"]
"""How ranks that share sequences reach each other's keys and values."""


@dataclass(frozen=True, kw_only=True)
class SequenceCost:
    """Seconds and bytes of passes over some sequences, forward and backward.

    Args:
        quadratic_s: alpha, s a squared token.
        linear_s: beta, s a token.
        fixed_s: gamma, s a pass.
        layers: layers that exchange.
        heads: query heads.
        kv_heads: key/value heads.
        head_dim: width of a head.
        itemsize: bytes of an element of keys and values.
        links: (ranks of a block of neighbours, byte/s of one rank), the smallest first; the last
            reaches all ranks.
        latency_s: s of a message.
        host_s: s that the activations of a token take to the host; None where unknown.
        kept_bytes: that the blocks keep of a token for the backward pass.

    Raises:
        ConfigError: a coefficient that is below 0 or no number.
    """

    quadratic_s: float
    linear_s: float
    fixed_s: float = 0.0
    layers: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1
    itemsize: int = 2
    links: tuple[tuple[int, float], ...] = ((1, math.inf),)
    latency_s: float = 0.0
    host_s: float | None = None
    kept_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("quadratic_s", "linear_s", "fixed_s", "latency_s", "host_s", "kept_bytes"):
            value = getattr(self, name)
            require(
                (name == "host_s" and value is None) or (math.isfinite(value) and value >= 0.0),
                f"cost.{name}",
                value,
                expected="a number of "
                + ("bytes" if name == "kept_bytes" else "seconds")
                + ", at least 0",
                hint="fit the cost again, with lengths that differ",
            )

    @classmethod
    def of(
        cls,
        shape: ModelShape,
        flops_per_s: float,
        links: Sequence[tuple[int, float]],
        *,
        itemsize: int = 2,
        fixed_s: float = 0.0,
        latency_s: float = 0.0,
        host_bytes_per_s: float | None = None,
    ) -> SequenceCost:
        """From counts of operations and one rate of all of them.

        Args:
            shape: the model.
            flops_per_s: that a rank reaches.
            links: see the class.
            itemsize: bytes of an element.
            fixed_s: gamma.
            latency_s: s of a message.
            host_bytes_per_s: byte/s from the device to the host.
        """
        ops = flops_by_op(shape, 1)
        kept = activation_bytes(shape, 1, 1, precision="bf16" if itemsize == 2 else "fp32")
        return cls(
            # A token at place t sees t + 1 keys, so s of them see about s^2 / 2.
            quadratic_s=ops["attention"] / 2 / flops_per_s,
            linear_s=(ops["linear"] + ops["logits"]) / flops_per_s,
            fixed_s=fixed_s,
            layers=shape.num_layers,
            heads=shape.num_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            itemsize=itemsize,
            links=tuple(links),
            latency_s=latency_s,
            host_s=None if host_bytes_per_s is None else kept / host_bytes_per_s,
            kept_bytes=kept,
        )

    @classmethod
    def on(
        cls, shape: ModelShape, machine: Machine, parallel: Parallel, *, precision: str = "bf16"
    ) -> SequenceCost:
        """The same with the rates of one rank of a machine; every rank has a link of its own."""
        rate = RankRates(machine, parallel).matmul_curve(precision)(float(shape.hidden))
        inside = ranks_per_host(machine, parallel)
        if machine.device.kind != "cpu":
            inside = min(inside, machine.devices_per_node)
        near = machine.link("loopback" if machine.device.kind == "cpu" else "device")
        far = machine.link("node") or near
        link = near if parallel.world <= inside else far
        links = []
        if near is not None and inside < parallel.world:
            links.append((inside, near.bandwidth))
        links.append((parallel.world, math.inf if link is None else link.bandwidth))
        return cls.of(
            shape,
            rate,
            links,
            itemsize=2 if precision == "bf16" else 4,
            latency_s=0.0 if link is None else link.latency_s,
            host_bytes_per_s=copy_bytes_per_s(machine),
        )

    def compute_s(self, lengths: np.ndarray) -> np.ndarray:
        """Seconds of each sequence on one rank, without what a pass takes beside."""
        array: np.ndarray = lengths * (self.quadratic_s * lengths + self.linear_s)
        return array

    def bandwidth(self, ranks: Sequence[int]) -> float:
        """Byte/s of one rank over the slowest link between these, which are in rising order."""
        for block, rate in self.links[:-1]:
            if ranks[0] // block == ranks[-1] // block:
                return rate
        return self.links[-1][1]

    def exchange_bytes(self, tokens: float, degree: int, how: Exchange) -> float:
        """Bytes that one of ``degree`` ranks sends for ``tokens`` of all of them, all layers."""
        if degree == 1:
            return 0.0
        return self.layers * _traffic(self, degree, how)[0] * tokens / degree

    def pass_s(self, lengths: Sequence[float], ranks: Sequence[int], how: Exchange) -> float:
        """Seconds of one pass over some sequences that ``ranks`` share evenly."""
        squares, tokens = float(sum(s * s for s in lengths)), float(sum(lengths))
        return self.sums_s(squares, tokens, len(ranks), self.bandwidth(sorted(ranks)), how)

    def sums_s(
        self, squares: float, tokens: float, degree: int, bandwidth: float, how: Exchange
    ) -> float:
        """The same from the sums of squared lengths and of lengths."""
        attention = self.quadratic_s * squares / degree
        seconds = attention + self.linear_s * tokens / degree + self.fixed_s
        if degree == 1:
            return seconds
        each, messages, hidden = _traffic(self, degree, how)
        sent = self.layers * each * tokens / degree / bandwidth
        if hidden:  # the first of the blocks needs no message, and hides one
            sent = max(0.0, sent - attention * (degree - 1) / degree)
        return seconds + sent + self.layers * messages * self.latency_s

    def offloaded(self, length: int, degree: int) -> float:
        """Share of a sequence's activations that goes to the host while its layers compute."""
        if self.host_s is None:
            return 0.0
        if self.host_s == 0.0:
            return 1.0
        forward = float(self.compute_s(np.asarray(float(length)))) / degree / 3
        return min(1.0, forward / (self.host_s * length / degree))

    def legal(self, degree: int, how: Exchange) -> bool:
        """Whether so many ranks can share a sequence: Ulysses does not split heads."""
        if how == "ring":
            return True
        most, least = max(degree, self.kv_heads), min(degree, self.kv_heads)
        return self.heads % degree == 0 and most % least == 0


@functools.lru_cache(maxsize=4096)
def _traffic(cost: SequenceCost, degree: int, how: Exchange) -> tuple[int, int, bool]:
    """Bytes of one token of each rank in one layer, messages, and whether they are hidden."""
    closed = ring_traffic if how == "ring" else ulysses_traffic
    result = closed(1, cost.heads, cost.kv_heads, cost.head_dim, degree)
    each = result.forward.num_bytes(cost.itemsize) + result.backward.num_bytes(cost.itemsize)
    return each, result.messages, result.hidden
