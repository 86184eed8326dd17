"""What N ranks would write and want, without their data: the same functions, no processes.

Tensors are views of one element, so a rank of a model of eight billion weights costs a few
milliseconds and no memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from shoal.checkpoint.agreement import addressed, merge_wants, together
from shoal.checkpoint.image import Image, image_of
from shoal.checkpoint.index import INDEX_NAME, CheckpointIndex, Merger, read_index
from shoal.checkpoint.pieces import Given, Piece, as_pieces
from shoal.checkpoint.plan import WritePlanner
from shoal.checkpoint.reads import BoxRequest, Wants
from shoal.checkpoint.shards import file_name, shard_name
from shoal.cost.shapes import resolve
from shoal.model.config import ModelConfig
from shoal.model.transformer import Transformer

Layout = Callable[[int, int, tuple[int, ...]], list[tuple[tuple[int, ...], tuple[int, ...]]]]
"""Rank, ranks and shape of a tensor -> offset and shape of each box that the rank holds."""

CRC32C = 123_456_789


@functools.cache
def llama(model: str = "Llama-3.1-8B") -> dict[str, tuple[int, ...]]:
    """Name -> shape of all that AdamW saves of a model: weights, two moments, a step a tensor."""
    with torch.device("meta"):
        module = Transformer(ModelConfig.from_shape(resolve(model)))
    shapes = {name: tuple(one.shape) for name, one in module.named_parameters()}
    return {
        **{f"model.{name}": shape for name, shape in shapes.items()},
        **{
            f"optimizer.{name}.{key}": shape
            for name, shape in shapes.items()
            for key in ("exp_avg", "exp_avg_sq")
        },
        **{f"optimizer.{name}.step": () for name in shapes},
    }


def zero3(
    rank: int, world: int, shape: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Rows of a rank as FSDP2 deals them: equal parts, the last ones smaller or empty."""
    if not shape:
        return [((), ())]
    each = -(-shape[0] // world)
    low, high = min(shape[0], rank * each), min(shape[0], (rank + 1) * each)
    rest = shape[1:]
    return [((low, *(0,) * len(rest)), (high - low, *rest))] if high > low else []


def columns(
    rank: int, world: int, shape: tuple[int, ...]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The last dimension in equal parts, as row-parallel weights are split."""
    if not shape or shape[-1] % world:
        return zero3(rank, world, shape)
    each = shape[-1] // world
    rest = shape[:-1]
    return [((*(0,) * len(rest), rank * each), (*rest, each))]


def held(
    rank: int, world: int, tensors: Mapping[str, tuple[int, ...]], layout: Layout = zero3
) -> dict[str, list[Piece]]:
    """What a rank gives to a save: pieces that have a shape and no memory."""
    one = torch.zeros(())
    return {
        name: [
            Piece(one.expand(size), shape, offset) for offset, size in layout(rank, world, shape)
        ]
        for name, shape in tensors.items()
    }


def wishes(
    rank: int, world: int, tensors: Mapping[str, tuple[int, ...]], layout: Layout = zero3
) -> list[BoxRequest]:
    """What a rank asks of a load."""
    return [
        BoxRequest(name, offset, size)
        for name, shape in tensors.items()
        for offset, size in layout(rank, world, shape)
    ]


@dataclass
class Recorded:
    """Ranks as a plan sees them, each saying what was recorded of it."""

    rank: int
    world: int
    said: list[bytes] = field(default_factory=list)
    heard: list[bytes] | None = None

    def barrier(self) -> None:
        """Nobody is waited for."""

    def gather(self, data: bytes) -> list[bytes]:
        """What all have said, or this alone where that is asked for first."""
        self.said.append(data)
        return self.heard or [data] * self.world

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """Not used by a save."""
        raise NotImplementedError


def proposals(world: int, given: Callable[[int], Given]) -> list[bytes]:
    """What each rank tells the others of what it holds."""
    proposals = []
    for rank in range(world):
        alone = Recorded(0, 1)
        WritePlanner(alone).plan(given(rank))
        proposals.append(alone.said[0])
    return proposals


def shard_of(rank: int, given: Given) -> tuple[Image, bytes]:
    """The file that a rank would write, and its shard of the index."""
    image = image_of(as_pieces(given))
    crcs = {slot.key: CRC32C for slot in image.slots}
    return image, image.index(rank, crcs).encode()


def without_copies(given: dict[str, list[Piece]], rank: int) -> dict[str, list[Piece]]:
    """What a rank writes of what it holds where the first rank writes what all hold."""
    return {
        name: pieces
        for name, pieces in given.items()
        if pieces and (rank == 0 or pieces[0].global_shape)
    }


class SimulatedFolder:
    """A checkpoint of ranks that were never there: headers and shards, and no tensors.

    Attributes:
        votes: shards, by rank.
        reads: how often a file was read, by name.
    """

    def __init__(self, given: Sequence[Given]) -> None:
        made = [shard_of(rank, one) for rank, one in enumerate(given)]
        self.votes = [vote for _, vote in made]
        self.reads: dict[str, int] = {}
        self._files = {shard_name(rank): vote for rank, vote in enumerate(self.votes)}
        self._files |= {file_name(rank): image.header for rank, (image, _) in enumerate(made)}
        self._sizes = {file_name(rank): image.size for rank, (image, _) in enumerate(made)}
        merged, _ = Merger().merge(1, {}, self.votes)
        self._files[INDEX_NAME] = merged.encode()

    def index(self) -> CheckpointIndex:
        """Open it."""
        return read_index(self)

    def where(self, name: str = "") -> str:
        """See :class:`~shoal.checkpoint.storage.Folder`."""
        return f"simulated/{name}"

    def exists(self) -> bool:
        """See :class:`~shoal.checkpoint.storage.Folder`."""
        return True

    def size(self, name: str) -> int:
        """See :class:`~shoal.checkpoint.storage.Folder`."""
        return self._sizes.get(name, len(self._files[name]))

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """See :class:`~shoal.checkpoint.storage.Folder`; of tensors there are headers only."""
        self.reads[name] = self.reads.get(name, 0) + 1
        return np.frombuffer(self._files[name], dtype=np.uint8)[start:stop]


def saved_by(
    world: int, tensors: Mapping[str, tuple[int, ...]], layout: Layout = zero3
) -> SimulatedFolder:
    """The checkpoint of some ranks."""
    return SimulatedFolder(
        [without_copies(held(rank, world, tensors, layout), rank) for rank in range(world)]
    )


def homes_of(asked: Iterable[Sequence[BoxRequest]], world: int) -> dict[int, list[bytes]]:
    """Rank -> what all ranks tell it of their wishes for its tensors; of ranks that have any."""
    homes: dict[int, list[bytes]] = {}
    for rank, own in enumerate(asked):
        for home, message in enumerate(addressed(own, world)):
            if message:
                homes.setdefault(home, [b""] * world)[rank] = message
    return homes


def wants_of_all(asked: Sequence[Sequence[BoxRequest]]) -> Wants:
    """What all ranks want, agreed as they agree it."""
    return merge_wants([together(one) for one in homes_of(asked, len(asked)).values()])
