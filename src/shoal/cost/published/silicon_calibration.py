"""The constants of serving engines, set by measured runs of closed loops.

Each engine has its own; those that its runs say little about stay near where they began. Groups of
runs of one model on one device count by the root of their number, and a run that is far off counts
little (a soft L1 loss), since settings that rows do not state, such as guesses of several tokens,
change some runs by a factor of two.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from shoal.cost.kernels.serving_engines import ENGINES, ServingEngine
from shoal.cost.published.silicon import SiliconRun
from shoal.cost.serving.closed_loop import ClosedLoop

# Constant -> where it begins, and how far a fit takes it without good reason. Collectives of the
# kernel tables are one engine's; others send by other kernels.
_TOKEN = {
    "kernels": (1.0, 0.05),
    "wire": (1.0, 0.4),
    "sequence_s": (0.0, 1e-5),
    "eager_s": (1.2e-3, 5e-4),
}
_FIRST = {
    "first_prompt": (1.0, 0.05),
    "first_steps": (5.0, 5.0),
    "balance_steps": (0.0, 10.0),
    "queue_s": (0.0, 1e-3),
    "hand_over_s": (0.0, 0.05),
}
# Weight of where the constants begin, beside all runs, of tokens and of first tokens: kernels were
# measured and hold for models that no run shows, queues were not.
_HELD = {"tpot": 2.0, "ttft": 1.0}


def fitted(runs: Sequence[SiliconRun]) -> dict[str, ServingEngine]:
    """Engines with the constants that these runs give."""
    engines = dict(ENGINES)
    for name in sorted({run.engine for run in runs}):
        own = [run for run in runs if run.engine == name]
        engine = ENGINES[name]
        tokens = np.log([run.tpot_s for run in own])
        firsts = np.log([run.ttft_s for run in own])
        engine = _fit(engine, _TOKEN, own, tokens, scale=0.08)
        engines[name] = _fit(engine, _FIRST, own, firsts, scale=0.1)
    return engines


def _fit(
    engine: ServingEngine,
    constants: dict[str, tuple[float, float]],
    runs: Sequence[SiliconRun],
    measured: NDArray[np.float64],
    *,
    scale: float,
) -> ServingEngine:
    """The engine with the best of these constants for the logarithms of what was measured."""
    kind = "tpot" if constants is _TOKEN else "ttft"
    groups = Counter((run.model, run.device) for run in runs)
    weights = np.array([groups[run.model, run.device] ** -0.5 for run in runs])
    weights /= weights.mean()
    begin = np.array([value for value, _ in constants.values()])
    reach = np.array([value for _, value in constants.values()])

    def with_(x: NDArray[np.float64]) -> ServingEngine:
        values: dict[str, Any] = dict(zip(constants, map(float, begin + reach * x), strict=True))
        return dataclasses.replace(engine, **values)

    # The arithmetic of one loop is that of all of them.
    fields = (field.name for field in dataclasses.fields(ClosedLoop))
    columns: Any = {name: np.array([getattr(run.loop, name) for run in runs]) for name in fields}
    loops = ClosedLoop(**columns)

    def off(x: NDArray[np.float64]) -> NDArray[np.float64]:
        predicted = np.log(getattr(loops, kind)(with_(x)))
        return np.append(weights * (predicted - measured), _HELD[kind] * x)

    best = least_squares(
        off, np.full(len(begin), 0.5), bounds=(-begin / reach, 1e3), loss="soft_l1", f_scale=scale
    )
    return with_(best.x)
