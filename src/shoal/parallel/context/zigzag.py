"""Ring attention in which rank n holds chunks n and 2N - 1 - n: causal work is balanced.

Source: Zhu et al., ring-flash-attention, 2024 (the assignment); Li et al., LightSeq, 2023
(the imbalance of causal rings).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Self

from shoal.core.parts import part
from shoal.ir import Machine, Work
from shoal.parallel.context.ring import RingAttention


@part
class Zigzag(RingAttention):
    """Ring exchange of keys and values; every rank holds an early and a late chunk (default)."""

    name: ClassVar[str] = "zigzag"
    paired: ClassVar[bool] = True

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Of all sequences that ranks share."""
        yield cls()
