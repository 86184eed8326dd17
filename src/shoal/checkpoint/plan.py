"""Who writes what: copies are written once, and every rank writes about as much.

Data-parallel ranks hold the same tensors. Each box is written by one of its holders: what has one
holder is his, then the largest of the others goes to the holder that has least so far, and so on
(worst fit, decreasing). Every rank comes to the same plan from the same proposals, so nobody has
to be told. Proposals travel when the layout changes; until then a plan is looked up.

Source: Wan et al., ByteCheckpoint, 2024, section 4.1 (deduplication, balance, plan cache).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shoal.checkpoint.image import Image, image_of
from shoal.checkpoint.pieces import Chosen, Given, Piece, as_pieces
from shoal.core.safetensors_header import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from shoal.checkpoint.peers import Peers

__all__ = ["Planned", "Planner", "Proposal", "assign"]

Box = tuple[str, tuple[int, ...], tuple[int, ...]]


class Proposal(NamedTuple):
    """A box that a rank holds.

    Args:
        name: of the tensor.
        offset: where it begins.
        shape: its size.
        bytes: its size in bytes.
    """

    name: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    bytes: int

    @property
    def box(self) -> Box:
        """What copies have in common."""
        return self.name, self.offset, self.shape


def assign(proposals: Sequence[Sequence[Proposal]]) -> list[list[int]]:
    """Rank -> numbers of its proposals that it writes; each box is written by one holder.

    Args:
        proposals: of every rank.
    """
    holders: dict[Box, list[tuple[int, int]]] = {}
    size: dict[Box, int] = {}
    for rank, own in enumerate(proposals):
        for number, proposal in enumerate(own):
            held = holders.setdefault(proposal.box, [])
            if not held or held[-1][0] != rank:  # twice on one rank is one copy
                held.append((rank, number))
            size[proposal.box] = proposal.bytes
    load = [0] * len(proposals)
    taken: list[list[int]] = [[] for _ in proposals]
    # Boxes of few holders leave no choice, so they come first; then the largest.
    for box in sorted(holders, key=lambda b: (len(holders[b]) > 1, -size[b], b)):
        rank, number = min(holders[box], key=lambda held: (load[held[0]], held[0]))
        load[rank] += size[box]
        taken[rank].append(number)
    return [sorted(numbers) for numbers in taken]


@dataclass(frozen=True, slots=True)
class Planned:
    """What this rank writes.

    Args:
        image: its file.
        picks: key in the file -> name of the tensor, number of the piece among those given.
        bytes_of_ranks: bytes of tensors that each rank writes.
        fresh: planned now, and not looked up.
    """

    image: Image
    picks: Mapping[str, tuple[str, int]]
    bytes_of_ranks: tuple[int, ...]
    fresh: bool = False

    def chosen(self, given: Given) -> dict[str, Chosen]:
        """The pieces of a save by their key in the file, in its order."""
        slots = self.image.slots
        return {
            slot.key: Chosen(slot.name, _several(given[name])[number], slot.dtype)
            for slot in slots
            for name, number in (self.picks[slot.key],)
        }


class Planner:
    """Plans of one rank, by layout.

    Args:
        peers: the ranks that save together. Their layouts change at the same saves.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._plans: dict[Hashable, Planned] = {}

    def plan(self, given: Given) -> Planned:
        """What this rank writes of what it holds.

        Raises:
            CheckpointError: a piece that cannot be stored; names it.
        """
        layout = tuple(
            (name, p.tensor.dtype, p.tensor.shape, p.global_shape, p.offset)
            for name, value in given.items()
            for p in _several(value)
        )
        known = self._plans.get(layout)
        if known is not None:
            return known
        try:
            own = _proposals(given)
        except Exception:
            self._peers.gather(b"null")  # the others wait for this rank's word
            raise
        text = json.dumps([proposal for _, _, proposal in own]).encode()
        proposals = [
            [
                Proposal(name, tuple(offset), tuple(shape), size)
                for name, offset, shape, size in json.loads(one) or ()
            ]
            for one in self._peers.gather(text)
        ]
        taken = assign(proposals)
        kept: dict[str, list[Piece]] = {}
        numbers: dict[str, list[int]] = {}
        for index in taken[self._peers.rank]:
            name, number, _ = own[index]
            kept.setdefault(name, []).append(_several(given[name])[number])
            numbers.setdefault(name, []).append(number)
        chosen = as_pieces(kept)
        place = {
            id(piece): (name, number)
            for name, pieces in kept.items()
            for piece, number in zip(pieces, numbers[name], strict=True)
        }
        picks = {key: place[id(one.piece)] for key, one in chosen.items()}
        loads = tuple(
            sum(proposals[rank][number].bytes for number in mine) for rank, mine in enumerate(taken)
        )
        image = image_of(chosen)
        self._plans = {layout: Planned(image, picks, loads)}
        return Planned(image, picks, loads, fresh=True)


def _several(value: object) -> Sequence[Piece]:
    """The pieces of a tensor, however they were given."""
    if isinstance(value, Piece):
        return (value,)
    if isinstance(value, Sequence):
        return [one if isinstance(one, Piece) else Piece.whole(one) for one in value]
    return (Piece.whole(value),)  # type: ignore[arg-type]


def _proposals(given: Given) -> list[tuple[str, int, Proposal]]:
    """Name, number and box of everything this rank holds, checked."""
    dtypes = {chosen.name: chosen.dtype for chosen in as_pieces(given).values()}
    return [
        (
            name,
            number,
            Proposal(
                name,
                tuple(piece.offset),
                tuple(piece.tensor.shape),
                piece.box.volume * ITEM_BYTES[dtypes[name]],
            ),
        )
        for name, value in given.items()
        for number, piece in enumerate(_several(value))
    ]
