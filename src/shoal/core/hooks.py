"""An ordered list of hooks: what techniques do at the moments of a fixed skeleton.

A skeleton (a step of the trainer, a run of it) calls every hook of its list at each of its moments.
The order is that of a tuple of kinds, stated in one place beside the moments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

from shoal.core.errors import require


class Hook:
    """Base class of all hooks.

    Attributes:
        kind: its place in the order; at most one hook of a kind is in a list. Without one it is
            the name of the class.
        after: of a kind that the order does not name: the kind that it follows, as do those that
            were added before.
    """

    kind: ClassVar[str] = ""
    after: ClassVar[str] = ""


H = TypeVar("H", bound=Hook)


class Hooks(Generic[H]):
    """Hooks in the order of their kinds, whatever order they were added in.

    Args:
        order: the kinds, first to last.
    """

    def __init__(self, order: Sequence[str]) -> None:
        self._order = list(order)
        self._followed: dict[str, str] = {}
        self._hooks: dict[str, H] = {}

    def add(self, hook: H) -> None:
        """Add a hook.

        Raises:
            ConfigError: a hook of its kind is there, or the order does not know the kind nor the
                one that it is to follow.
        """
        kind = hook.kind or type(hook).__name__
        require(
            kind not in self._hooks,
            f"hook {type(hook).__name__}: kind",
            kind,
            expected="a kind of which there is no hook yet",
        )
        if kind not in self._order:
            require(
                hook.after in self._order,
                f"hook {type(hook).__name__}: kind {kind} is not in the order, and after",
                hook.after,
                expected=f"one of {', '.join(self._order)}",
            )
            at = self._order.index(hook.after) + 1
            while at < len(self._order) and self._followed.get(self._order[at]) == hook.after:
                at += 1
            self._order.insert(at, kind)
            self._followed[kind] = hook.after
        self._hooks[kind] = hook

    def __iter__(self) -> Iterator[H]:
        return (self._hooks[kind] for kind in self._order if kind in self._hooks)

    def __getitem__(self, kind: str) -> H:
        """The hook of a kind; KeyError if there is none."""
        return self._hooks[kind]
