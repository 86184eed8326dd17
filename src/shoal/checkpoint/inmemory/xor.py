"""One parity for the blocks of all others: RAID-5 in memory.

Source: Wang et al., Reliable and Efficient In-Memory Fault Tolerance of Large Language Model
Pretraining, 2023, section 4; Patterson, Gibson, Katz, RAID, 1988.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.checkpoint.inmemory.base import MemoryCodeBase
from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.checkpoint.inmemory.field import Bytes


@part
class Xor(MemoryCodeBase):
    """Survives the loss of one member of a group, for 1 / (n - 1) more memory.

    The usual choice: every member stores, beside its shard, the XOR of one block of each other
    member.
    """

    def data(self, members: int) -> int:
        """A piece is cut into a block for each other member."""
        return members - 1

    def parity(self, members: int) -> int:
        return 1

    def matrix(self, members: int) -> Bytes:
        """The identity and a row of ones."""
        import numpy as np

        rows = np.eye(members, members - 1, dtype=np.uint8)
        rows[-1] = 1
        return rows
