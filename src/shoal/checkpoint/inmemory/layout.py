"""Which bytes of the state each replica keeps.

Replicas hold the same boxes of the same tensors, so each keeps its share of the bytes: what ``h``
ranks hold is cut in ``h`` parts, what one rank alone holds it keeps whole. All ranks compute the
same from the lists of all.

Source: Wang et al., Reliable and Efficient In-Memory Fault Tolerance of Large Language Model
Pretraining, 2023, section 4.1 (sharded snapshots).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shoal.core.config import Value
from shoal.core.errors import ConfigError

_ALIGN = 64


class BoxEntry(NamedTuple):
    """A box of a tensor that a rank holds.

    Args:
        name: of the tensor.
        dtype: as torch spells it, such as float32.
        whole: shape of the tensor.
        offset: where the box begins.
        nbytes: of the box.
    """

    name: str
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int


class BoxSegment(Value):
    """Bytes of a box that a rank keeps.

    Args:
        name: of the tensor.
        dtype: as torch spells it.
        whole: shape of the tensor.
        offset: where the box begins.
        first: first byte of the box that is kept.
        last: one past the last one.
        at: where they begin in the rank's piece.
    """

    name: str
    dtype: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    first: int
    last: int
    at: int


def shares(held: Mapping[int, Sequence[BoxEntry]]) -> dict[int, list[BoxSegment]]:
    """What each rank keeps.

    Args:
        held: rank -> everything it holds; ranks between which nothing is split but the data.
    """
    holders: dict[BoxEntry, list[int]] = {}
    for rank in sorted(held):
        for entry in held[rank]:
            holders.setdefault(entry, []).append(rank)
    classes: dict[tuple[int, ...], list[BoxEntry]] = {}
    for entry, ranks in holders.items():
        classes.setdefault(tuple(ranks), []).append(entry)
    shares: dict[int, list[BoxSegment]] = {rank: [] for rank in held}
    ends = dict.fromkeys(held, 0)
    for owners, entries in classes.items():
        total = sum(entry.nbytes for entry in entries)
        share = -(-total // (len(owners) * _ALIGN)) * _ALIGN
        start = 0
        for entry in entries:
            first = 0
            while first < entry.nbytes:
                number = min((start + first) // share, len(owners) - 1)
                last = min(entry.nbytes, (number + 1) * share - start)
                rank = owners[number]
                shares[rank].append(
                    BoxSegment(
                        name=entry.name,
                        dtype=entry.dtype,
                        whole=entry.whole,
                        offset=entry.offset,
                        shape=entry.shape,
                        first=first,
                        last=last,
                        at=ends[rank],
                    )
                )
                ends[rank] += last - first
                first = last
            start += entry.nbytes
    return shares


def piece_bytes(segments: Sequence[BoxSegment]) -> int:
    """Bytes of a rank's piece."""
    return max((s.at + s.last - s.first for s in segments), default=0)


def coding_groups(ranks: Sequence[int], *, group: int, ranks_per_node: int) -> list[list[int]]:
    """Groups of replicas, each with at most one on a node.

    Args:
        ranks: the replicas, from first to last.
        group: members of a group; 0 for one on every node.
        ranks_per_node: ranks that are lost together.

    Raises:
        ConfigError: they cannot be grouped so.
    """
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    rows = list(nodes.values())
    size = group or len(rows)
    if len({len(row) for row in rows}) > 1 or len(rows) % size:
        raise ConfigError(
            f"checkpoint.memory: {len(ranks)} replicas on {len(rows)} nodes with "
            f"{', '.join(str(len(row)) for row in rows)} each cannot be put in groups of {size} "
            "with one on a node; change checkpoint.memory.group or ranks_per_node"
        )
    return [
        [row[column] for row in rows[first : first + size]]
        for first in range(0, len(rows), size)
        for column in range(len(rows[0]))
    ]


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> list[int]:
    """The group that a rank is in."""
    return next(list(group) for group in groups if rank in group)
