"""What is gathered together: the blocks of a model, and around them the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from shoal.parallel.protocols import Comm


def units(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Blocks, and the modules around them whose forward passes are called.

    A model that is the stages of one rank names them with its method ``units``, blocks first
    and stages after them; any other model is its ``blocks`` and itself.
    """
    listed: Callable[[], list[nn.Module]] | None = getattr(model, "units", None)
    if listed is None:
        return list(getattr(model, "blocks", [])), [model]
    blocks = list(getattr(model, "blocks", {}).values())
    inner = {id(block) for block in blocks}
    return blocks, [module for module in listed() if id(module) not in inner]


def check_divided(comm: Comm, *, whole_matrices: bool) -> None:
    """Refuse to divide matrices that must stay whole, or to divide among one rank.

    Raises:
        ConfigError: says which sharding to use instead.
    """
    if whole_matrices:
        raise ConfigError(
            "shard: this optimizer needs whole matrices and zero2, zero3, hybrid and topo3 split "
            "them; use shard: zero1 or replicated, or optimizer: adamw"
        )
    if comm.world == 1:
        raise ConfigError(
            "shard: zero2, zero3, hybrid and topo3 divide over ranks and there is one; "
            "use shard: replicated, or parallel.dp of 2 or more"
        )


def on_one_node(comm: Comm) -> int:
    """How many of the ranks stand on the node of the first one."""
    size = comm.ranks_per_node
    if size is None:
        return comm.world
    return sum(rank // size == comm.ranks[0] // size for rank in comm.ranks)
