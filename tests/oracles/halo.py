"""Halo exchange: every rank's block of a grid gets a rim of its neighbours' cells.

A block is a tensor whose first and last ``width`` cells of every dimension belong to others.
One message goes to each of the up to 3^d - 1 neighbours, corners included, straight from the
block and straight into the rim: nothing is copied but by the kernels that pack.

Source: Pearson et al., TEMPI, 2021 (its 3-D stencil); Ripeanu, Iamnitchi and Foster, Cactus
Application: Performance Predictions in Grid Environments, 2001 (ghost zones).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.claims.lab.strided.messages import receive, send
from shoal.claims.lab.strided.method import MethodModel
from shoal.core.errors import ConfigError, require

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Comm, Pending


def halo_exchange(
    comm: Comm,
    block: Tensor,
    *,
    grid: Sequence[int],
    width: int = 1,
    periodic: bool = False,
    tag: str = "halo",
    model: MethodModel | None = None,
) -> None:
    """Fill the rim of every rank's block with its neighbours' cells; all ranks call it.

    Args:
        comm: as many ranks as the grid has places; rank numbers run along its last dimension
            first.
        block: of the same shape on every rank, rim included; dimensions beyond those of the
            grid are not divided, such as values of a cell.
        grid: ranks in each dimension.
        width: cells of the rim on each side of every dimension of the grid.
        periodic: the grid's ends meet; else the rim there keeps what it holds.
        tag: of the messages.
        model: chooses how they travel, the same on all ranks; strides must be equal then.

    Raises:
        ConfigError: the grid has not as many places as there are ranks, or the block is too
            thin for its rim.
    """
    dims = len(grid)
    require(
        dims >= 1 and min(grid) >= 1 and math.prod(grid) == comm.world,
        "halo.grid",
        tuple(grid),
        expected=f"sizes whose product is {comm.world}, the number of ranks",
    )
    require(width >= 0, "halo.width", width, expected="0 or more")
    if block.dim() < dims or any(size < 3 * width for size in block.shape[:dims]):
        raise ConfigError(
            f"halo.block = {list(block.shape)}: expected {dims} or more dimensions of at least "
            f"{3 * width} cells, for a rim of {width} on each side; use wider blocks"
        )
    if width == 0:
        return
    here = _coordinates(comm.rank, grid)
    pending: list[Pending] = []
    for way in itertools.product((-1, 0, 1), repeat=dims):
        if not any(way):
            continue
        back = tuple(-step for step in way)
        rim, edge = _cells(back, width, rim=True), _cells(way, width, rim=False)
        target = _neighbour(here, way, grid, periodic)
        source = _neighbour(here, back, grid, periodic)
        if target == source == comm.rank:
            # What leaves at one side comes in at the other.
            block[rim] = block[edge]
            continue
        # Named by the way in which it goes, and in that order on all ranks.
        name = f"{tag}.{'_'.join(map(str, way))}"
        if source is not None:
            pending.append(receive(comm, block[rim], source, tag=name, model=model))
        if target is not None:
            pending.append(send(comm, block[edge], target, tag=name, model=model))
    for one in pending:
        one.wait()


def _coordinates(rank: int, grid: Sequence[int]) -> tuple[int, ...]:
    results = []
    for size in reversed(grid):
        results.append(rank % size)
        rank //= size
    return tuple(reversed(results))


def _neighbour(
    here: tuple[int, ...], way: tuple[int, ...], grid: Sequence[int], periodic: bool
) -> int | None:
    rank = 0
    for place, step, size in zip(here, way, grid, strict=True):
        other = place + step
        if not 0 <= other < size and not periodic:
            return None
        rank = rank * size + other % size
    return rank


def _cells(way: tuple[int, ...], width: int, *, rim: bool) -> tuple[slice, ...]:
    """The rim in one direction, or the own cells that the neighbour there wants."""
    cells = []
    for step in way:
        if step == 0:
            cells.append(slice(width, -width))
        elif rim:
            cells.append(slice(0, width) if step < 0 else slice(-width, None))
        else:
            cells.append(slice(width, 2 * width) if step < 0 else slice(-2 * width, -width))
    return tuple(cells)
