"""The communicators of a rank, axis by axis, from the layout of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shoal.core.errors import PlanError, require
from shoal.cost.price.expert_hops import by_node
from shoal.parallel.protocols import ExpertRanks, Nodes, Ranks

if TYPE_CHECKING:
    from shoal.ir import Layout, Parallel
    from shoal.parallel.protocols import Comm

# The axes of each communicator; order matters to no rank but to all alike.
_AXES = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "data": ("dp", "cp"),
    "model": ("pp", "tp"),
}
_EXPERT_AXES = {
    "ep": ("ep",),
    "etp": ("etp",),
    "edp": ("edp", "inner"),
    "model": ("pp", "ep", "etp"),
}


def ranks_of(world: Comm, parallel: Parallel, workers: int | None = None) -> Ranks:
    """Build every axis's communicator; all ranks call it.

    Args:
        world: all ranks of the job.
        parallel: the split.
        workers: groups of neighbouring data-parallel ranks that make updates of their own; None
            where all make one.

    Raises:
        PlanError: the split is for another number of ranks.
    """
    require(
        parallel.world == world.world,
        "parallel: dp * tp * pp * cp",
        parallel.world,
        expected=f"the {world.world} ranks that there are",
        hint=f"start {parallel.world} ranks, or plan for {world.world}",
        error=PlanError,
    )
    made: dict[tuple[tuple[int, ...], ...], Comm] = {}

    def of(groups: tuple[tuple[int, ...], ...]) -> Comm:
        # Axes of one rank make equal groups: tp = 1 gives the model's ranks the pipeline's.
        if groups not in made:
            made[groups] = world.split(groups)
        return made[groups]

    def along(layout: Layout, axes: tuple[str, ...]) -> Comm:
        return of(tuple(layout.groups(*axes)))

    layout = parallel.attention()
    result = {name: along(layout, axes) for name, axes in _AXES.items()}
    outer = worker = None
    if workers is not None:
        groups = _groups(layout, workers)
        result["data"], worker, outer = of(groups.data), of(groups.worker), of(groups.outer)
    ranks = Ranks(
        world=world,
        tp=result["tp"],
        cp=result["cp"],
        pp=result["pp"],
        data=result["data"],
        model=result["model"],
        outer=outer,
        worker=worker,
    )
    if not parallel.folded:
        return ranks
    layout = parallel.experts()
    experts = {name: along(layout, axes) for name, axes in _EXPERT_AXES.items()}
    nodes = None
    if parallel.expert_dispatch != "flat":
        near, far = by_node(layout.groups("ep"), world.ranks_per_node, parallel.expert_dispatch)
        nodes = Nodes(parallel.expert_dispatch, of(near), of(far))
    return ranks._replace(experts=ExpertRanks(**experts, nodes=nodes))


class _Groups(NamedTuple):
    """Partitions of the ranks of a job with several workers."""

    data: tuple[tuple[int, ...], ...]
    worker: tuple[tuple[int, ...], ...]
    outer: tuple[tuple[int, ...], ...]


def _groups(layout: Layout, workers: int) -> _Groups:
    """Who sums gradients, who makes an update together, and who has the same place in a worker."""
    coords = [layout.coord(rank) for rank in range(layout.world)]
    within = dict(layout.axes)["dp"] // workers
    number = [at["dp"] // within for at in coords]

    def partition(*axes: str, inside: bool) -> tuple[tuple[int, ...], ...]:
        """Ranks that differ in these axes alone, of one worker or of different ones."""
        result: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(coords):
            place = {axis: 0 if axis in axes else size for axis, size in at.items()}
            if not inside:
                place["dp"] = at["dp"] % within
            key = (number[rank] if inside else 0, *place.values())
            result.setdefault(key, []).append(rank)
        return tuple(tuple(group) for group in result.values())

    return _Groups(
        partition("dp", "cp", inside=True),
        partition(*coords[0], inside=True),
        partition(inside=False),
    )
