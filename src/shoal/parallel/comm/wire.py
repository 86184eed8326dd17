"""What a rank puts on the wire, by the formulas of the ring, and on which links.

One rank of w sends, for n bytes:

==================  ======================================================
all_reduce          2 n (w - 1) / w: n is the tensor
all_gather          n (w - 1) / w: n is the gathered tensor
reduce_scatter      n (w - 1) / w: n is the tensor before it is scattered
broadcast, reduce   n (w - 1) / w: a ring passes it on and its last rank sends
                    nothing; the mean over the ranks
all_to_all          the sum of what goes to others
send                n
barrier             nothing
==================  ======================================================

All but the last three travel from each rank to its successor in the communicator, so they
count for the link between these two; all_to_all and send count for the link of each pair.
A link between ranks of one node has the scope of the communicator (``device`` on GPUs,
``loopback`` on CPUs), one between nodes ``node``.

Source: Thakur, Rabenseifner and Gropp, Optimization of Collective Communication
Operations in MPICH, 2005 (the ring algorithms); Patarasuk and Yuan, 2009 (all-reduce).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core.errors import require

if TYPE_CHECKING:
    from shoal.core.meter import Meter

BLOCK = 256
"""Values that share a scale where numbers travel in a few bits."""


def ring_all_reduce_bytes(nbytes: float, world: int) -> float:
    """Bytes one rank sends to all-reduce ``nbytes`` over ``world`` ranks in a ring."""
    return 2.0 * nbytes * (world - 1) / world


def ring_gather_bytes(nbytes: float, world: int) -> float:
    """Bytes one rank sends to all-gather, or reduce-scatter, ``nbytes`` of full size."""
    return nbytes * (world - 1) / world


def packed_bytes(values: int, bits: int) -> int:
    """Bytes of so many values in ``bits`` each, with an fp32 scale for every block of them."""
    return math.ceil(values * bits / 8) + 4 * math.ceil(values / BLOCK)


class TrafficCounter:
    """Counts what one rank of a communicator sends, by link class.

    Args:
        meter: where ``wire_bytes`` are counted, by op, tag and scope.
        ranks: the communicator's ranks, by their numbers in the whole job.
        scope: class of a link inside a node.
        ranks_per_node: ranks of one node, neighbours by number; None if there is one node.
    """

    def __init__(
        self,
        meter: Meter,
        rank: int,
        ranks: Sequence[int],
        *,
        scope: str,
        ranks_per_node: int | None,
    ) -> None:
        require(
            ranks_per_node is None or ranks_per_node >= 1,
            "ranks_per_node",
            ranks_per_node,
            expected="at least 1",
        )
        self.meter = meter
        self.rank = rank
        self.ranks = tuple(ranks)
        self.scope = scope
        self.ranks_per_node = ranks_per_node

    def of(self, rank: int, ranks: Sequence[int]) -> TrafficCounter:
        """The same for another communicator of this rank."""
        return TrafficCounter(
            self.meter, rank, ranks, scope=self.scope, ranks_per_node=self.ranks_per_node
        )

    def to(self, peer: int) -> str:
        """Class of the link to ``peer``, a number in the communicator."""
        size = self.ranks_per_node
        if size is None or self.ranks[self.rank] // size == self.ranks[peer] // size:
            return self.scope
        return "node"

    def ring(self, op: str, nbytes: float, tag: str) -> None:
        """Count bytes that go to the successor in the ring."""
        scope = self.to((self.rank + 1) % len(self.ranks))
        self.meter.add("wire_bytes", nbytes, op=op, tag=tag, scope=scope)

    def pair(self, op: str, nbytes: float, tag: str, peer: int) -> None:
        """Count bytes that go to ``peer``; to itself nothing is sent."""
        if peer != self.rank:
            self.meter.add("wire_bytes", nbytes, op=op, tag=tag, scope=self.to(peer))
