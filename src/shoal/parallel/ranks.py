"""The communicators of a rank, axis by axis, from the layout of the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.core.errors import PlanError, require
from shoal.parallel.protocols import ExpertRanks, Ranks

if TYPE_CHECKING:
    from shoal.ir import Layout, Parallel
    from shoal.parallel.protocols import Comm

__all__ = ["ranks_of"]

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
    found = {name: along(layout, axes) for name, axes in _AXES.items()}
    if workers is not None:
        within = parallel.dp // workers
        coords = [layout.coord(rank) for rank in range(parallel.world)]
        number = [at["dp"] // within for at in coords]
        data = ((g, w) for g in layout.groups("dp", "cp") for w in range(workers))
        found["data"] = of(tuple(tuple(r for r in g if number[r] == w) for g, w in data))
        found["worker"] = of(
            tuple(tuple(r for r, n in enumerate(number) if n == w) for w in range(workers))
        )
        places: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(coords):
            place = {**at, "dp": at["dp"] % within}
            places.setdefault(tuple(place.values()), []).append(rank)
        found["outer"] = of(tuple(tuple(group) for group in places.values()))
    if not parallel.folded:
        return Ranks(world=world, **found)
    layout = parallel.experts()
    experts = {name: along(layout, axes) for name, axes in _EXPERT_AXES.items()}
    return Ranks(world=world, **found, experts=ExpertRanks(**experts))
