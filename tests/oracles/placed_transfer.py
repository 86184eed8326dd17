"""A placed tensor brought to other ranks, as between the stages of a pipeline.

What is partial is reduced among its owners first, each keeping a part; then every rank of
the other mesh gets what it will hold, each element once. The bytes are those of
:func:`disjoint_elements`.

Source: Yuan et al., OneFlow, 2021, table 2 (disjoint placements).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.claims.lab.placed.placement import TAG, GlobalTensor, RankMesh
from shoal.core.boxes import Box
from shoal.core.errors import PlanError, require
from shoal.ir.placement import (
    Broadcast,
    Mesh,
    Partial,
    Placement,
    Split,
    check_placement,
    coordinates,
    local_box,
    parse_placement,
)

if TYPE_CHECKING:
    import torch

    from shoal.parallel.protocols import Comm


def transfer(
    comm: Comm,
    x: GlobalTensor | None,
    to: RankMesh | None,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    source: tuple[Sequence[int], Mesh, str],
    target: tuple[Sequence[int], Mesh, str],
) -> GlobalTensor | None:
    """Bring a tensor from some ranks to other ones; all ranks of ``comm`` call it.

    Args:
        comm: ranks of both meshes, and maybe more.
        x: the tensor, on its owners; None elsewhere.
        to: the other mesh, on its ranks; None elsewhere.
        shape: of the tensor; at least one dimension where it is partial.
        dtype: of the tensor.
        source: ranks of the owners in ``comm``, sizes of their mesh, placement.
        target: the same of the other mesh.

    Returns:
        The tensor on the other mesh; None on all other ranks.

    Raises:
        PlanError: the meshes share a rank, or have other numbers of ranks than they name.
    """
    import torch

    owners, from_sizes, from_text = source
    takers, to_sizes, to_text = target
    for name, ranks, sizes in (("source", owners, from_sizes), ("target", takers, to_sizes)):
        require(
            len(set(ranks)) == len(ranks) == math.prod(sizes),
            name,
            list(ranks),
            expected=f"{math.prod(sizes)} ranks, those of the mesh {'x'.join(map(str, sizes))}",
            error=PlanError,
        )
    require(
        not set(owners) & set(takers),
        "target",
        list(takers),
        expected="ranks that do not own the tensor; within one mesh use GlobalTensor.to",
        error=PlanError,
    )
    has = check_placement(parse_placement(from_text), shape, from_sizes, where="source")
    wants = check_placement(parse_placement(to_text), shape, to_sizes, where="target")
    whole = check_placement(
        tuple(Split(0) if isinstance(axis, Partial) else axis for axis in has),
        shape,
        from_sizes,
        where="source without partial results",
    )
    held = None if x is None else x.to(whole)
    empty = torch.empty(0, dtype=dtype, device=comm.device)
    sends, receives = [empty] * comm.world, [empty] * comm.world
    own: dict[int, list[Box]] = {}
    for number, coord in enumerate(coordinates(to_sizes)):
        pieces = _pieces(shape, number, coord, wants, to_sizes, whole, from_sizes)
        for owner, boxes in pieces.items():
            if held is not None and owners[owner] == comm.rank:
                parts = [held.local[box.slices(held.box)].reshape(-1) for box in boxes]
                sends[takers[number]] = torch.cat(parts)
            if takers[number] == comm.rank:
                own[owners[owner]] = boxes
                volume = sum(box.volume for box in boxes)
                receives[owners[owner]] = torch.empty(volume, dtype=dtype, device=comm.device)
    comm.all_to_all(receives, sends, tag=TAG).wait()
    if to is None:
        return None
    box = local_box(shape, wants, to_sizes, to.coord)
    maxima = any(isinstance(axis, Partial) and axis.op == "max" for axis in wants)
    least = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    out = torch.full(box.shape, least if maxima else 0, dtype=dtype, device=comm.device)
    for rank, boxes in own.items():
        start = 0
        for piece in boxes:
            part = receives[rank][start : start + piece.volume]
            out[piece.slices(box)] = part.view(piece.shape)
            start += piece.volume
    return GlobalTensor(out, tuple(shape), wants, to)


def _pieces(
    shape: Sequence[int],
    number: int,
    coord: Sequence[int],
    wants: Placement,
    to_sizes: Mesh,
    has: Placement,
    from_sizes: Mesh,
) -> dict[int, list[Box]]:
    """Owner -> boxes that rank ``number`` of the other mesh gets from it."""
    shares = zip(wants, coord, strict=True)
    if any(isinstance(axis, Partial) and index for axis, index in shares):
        return {}  # one rank of a partial axis has all of it
    left = [local_box(shape, wants, to_sizes, coord)]
    everyone = list(enumerate(coordinates(from_sizes)))
    # Copies are taken from owner after owner, so that none sends everything.
    first = number % len(everyone)
    pieces: dict[int, list[Box]] = {}
    for owner, place in [*everyone[first:], *everyone[:first]]:
        held = local_box(shape, has, from_sizes, place)
        common = [box for part in left if (box := part.intersect(held)) is not None]
        if common:
            pieces[owner] = common
            left = [rest for part in left for rest in part.subtract(held)]
    return pieces


def disjoint_elements(size: int, source: Placement, target: Placement, p1: int, p2: int) -> int:
    """Elements that travel from p1 ranks to p2 other ones, each set with one axis.

    Args:
        size: elements of the tensor.
        source: placement on the p1 ranks, of one entry.
        target: placement on the p2 ranks, of one entry.
        p1: ranks that have it.
        p2: ranks that get it.
    """
    (old,), (new,) = source, target
    copies = p2 if isinstance(new, Broadcast) else 1
    if isinstance(old, Partial):
        return (p1 - 1 + copies) * size
    return copies * size
