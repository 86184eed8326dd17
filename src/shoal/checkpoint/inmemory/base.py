"""The options that every code has: when, between whom, and how gently."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le

from shoal.core.errors import require
from shoal.core.parts import part
from shoal.core.sizes import Size

_MEMBERS = 255


@part
class MemoryCodeBase:
    """What the codes share.

    Args:
        every: steps between snapshots, which is also the largest loss after a failure.
        group: members of a group, each on a different node; 0 for one member on every node.
        ranks_per_node: ranks that are lost together with a node.
        bucket: bytes that are copied or sent at once, such as 4MiB.
        max_overhead: largest slowdown of a step by copying, as a share.
    """

    every: Annotated[int, Ge(1)] = 1
    group: int = 0
    ranks_per_node: Annotated[int, Ge(1)] = 1
    bucket: Annotated[Size, Ge(4096)] = 4 * 2**20
    max_overhead: Annotated[float, Gt(0), Le(1)] = 0.02

    def __post_init__(self) -> None:
        where = "checkpoint.memory"
        require(
            self.group == 0 or 2 <= self.group <= _MEMBERS,
            f"{where}.group",
            self.group,
            expected=f"2 to {_MEMBERS} members, or 0 for one on every node",
        )

    def check(self, members: int) -> None:
        """Refuse a group of so many members.

        Raises:
            ConfigError: there is no other rank to keep the parity.
        """
        require(
            2 <= members <= _MEMBERS,
            "checkpoint.memory: members of a group",
            members,
            expected=f"2 to {_MEMBERS} replicas (parallel.dp) on different nodes",
            hint="parity on the node that holds the data is lost with it; use more replicas, "
            "a smaller ranks_per_node, or leave checkpoint.memory out",
        )
