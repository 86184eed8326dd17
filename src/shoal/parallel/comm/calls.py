"""What calls of a communicator must look like, and how they are shown in errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.core.errors import RankError, require

if TYPE_CHECKING:
    from torch import Tensor


def check_member(rank: int, world: int) -> None:
    """Refuse a peer that the communicator does not have.

    Raises:
        RankError: the number is beyond its ranks.
    """
    require(0 <= rank < world, "rank", rank, expected=f"0 to {world - 1}", error=RankError)


def check_partition(groups: Sequence[Sequence[int]], world: int) -> tuple[tuple[int, ...], ...]:
    """The groups as tuples.

    Raises:
        RankError: some rank is in none of them, or in two, or a group is not in rank order.
    """
    named = tuple(tuple(int(rank) for rank in group) for group in groups)
    require(
        sorted(rank for group in named for rank in group) == list(range(world))
        and all(list(group) == sorted(group) for group in named),
        "groups",
        [list(group) for group in named],
        expected=f"every rank of 0 to {world - 1} in exactly one group, in rank order",
        error=RankError,
    )
    return named


def check_parts(op: str, whole: Tensor, part: Tensor, world: int) -> None:
    """Refuse a whole that is not ``world`` parts.

    Raises:
        RankError: the sizes or types do not fit, or the tensors are not contiguous.
    """
    require(
        whole.numel() == world * part.numel() and whole.dtype == part.dtype,
        f"{op} of {world} ranks",
        f"{shown(whole)} and {shown(part)}",
        expected=f"one type, and a tensor of {world} times the other's size",
        error=RankError,
    )
    require(
        whole.is_contiguous() and part.is_contiguous(),
        op,
        f"strides {whole.stride()} and {part.stride()}",
        expected="contiguous tensors",
        error=RankError,
    )


def check_pairs(outs: Sequence[Tensor], xs: Sequence[Tensor], world: int) -> None:
    """Refuse an all-to-all without one tensor for each rank.

    Raises:
        RankError: there are more or fewer.
    """
    require(
        len(outs) == len(xs) == world,
        "all_to_all",
        f"{len(outs)} outputs and {len(xs)} inputs",
        expected=f"{world} of each, one a rank",
        error=RankError,
    )


def check_peer(peer: int, rank: int, world: int) -> None:
    """Refuse a message to oneself, or beyond the communicator.

    Raises:
        RankError: names the peers that there are.
    """
    check_member(peer, world)
    require(
        peer != rank, "rank", peer, expected=f"another rank than {rank} itself", error=RankError
    )


def like(x: Tensor) -> tuple[Any, ...]:
    """Shape and type: what the ranks of a collective must agree on."""
    return (tuple(x.shape), str(x.dtype).removeprefix("torch."))


def shown(x: Tensor) -> str:
    """Type and shape for an error."""
    shape, dtype = like(x)
    return f"{dtype}{list(shape)}"
