"""What tree shapes share: paths of guesses made into a tree with the values of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.core.errors import ConfigError
from shoal.ir import DrafterCalibration, TreeSpec


def tree_of(
    where: str, paths: Iterable[Sequence[int]], calibration: DrafterCalibration
) -> TreeSpec:
    """The tree of these paths, in their order; each is a rank for every level from the root on.

    Args:
        where: the option that they come from.
        paths: every path's own beginning stands before it.
        calibration: gives every node the product of the shares along its path.

    Raises:
        ConfigError: a path without its beginning, or a guess that the drafter does not make.
    """
    place: dict[tuple[int, ...], int] = {(): -1}
    parent: list[int] = []
    value: list[float] = []
    worth: dict[tuple[int, ...], float] = {(): 1.0}
    for path in map(tuple, paths):
        level, rank = len(path) - 1, path[-1]
        if level >= calibration.levels:
            raise ConfigError(
                f"{where}: path {list(path)} guesses {len(path)} tokens ahead, and the drafter "
                f"guesses {calibration.levels}; shorten it, or train a drafter that looks further"
            )
        if not 0 <= rank < len(calibration.right[level]):
            raise ConfigError(
                f"{where}: path {list(path)} takes guess {rank} of level {level + 1}, and the "
                f"drafter makes {len(calibration.right[level])}: 0 to "
                f"{len(calibration.right[level]) - 1}"
            )
        if path[:-1] not in place:
            raise ConfigError(
                f"{where}: path {list(path)} stands without the one it goes on from, "
                f"{list(path[:-1])}; add that before it"
            )
        if path in place:
            raise ConfigError(f"{where}: path {list(path)} is given twice")
        place[path] = len(parent)
        parent.append(place[path[:-1]])
        worth[path] = worth[path[:-1]] * calibration.right[level][rank]
        value.append(worth[path])
    return TreeSpec(tuple(parent), tuple(path[-1] for path in list(place)[1:]), tuple(value))
