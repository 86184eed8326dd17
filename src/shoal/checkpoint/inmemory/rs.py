"""Several parities for a stripe: Reed-Solomon in memory.

Source: Reed, Solomon, Polynomial Codes over Certain Finite Fields, 1960; Plank, Ding, Note:
Correction to the 1997 Tutorial on Reed-Solomon Coding, 2003.
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
class ReedSolomon(MemoryCodeBase):
    """Survives the loss of ``losses`` members of a group, for losses / (n - losses) more memory.

    Args:
        losses: members of a group that may be lost at once.
    """

    losses: Annotated[int, Ge(1)] = 2

    def __post_init__(self) -> None:
        MemoryCodeBase.__post_init__(self)

    def check(self, members: int) -> None:
        """Refuse a group that is not larger than the losses.

        Raises:
            ConfigError: no member would be left to rebuild from.
        """
        MemoryCodeBase.check(self, members)
        require(
            self.losses < members,
            "checkpoint.memory.rs.losses",
            self.losses,
            expected=f"fewer than the {members} members of a group",
        )

    def data(self, members: int) -> int:
        """Blocks of the members that keep no parity of the stripe."""
        return members - self.losses

    def parity(self, members: int) -> int:
        return self.losses

    def matrix(self, members: int) -> Bytes:
        """A Vandermonde matrix made systematic."""
        from shoal.checkpoint.inmemory.field import generator_matrix

        return generator_matrix(self.data(members), self.losses)
