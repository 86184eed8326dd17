"""What the MASHA claim runs: methods over a grid of steps in one process, the best over sockets."""

from __future__ import annotations

import warnings
from typing import Any

from shoal.fields.federate.vi.protocols import ViError
from shoal.fields.federate.vi.setting import built
from shoal.fields.federate.vi.solving import ViSolution, solve_here, solve_over_sockets

GRID = (1.0, 0.5, 0.25, 0.125, 0.0625)
"""Steps for all methods."""

_NETWORK_GRID = (0.008, 0.004, 0.002)
_TOLERANCE, _MOST = 1e-6, 20_000


def _over_sockets(given: dict[str, Any], **limits: Any) -> ViSolution:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # steps above the bound are the question
        return solve_over_sockets(given, [0.0] * given["workers"], **limits)


def over_grid(given: dict[str, Any], grid: tuple[float, ...], most: int) -> list[ViSolution]:
    """Solutions by step, without those that diverge; one that converges limits the next ones."""
    found = []
    for step in grid:
        setting = built(given, step=step, tolerance=_TOLERANCE, iterations=most)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                found.append(solve_here(setting))
            except ViError:
                continue
        most = found[-1].iterations
    return found


def tuned(given: dict[str, Any]) -> ViSolution:
    """Over sockets, with the step that needs the fewest iterations."""
    reached = [one for one in over_grid(given, GRID, _MOST) if one.reached]
    best = min(reached, key=lambda one: one.iterations)
    return _over_sockets(given, step=best.step, tolerance=_TOLERANCE, iterations=_MOST)


def trained(given: dict[str, Any], iterations: int) -> ViSolution:
    """Over sockets, with the step that has the least robust loss."""
    found = over_grid(given, _NETWORK_GRID, iterations)
    best = min(found, key=lambda one: one.judged["robust_loss"])
    return _over_sockets(given, step=best.step, iterations=iterations)
