"""The replica with the fewest open requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from shoal.core.parts import part


@part
class LeastLoaded:
    """Send a request to the replica with the fewest open requests."""

    def build(self) -> LeastLoadedBalancer:
        return LeastLoadedBalancer()


class LeastLoadedBalancer:
    """The balancer that :class:`LeastLoaded` builds; of equals, the one chosen least."""

    def __init__(self) -> None:
        self._chosen: Counter[int] = Counter()

    def choose(
        self, prompt: str | Sequence[int], loads: Mapping[int, int], *, salt: str = ""
    ) -> int:
        best = min(loads, key=lambda replica: (loads[replica], self._chosen[replica], replica))
        self._chosen[best] += 1
        return best

    def forget(self, replica: int) -> None:
        """Nothing was remembered."""
