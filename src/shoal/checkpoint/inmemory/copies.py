"""Whole copies with the next members of the group.

Source: Wang et al., Gemini: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints, 2023, section 4 (replicas on the following machines).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from shoal.checkpoint.inmemory.base import MemoryCodeBase
from shoal.core.errors import require
from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.checkpoint.inmemory.field import Bytes


@part
class ReplicaCode(MemoryCodeBase):
    """Survives the loss of ``copies`` members of a group, for ``copies`` times as much more memory.

    Needs no computation, neither for a snapshot nor for recovery.

    Args:
        copies: number of other members that store a copy of each shard.
    """

    copies: Annotated[int, Ge(1)] = 1

    def __post_init__(self) -> None:
        MemoryCodeBase.__post_init__(self)

    def check(self, members: int) -> None:
        """Refuse more copies than there are other members.

        Raises:
            ConfigError: two copies would lie on one node.
        """
        MemoryCodeBase.check(self, members)
        require(
            self.copies < members,
            "checkpoint.memory.copies.copies",
            self.copies,
            expected=f"fewer than the {members} members of a group",
        )

    def data(self, members: int) -> int:
        return 1

    def parity(self, members: int) -> int:
        return self.copies

    def matrix(self, members: int) -> Bytes:
        import numpy as np

        return np.ones((1 + self.copies, 1), np.uint8)
