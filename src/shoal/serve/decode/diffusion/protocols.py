"""What the parts of diffusion decoding promise to its loop.

Shapes: B requests of a step, W places of a block (shorter blocks are filled up with places that
are not masked), V vocabulary, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Window = tuple[int, int]
"""First place of a request that is computed, and the one behind the last."""


@dataclass
class UnmaskState:
    """What an unmasking policy knows beside scores.

    Args:
        step: iterations of each block before this one, int64 [B].
        size: places of each block, int64 [B].
        bar: raises a threshold to what holds in this iteration [B].
        noise: [B, W, V], added to scores before the best token is taken, where tokens are sampled.
        memory: [B, W, V], the policy's own, from the last iteration of the same block; zeros in the
            first. A policy that keeps something puts it here.
    """

    step: Tensor
    size: Tensor
    bar: Callable[[float], Tensor]
    noise: Tensor | None = None
    memory: Tensor | None = None


class Unmask(Protocol):
    """A part of kind ``unmask``: which places of a block become text now."""

    def select(
        self, logits_BWV: Tensor, masked_BW: Tensor, state: UnmaskState
    ) -> tuple[Tensor, Tensor]:
        """The token of every place [B, W], and at which places it is kept, bool [B, W].

        Only masked places are kept, and at least one of each request that has one: that is what
        makes the loop end.

        Args:
            logits_BWV: scores, fp32 or fp64; anything where nothing is masked.
            masked_BW: bool, the places that are still masks.
            state: of this iteration.
        """


class Refresh(Protocol):
    """A part of kind ``refresh``: what is recomputed after later tokens have changed."""

    def window(self, block: Window, length: int, step: int) -> Window:
        """Places that an iteration computes; all others are seen as they stand in the cache.

        ``(0, length)`` computes everything. The block itself is always part of it, and the first
        iteration of a block computes everything or what the last blocks have left stale.

        Args:
            block: that is worked on.
            length: tokens and masks of the request.
            step: iterations of this block before.
        """


class Iteration(Protocol):
    """A part of kind ``iteration``: what the model sees at a mask, and how sure it must be."""

    smooths: bool
    """Whether :meth:`inputs` has any use for the last scores."""

    def inputs(
        self, masks_BWD: Tensor, last_BWV: Tensor, embedding_VD: Tensor, step_B: Tensor
    ) -> Tensor:
        """Inputs [B, W, D] at masked places.

        Args:
            masks_BWD: the embedding of the mask.
            last_BWV: scores of the last iteration of the same block.
            embedding_VD: of all tokens.
            step_B: iterations of each block before; where it is 0 there are no scores yet.
        """

    def bar(self, threshold: float, step_B: Tensor) -> Tensor:
        """The threshold that holds in this iteration [B]."""
