"""Who writes what: copies are written once, and every rank writes about as much.

Data-parallel ranks hold the same tensors. Each box is written by one of its holders: what has one
holder is his, then the largest of the others goes to the holder that has least so far, and so on
(worst fit, decreasing). Small boxes that the same ranks hold stay together, so that a loader
reads one file for them and not one for each. Every rank comes to the same plan from the same
proposals without being informed. Proposals travel when the layout changes, as a digest and a
size for each box; until then a plan is looked up.

Source: Wan et al., ByteCheckpoint, 2024, section 4.1 (deduplication, balance, plan cache).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shoal.checkpoint.image import Image, image_of
from shoal.checkpoint.pieces import Given, Piece, ReadyPiece, as_pieces
from shoal.core.safetensors_header import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from shoal.checkpoint.peers import Peers

SMALL_BYTES = 256
"""Boxes up to this size are kept together: scalars of an optimizer's state, one a tensor."""

PROPOSAL = np.dtype([("first", "<u8"), ("second", "<u8"), ("bytes", "<i8")])
"""A box that a rank holds: 128 bits of its digest, equal for copies, and its size."""


def proposal(name: str, offset: tuple[int, ...], shape: tuple[int, ...], size: int) -> bytes:
    """A box that a rank holds, as :data:`PROPOSAL` has it."""
    box = json.dumps([name, offset, shape]).encode()
    return hashlib.blake2b(box, digest_size=16).digest() + size.to_bytes(8, "little")


def assign(proposals: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Rank -> numbers of its proposals that it writes; each box is written by one holder.

    Args:
        proposals: of every rank, each of dtype :data:`PROPOSAL`.
    """
    counts = [len(own) for own in proposals]
    every = np.concatenate([*proposals, np.empty(0, dtype=PROPOSAL)])
    ranks = np.repeat(np.arange(len(counts)), counts)
    numbers = np.concatenate([*map(np.arange, counts), np.empty(0, dtype=np.int64)]).astype(int)
    order = np.lexsort((numbers, ranks, every["second"], every["first"]))
    every, ranks, numbers = every[order], ranks[order], numbers[order]
    other = (every["first"][1:] != every["first"][:-1]) | (
        every["second"][1:] != every["second"][:-1]
    )
    begins = np.concatenate([[True], other])[: len(every)]
    # Twice on one rank is one copy.
    new = begins | np.concatenate([[True], ranks[1:] != ranks[:-1]])[: len(every)]
    every, ranks, numbers, begins = every[new], ranks[new], numbers[new], begins[new]
    edges = np.append(np.flatnonzero(begins), len(every))
    alone = np.flatnonzero(np.diff(edges) == 1)
    writer = np.full(len(edges) - 1, -1)
    writer[alone] = edges[alone]
    # Boxes of one holder leave no choice, so they come first.
    load = np.bincount(
        ranks[edges[alone]], weights=every["bytes"][edges[alone]], minlength=len(counts)
    )
    together: dict[bytes, int] = {}
    several = np.flatnonzero(writer < 0)
    size = every["bytes"][edges[several]]
    for group in several[np.argsort(-size, kind="stable")]:
        low, high = edges[group], edges[group + 1]
        holders, nbytes = ranks[low:high], int(every["bytes"][low])
        at = int(np.argmin(load[holders]))
        if nbytes <= SMALL_BYTES:
            at = together.setdefault(holders.tobytes(), at)
        load[holders[at]] += nbytes
        writer[group] = low + at
    order = np.lexsort((numbers[writer], ranks[writer]))
    bounds = np.cumsum(np.bincount(ranks[writer], minlength=len(counts)))
    return np.split(numbers[writer][order], bounds[:-1])


@dataclass(frozen=True, slots=True)
class WritePlan:
    """What this rank writes.

    Args:
        picks: key in the file -> name of the tensor, number of the piece among those given.
        bytes_of_ranks: bytes of tensors that each rank writes.
        fresh: planned now, and not looked up.
    """

    image: Image
    picks: Mapping[str, tuple[str, int]]
    bytes_of_ranks: tuple[int, ...]
    fresh: bool = False

    def chosen(self, given: Given) -> dict[str, ReadyPiece]:
        """The pieces of a save by their key in the file, in its order."""
        slots = self.image.slots
        return {
            slot.key: ReadyPiece(slot.name, _several(given[name])[number], slot.dtype)
            for slot in slots
            for name, number in (self.picks[slot.key],)
        }


class WritePlanner:
    """Plans of one rank, by layout.

    Args:
        peers: the ranks that save together. Their layouts change at the same saves.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._plans: dict[Hashable, WritePlan] = {}

    def plan(self, given: Given) -> WritePlan:
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
            self._peers.gather(b"")  # the others wait for this rank's word
            raise
        proposals = [
            np.frombuffer(one, dtype=PROPOSAL)
            for one in self._peers.gather(b"".join(one for _, _, one in own))
        ]
        taken = assign(proposals)
        kept: dict[str, list[Piece]] = {}
        numbers: dict[str, list[int]] = {}
        for index in taken[self._peers.rank].tolist():
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
            int(each["bytes"][mine].sum()) for each, mine in zip(proposals, taken, strict=True)
        )
        image = image_of(chosen)
        self._plans = {layout: WritePlan(image, picks, loads)}
        return WritePlan(image, picks, loads, fresh=True)


def _several(value: object) -> Sequence[Piece]:
    """The pieces of a tensor, however they were given."""
    if isinstance(value, Piece):
        return (value,)
    if isinstance(value, Sequence):
        return [one if isinstance(one, Piece) else Piece.whole(one) for one in value]
    return (Piece.whole(value),)  # type: ignore[arg-type]


def _proposals(given: Given) -> list[tuple[str, int, bytes]]:
    """Name, number and box of everything this rank holds, checked."""
    dtypes = {chosen.name: chosen.dtype for chosen in as_pieces(given).values()}
    return [
        (
            name,
            number,
            proposal(
                name,
                tuple(piece.offset),
                tuple(piece.tensor.shape),
                piece.box.volume * ITEM_BYTES[dtypes[name]],
            ),
        )
        for name, value in given.items()
        for number, piece in enumerate(_several(value))
    ]
