"""One replica after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.core.parts import part


@part
class RoundRobin:
    """Send requests to the replicas in turn; the baseline of the other balancers."""

    def build(self) -> RoundRobinBalancer:
        return RoundRobinBalancer()


class RoundRobinBalancer:
    """The balancer that :class:`RoundRobin` builds."""

    def __init__(self) -> None:
        self._last = -1

    def choose(
        self, prompt: str | Sequence[int], loads: Mapping[int, int], *, salt: str = ""
    ) -> int:
        later = [replica for replica in loads if replica > self._last]
        self._last = min(later or loads)
        return self._last

    def forget(self, replica: int) -> None:
        """Nothing was remembered."""
