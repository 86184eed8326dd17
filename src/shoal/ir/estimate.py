"""Predicted numbers, each with its interval, and the bottleneck of a predicted job."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from shoal.core.config import Value
from shoal.core.errors import ConfigError
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits


class Interval(Value):
    """A 90 % interval: ``low <= value <= high``, all in one unit."""

    value: float
    low: float
    high: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.value <= self.high:
            raise ConfigError(
                f"interval {self.low:g} .. {self.value:g} .. {self.high:g}: not in order"
            )
        return self

    @classmethod
    def around(cls, value: float, spread: float) -> Interval:
        """``value`` with a factor of ``1 + spread`` to either side."""
        return cls(value=value, low=value / (1 + spread), high=value * (1 + spread))

    @classmethod
    def exact(cls, value: float) -> Interval:
        """``value`` without a spread, where none is predicted."""
        return cls(value=value, low=value, high=value)

    def scaled(self, factor: float) -> Interval:
        """All three numbers times a positive factor."""
        return Interval(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def shifted(self, offset: float) -> Interval:
        """The same amount wide, and so much further."""
        return Interval(value=self.value + offset, low=self.low + offset, high=self.high + offset)

    def capped(self, most: float) -> Interval:
        """No number above the largest possible value, such as 1 for a share."""
        return Interval(
            value=min(self.value, most), low=min(self.low, most), high=min(self.high, most)
        )

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high


def cells(interval: Interval | None, size: float = 1.0) -> tuple[str, str]:
    """Value and ends in a unit of that size, as two cells of a table; empty for None."""
    if interval is None:
        return "", ""
    value, low, high = (digits(x / size) for x in (interval.value, interval.low, interval.high))
    return value, f"{low}-{high}" if interval.low < interval.high else ""


class Estimate(Value):
    """What a job, or one part of it, costs.

    Args:
        step_s: seconds of one step on the critical path.
        terms_s: cause -> seconds, which add up to ``step_s.value``; causes are
            ``matmul``, ``attention``, ``memory``, ``overhead``, ``optimizer``,
            ``collective``, ``bubble``, ``data``.
        memory_bytes: cause -> bytes per rank: ``weights``, ``gradients``,
            ``optimizer``, ``activations``, ``logits``, ``runtime``; of a fine-tuning run ``base``
            and ``adapter`` in the place of weights; of an offloaded run by tier: ``device``,
            ``host``, ``disk``, and ``runtime``.
        wire_bytes: link scope -> bytes each rank sends in one step.
        flops: floating-point operations of one step, all ranks.
        tokens: tokens of one step.
        total_s: seconds of the whole job, when its length is known.
        whole_s: cause -> seconds of the whole job, which add up to ``total_s.value``; causes are
            ``steps``, ``evaluation``, ``saves``, ``failures``.
        energy_j: joules of the whole job.
        usd: price of the whole job.
        bound: what limits the step: compute, memory, network, bubble or overhead.
    """

    step_s: Interval
    terms_s: dict[str, float] = {}
    memory_bytes: dict[str, float] = {}
    wire_bytes: dict[str, float] = {}
    flops: float = 0.0
    tokens: float = 0.0
    total_s: Interval | None = None
    whole_s: dict[str, float] = {}
    energy_j: Interval | None = None
    usd: Interval | None = None
    bound: str = ""

    @property
    def memory_total(self) -> float:
        """Bytes of memory per rank; what lies on disk is none."""
        return sum(size for cause, size in self.memory_bytes.items() if cause != "disk")

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole job."""
        return self.tokens / self.step_s.value if self.step_s.value else 0.0

    @property
    def tokens_per_s_interval(self) -> Interval:
        """The same with its interval: the ends are those of the step, the other way round."""
        step = self.step_s
        return Interval(
            value=self.tokens / step.value,
            low=self.tokens / step.high,
            high=self.tokens / step.low,
        )

    def tables(
        self,
        *,
        title: str = "step time by cause",
        memory_title: str = "memory per rank",
    ) -> list[Table]:
        """Time of a step and memory by cause, of what is above 0."""
        total = self.step_s.value
        times = tuple(
            (cause, f"{digits(1e3 * seconds)} ms", f"{seconds / total:.0%}")
            for cause, seconds in sorted(self.terms_s.items(), key=lambda item: -item[1])
            if seconds > 0
        )
        memory = tuple((k, human_bytes(size)) for k, size in self.memory_bytes.items() if size)
        both = (title, ("", "", ""), times, " rr"), (memory_title, ("", ""), memory, " r")
        return [
            Table(title=words, columns=columns, rows=rows, right=right)
            for words, columns, rows, right in both
            if rows
        ]
