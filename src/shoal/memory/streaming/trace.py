"""The order in which parameters are used, as the pass before has shown it.

Source: Rajbhandari et al., ZeRO-Infinity, 2021, section 6.2 (dynamic prefetcher).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class PassTrace(Generic[_T]):
    """Records one pass, and then says in each further one what comes next.

    A pass that deviates is recorded again from there on, without prefetching.

    Args:
        name: of the passes, for the warning.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.violations = 0
        self._order: list[_T] = []
        self._known = False
        self._at = 0

    @property
    def known(self) -> bool:
        """Whether the order is known and this pass has followed it so far."""
        return self._known

    def begin(self) -> None:
        """A pass begins."""
        self._at = 0
        if not self._known:
            self._order = []

    def use(self, item: _T) -> None:
        """Something is used now."""
        if self._known and (self._at >= len(self._order) or self._order[self._at] is not item):
            self._broken()
        if not self._known:
            self._order.append(item)
        self._at += 1

    def upcoming(self) -> Iterator[_T]:
        """What is used after what was used last, in order; nothing while the order is unknown."""
        if self._known:
            for at in range(self._at, len(self._order)):
                yield self._order[at]

    def end(self) -> None:
        """The pass is over."""
        if self._known and self._at != len(self._order):
            self._broken()
        self._known = True

    def forget(self) -> None:
        """A pass was broken off; record the next one."""
        self._known = False

    def _broken(self) -> None:
        if not self.violations:
            warnings.warn(
                f"{self.name} passes use parameters in another order than before; they are "
                "fetched when they are used until the order is known again",
                RuntimeWarning,
                stacklevel=4,
            )
        self.violations += 1
        self._known = False
        self._order = self._order[: self._at]
