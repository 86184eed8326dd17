"""What a balancer promises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Balancer(Protocol):
    """Chooses a replica for each request. Uses no clock and asks no replica."""

    def choose(
        self, prompt: str | Sequence[int], loads: Mapping[int, int], *, salt: str = ""
    ) -> int:
        """The replica that a request shall go to; remembers that it went there.

        Args:
            prompt: text, or tokens.
            loads: replica that takes requests -> requests that it has open; at least one.
            salt: prompts are alike only where it is the same.
        """

    def forget(self, replica: int) -> None:
        """A replica has restarted with an empty cache."""


class BalancerPart(Protocol):
    """A part of kind ``balancer``."""

    def build(self) -> Balancer:
        """A balancer that has seen nothing."""
