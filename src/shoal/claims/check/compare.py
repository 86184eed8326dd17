"""How far two tensors are apart, relative to what they are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

# The error of what cannot be compared at all: finite, so that JSON can hold it.
BROKEN = 1e30

# A gradient that is zero but for rounding has no relative error; it is measured by this
# share of the largest entry of its kind.
_FLOOR = 1e-2


class Distance(NamedTuple):
    """The largest difference of two tensors.

    Args:
        error: relative to the larger of the expected tensor's largest entry and the floor.
        absolute: the same, not divided.
        note: why they cannot be compared, or empty.
    """

    error: float
    absolute: float = 0.0
    note: str = ""


def floor_of(tensors: Iterable[Array]) -> float:
    """The scale below which errors of these tensors are absolute."""
    largest = [float(np.abs(x).max()) for x in tensors if x.size]
    finite = [value for value in largest if np.isfinite(value)]
    return _FLOOR * max(finite, default=0.0)


def distance(found: Array | None, expected: Array | None, floor: float) -> Distance:
    """How far ``found`` is from ``expected``; None is a gradient that is not there.

    A missing gradient and one of zeros are the same: which of them an unused parameter
    gets is the wrapper's choice, and if it matters the updated parameter shows it.

    Args:
        found: any shape.
        expected: the same shape.
        floor: smallest scale that an error is relative to.
    """
    if expected is None or found is None:
        other = found if expected is None else expected
        if other is None or not other.any():
            return Distance(0.0)
        where = "only the split has a gradient" if expected is None else "the split has no gradient"
        return Distance(BROKEN, float(np.nan_to_num(np.abs(other)).max()), where)
    if found.shape != expected.shape:
        return Distance(
            BROKEN, 0.0, f"shape {list(found.shape)}, in one process {list(expected.shape)}"
        )
    if not found.size:
        return Distance(0.0)
    good = np.isfinite(expected)
    if not np.array_equal(good, np.isfinite(found)):
        return Distance(BROKEN, 0.0, "not finite")
    with np.errstate(invalid="ignore"):
        apart = float(np.where(good, np.abs(found - expected), 0.0).max())
        scale = max(float(np.where(good, np.abs(expected), 0.0).max()), floor)
    if apart == 0:
        return Distance(0.0)
    return Distance(min(apart / scale, BROKEN) if scale else BROKEN, apart)


def rounding_only(gradients: Mapping[str, Array], floor: float, limit: float) -> set[str]:
    """Parameters whose gradient is zero but for rounding.

    A key's bias under softmax is one: Adam divides such a gradient by its own size, so the
    updated parameters are as far apart as the roundings are.

    Args:
        gradients: of one process.
        floor: scale of their errors.
        limit: the tolerance.
    """
    return {n for n, g in gradients.items() if g.size and 0 < np.abs(g).max() <= limit * floor}


def combine_losses(
    losses: Sequence[float | None],
    groups: Sequence[Sequence[int]],
    over: str,
) -> tuple[float | None, str]:
    """The whole loss, and what is wrong with it.

    Args:
        losses: each rank's, None where it has none.
        groups: the ranks that hold the same part of the batch.
        over: mean, sum or same.
    """
    parts: list[float] = []
    for rank, value in enumerate(losses):
        if value is not None and not np.isfinite(value):
            return None, f"the loss of rank {rank} is {value}"
    for group in groups:
        held = [value for rank in group if (value := losses[rank]) is not None]
        if not held:
            return None, f"no rank of {list(group)} returned a loss"
        if max(held) - min(held) > 1e-6 * max(abs(value) for value in held):
            return None, f"the ranks {list(group)} have the same rows but the losses {held}"
        parts.append(held[0])
    if over == "sum":
        return float(np.sum(parts)), ""
    if over == "same" and max(parts) - min(parts) > 1e-6 * max(abs(value) for value in parts):
        return None, f"the ranks' losses differ: {parts}"
    return float(np.mean(parts)), ""


def groups_by(coordinates: Sequence[Mapping[str, int]], axes: Iterable[str]) -> list[list[int]]:
    """Ranks that agree on these axes."""
    chosen = list(axes)
    result: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(coordinates):
        result.setdefault(tuple(place[axis] for axis in chosen), []).append(rank)
    return list(result.values())
