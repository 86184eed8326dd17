"""What a code over the members of a group promises.

The members of a group lie on different nodes, and each keeps a piece of the state. A code says
how many blocks of different members make a stripe (:meth:`MemoryCode.data`), how many parities
are kept for it by other members (:meth:`MemoryCode.parity`) and by which factors these are
sums of the blocks. ``stripes`` does the rest, alike for all codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from shoal.checkpoint.inmemory.field import Bytes


class MemoryCode(Protocol):
    """A part of kind ``memory_code``."""

    every: int
    """Steps between snapshots."""
    group: int
    """Members of a group; 0 for one on every node."""
    ranks_per_node: int
    """Ranks that are lost together."""
    bucket: int
    """Bytes that are copied, or sent, at a time."""
    max_overhead: float
    """Share of a step's time that copying may take."""

    def check(self, members: int) -> None:
        """Refuse a group of so many members that the code cannot serve."""

    def data(self, members: int) -> int:
        """Blocks of a stripe that are pieces of the state; a piece has as many."""

    def parity(self, members: int) -> int:
        """Blocks of a stripe that are computed: how many lost members a group survives."""

    def matrix(self, members: int) -> Bytes:
        """Rows [data + parity, data]: a stripe's blocks as sums of its first ones.

        Any ``data`` of the rows are independent.
        """
