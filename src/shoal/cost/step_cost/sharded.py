"""A step's time on ranks that share the model: layers split over some, assigned to others.

Arithmetic and memory divide by the ranks of a layer, which exchange two sums of it; each stage
sends its tokens to the next. What the host does for a step is done once.

Source: Zhong et al., DistServe, 2024, section 3 (both ways to split an instance).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from shoal.cost.price.collectives import all_reduce_s, send_s
from shoal.cost.step_cost.roofline import BYTES, Roofline, Terms
from shoal.ir import Link

_LENGTH = itemgetter(1)


@dataclass(frozen=True)
class ShardedStepCost:
    """A step's time on ``tp`` ranks that share every layer and ``pp`` that share the layers.

    It is that of all stages, one after the other; each has a share of 1 / ``pp`` of it.

    Args:
        roofline: of the whole model on one rank.
        link: between ranks; None where nothing is known of it, and nothing is counted.
    """

    roofline: Roofline
    tp: int
    pp: int
    link: Link | None

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.terms(chunks).total

    def terms(self, chunks: Sequence[tuple[int, int]]) -> Terms:
        """Seconds of a step of ``chunks`` (tokens before, tokens in it), by cause."""
        terms, shape = self.roofline.terms(chunks), self.roofline.shape
        size = sum(map(_LENGTH, chunks)) * shape.hidden * BYTES[self.roofline.precision]
        sums = 2 * shape.num_layers * all_reduce_s(size, self.tp, self.link)
        return Terms(
            terms.matmul / self.tp,
            terms.attention / self.tp,
            terms.memory / self.tp,
            terms.overhead,
            sums + (self.pp - 1) * send_s(size, self.link),
        )
