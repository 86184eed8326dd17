"""What a rank of any split reads of whole tensors: names, boxes, and where they go.

The counterpart of union: the same patterns say which boxes a rank holds. Each rank reads only
these, zero rows are added where a tensor is padded, and what arrives is cast to the dtype in
which it is trained. Ranks that share a flat buffer read only the boxes of their run of it.

Source: Lian et al., Universal Checkpointing, 2024, section 4.2 (GenUcpMetadata, Load).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from shoal.checkpoint.universal.convert import ReadableCheckpoint
from shoal.checkpoint.universal.protocols import Coord, RankLayout, Shape
from shoal.checkpoint.universal.spec import UniversalSpec
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_BLOCK = re.compile(r"^blocks\.(\d+)\.")


class FragmentRead(NamedTuple):
    """One thing to read.

    Args:
        source: box of the whole tensor.
        target: the same elements in the rank's local tensor.
    """

    source: Box
    target: Box


@dataclass(frozen=True)
class Local:
    """One rank's tensor of a parameter.

    Args:
        shape: of the local tensor, padding included.
        reads: what to read into it; what they leave out is zero.
    """

    name: str
    shape: Shape
    reads: tuple[FragmentRead, ...]

    def run(self, start: int, stop: int) -> Local:
        """The same, of which only a run of the flat local tensor is wanted."""
        runs = boxes_of_run(self.shape, start, stop)
        reads = []
        for read in self.reads:
            for box in runs:
                common = read.target.intersect(box)
                if common is not None:
                    moved = zip(read.source.offset, common.offset, read.target.offset, strict=True)
                    offset = tuple(s + c - t for s, c, t in moved)
                    reads.append(FragmentRead(Box(offset, common.shape), common))
        return Local(self.name, self.shape, tuple(reads))


def local_of(spec: UniversalSpec, name: str, shape: Shape, layout: RankLayout, at: Coord) -> Local:
    """What one rank holds of a whole tensor.

    Raises:
        CheckpointError: no pattern, or a shape that the ranks cannot share.
    """
    pattern = spec.pattern(name)
    counts = layout.sizes(pattern.axes)
    place = tuple(getattr(at, axis) for axis in pattern.axes)
    result = pattern.cut(name, shape, counts, place)
    return Local(name, result.local_shape, tuple(FragmentRead(s, t) for t, s in result.placed()))


def read_local(
    source: ReadableCheckpoint, stored: str, local: Local, dtype: torch.dtype | None = None
) -> Tensor:
    """Read one rank's tensor: its ranges, with zeros where it is padded.

    Args:
        source: a checkpoint of whole tensors.
        stored: the tensor's name in there.
        local: what to read.
        dtype: cast to it; as stored if not given.
    """
    import torch

    pieces = [(r, source.tensor(stored, r.source.offset, r.source.shape)) for r in local.reads]
    kind = dtype or (pieces[0][1].dtype if pieces else torch.float32)
    out = torch.zeros(local.shape, dtype=kind)
    here = Box.whole(local.shape)
    for read, values in pieces:
        out[read.target.slices(here)] = values.to(kind)
    return out


def boxes_of_run(shape: Shape, start: int, stop: int) -> list[Box]:
    """The boxes that make up the elements ``start`` to ``stop`` of a tensor in memory order.

    A part of a row at the head, whole rows, and a part at the tail, in each dimension: at most
    2 * dims - 1 boxes.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    inner = math.prod(shape[1:])
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    boxes: list[Box] = []
    first, last = start // inner, stop // inner
    head, tail = start - first * inner, stop - last * inner
    if first == last:
        return list(_inside(shape, first, head, tail))
    if head:
        boxes += _inside(shape, first, head, inner)
        first += 1
    if first < last:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if tail:
        boxes += _inside(shape, last, 0, tail)
    return boxes


def _inside(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    """Boxes of a run of one row."""
    for box in boxes_of_run(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.shape))


def stage_names(names: Sequence[str], num_layers: int, stages: int, tied: bool) -> list[list[str]]:
    """Which parameters of our models each stage of an even pipeline holds.

    A tied embedding is held by both ends.

    Raises:
        CheckpointError: more stages than blocks.
    """
    if stages > max(num_layers, 1):
        raise CheckpointError(
            f"mesh: pp={stages}: {num_layers} blocks cannot be shared by so many stages; choose at "
            f"most {num_layers}"
        )
    stage_names: list[list[str]] = [[] for _ in range(stages)]
    for name in names:
        block = _BLOCK.match(name)
        if block:
            stage_names[int(block.group(1)) * stages // num_layers].append(name)
        elif name.startswith("embed"):
            stage_names[0].append(name)
            if tied and stages > 1:
                stage_names[-1].append(name)
        else:
            stage_names[-1].append(name)
    return stage_names
