"""What layouts promise, and what they lay out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Protocol, runtime_checkable

if TYPE_CHECKING:
    from shoal.serve.decode.hogwild.blocks import HogwildBlock


@dataclass(slots=True, kw_only=True)
class BlockSpace:
    """The blocks of the workers of one request.

    Args:
        prompt: what all have been given, and then the finished steps of all.
        own: name of each worker -> the block it writes to.
        history: steps that were finished just now, in the order in which they were.
        headers: header blocks: ``others`` and ``own``, if there are any.
    """

    prompt: HogwildBlock
    own: dict[str, HogwildBlock]
    history: list[HogwildBlock] = field(default_factory=list)
    headers: dict[str, HogwildBlock] = field(default_factory=dict)

    def others(self, worker: str) -> list[HogwildBlock]:
        """What the others write, in the order of their names for every worker."""
        return [self.own[name] for name in sorted(self.own) if name != worker]


@runtime_checkable
class HogwildLayout(Protocol):
    """A part of kind ``hogwild_layout``: what a worker attends to, in which order. Keeps no state.

    Attributes:
        moves: a finished step goes from its worker's block to the common history.
        headers: which headers of a space it has; ``history`` ends the prompt.
    """

    moves: ClassVar[bool]
    headers: ClassVar[tuple[str, ...]]

    def blocks(self, space: BlockSpace, worker: str) -> Sequence[HogwildBlock]:
        """The view of a worker; its own block comes last, and no block twice."""
