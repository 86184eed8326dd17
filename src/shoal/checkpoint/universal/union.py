"""Union: the fragments of one parameter to the whole tensor, by its pattern.

First the runs of the dp ranks make up each rank's local tensor; then these are put together along
the axes of the pattern, copies are compared, and padding is left out.

Source: Lian et al., Universal Checkpointing, 2024, section 4.2 (Union, StripPadding).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.checkpoint.universal.extract import FragmentFile
from shoal.checkpoint.universal.protocols import AXES, Coord, Pattern, RankLayout, Shape
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


def union(
    name: str, key: str, fragments: Sequence[FragmentFile], pattern: Pattern, layout: RankLayout
) -> Tensor:
    """One whole tensor of a parameter, without padding.

    Returns:
        A new tensor, fp32.

    Raises:
        CheckpointError: elements that no rank or two ranks hold, ranks that are missing, copies
            that differ, or shapes that do not fit the pattern.
    """
    import torch

    holders: dict[Coord, list[FragmentFile]] = {}
    for fragment in fragments:
        holders.setdefault(fragment.at._replace(dp=0), []).append(fragment)
    shapes = {at: _shape(name, key, at, parts) for at, parts in holders.items()}
    axes, counts = pattern.axes, layout.sizes(pattern.axes)
    groups: dict[Shape, list[Coord]] = {}
    for at in sorted(holders):
        groups.setdefault(tuple(getattr(at, axis) for axis in axes), []).append(at)
    places = list(itertools.product(*map(range, counts)))
    for place in places:
        if place not in groups:
            text = ", ".join(f"{axis} {n}" for axis, n in zip(axes, place, strict=True))
            raise CheckpointError(
                f"{name}: {key} has fragments of {len(groups)} ranks and its pattern wants "
                f"{len(places)}; no rank with {text} has one"
            )
    arranged = pattern.arrange(name, [shapes[groups[place][0]] for place in places], counts)
    whole = torch.empty(arranged.shape)
    origin = Box.whole(arranged.shape)
    for place, part in zip(places, arranged.slices, strict=True):
        same = groups[place]
        first = join(name, key, same[0], holders[same[0]])
        local = _agree(name, key, first, same, holders, pattern)
        if part.local_shape != tuple(local.shape):
            raise CheckpointError(
                f"{name}: {key} of {same[0]} has the shape {list(local.shape)}, and its pattern "
                f"makes {list(part.local_shape)} of the whole {list(arranged.shape)}"
            )
        here = Box.whole(part.local_shape)
        for source, target in part.placed():
            whole[target.slices(origin)] = local[source.slices(here)]
    return whole


def join(name: str, key: str, at: Coord, parts: Sequence[FragmentFile]) -> Tensor:
    """One rank's local tensor, from the runs that its dp ranks hold.

    Raises:
        CheckpointError: a gap, or elements that two of them hold.
    """
    import torch

    shape = parts[0].shape
    flat = torch.empty(math.prod(shape))
    ordered = sorted(parts, key=lambda p: (p.at.dp if p.start is None else p.start, p.at.dp))
    done = 0
    for part in ordered:
        start = done if part.start is None else part.start
        if start > done:
            raise CheckpointError(
                f"{name}: {key} has a gap: no file of {_place(at)} holds the elements {done} to "
                f"{start - 1} of {flat.numel()}; a rank's file is missing or of another run"
            )
        if start < done or start + part.numel > flat.numel():
            raise CheckpointError(
                f"{name}: {key} overlaps: the elements from {min(start, flat.numel())} of "
                f"{_place(at)} are held twice; a rank's file is there twice or of another run"
            )
        flat[start : start + part.numel] = part.read()
        done = start + part.numel
    if done < flat.numel():
        raise CheckpointError(
            f"{name}: {key} has a gap: no file of {_place(at)} holds the elements {done} to "
            f"{flat.numel() - 1} of {flat.numel()}; a rank's file is missing or of another run"
        )
    return flat.view(shape)


def _place(at: Coord) -> str:
    return ", ".join(f"{axis} {getattr(at, axis)}" for axis in AXES if axis != "ep" or at.ep)


def _shape(name: str, key: str, at: Coord, parts: Sequence[FragmentFile]) -> Shape:
    shapes = {part.shape for part in parts}
    if len(shapes) > 1:
        text = " and ".join(str(list(shape)) for shape in sorted(shapes))
        raise CheckpointError(
            f"{name}: the dp ranks of {_place(at)} say that {key} has the shapes {text}; their "
            "files are of different models"
        )
    return parts[0].shape


def _agree(
    name: str,
    key: str,
    first: Tensor,
    same: Sequence[Coord],
    holders: dict[Coord, list[FragmentFile]],
    pattern: Pattern,
) -> Tensor:
    """One tensor out of those of ranks that hold the same.

    Raises:
        CheckpointError: they differ by more than the pattern allows.
    """
    if len(same) == 1:
        return first
    if pattern.copies == "none":
        raise CheckpointError(
            f"{name}: its pattern is unique and {len(same)} ranks hold it; use replicated where "
            "they hold the same, fragment where each holds a part"
        )
    total = first.double() if pattern.copies == "mean" else first
    for at in same[1:]:
        other = join(name, key, at, holders[at])
        if other.shape != first.shape:
            raise CheckpointError(
                f"{name}: {key} has the shape {list(first.shape)} on {_place(same[0])} and "
                f"{list(other.shape)} on {_place(at)}, and its pattern says they are copies"
            )
        if pattern.copies == "mean":
            total = total + other.double()
        elif pattern.tolerance != math.inf:
            apart = float((first.double() - other.double()).abs().max()) if first.numel() else 0.0
            if not apart <= pattern.tolerance:
                raise CheckpointError(
                    f"{name}: {key} differs by up to {apart:.3g} between {_place(same[0])} and "
                    f"{_place(at)}, and its pattern allows {pattern.tolerance:g}; if the copies "
                    "are meant to drift use average, else these are of different steps"
                )
    return (total / len(same)).float() if pattern.copies == "mean" else first
