"""The five constants of the accelerator model, set by at most five named rows.

Each constant starts from a value of the literature and moves as far as the named rows ask,
in least squares on logarithms: a row counts as good to 5 %, a starting value to 20 %. For
the rows of a publication, the named row of that publication is left out and the constants
are set anew: what is scored never set what scores it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from shoal.core.errors import require
from shoal.cost.gpu.device import GpuCalibration
from shoal.cost.published.plan import predict
from shoal.cost.published.rows import PublishedRow, read, replay

# One row for each constant: products in bf16 and in fp8, streams, links, the host.
NAMED = (
    "foundry-h100-80gb-13b-s2048-g128-mb16",
    "mlperf-5.0-405b-h100-512",
    "torchtitan-8b-8-fsdp",
    "megatron-seqpar-22B-mfu",
    "bridge-26.02-pre-training-qwen3_30b_a3b-h100-fp8-g16-b1024",
)
# Starting values. gemm: a step's products run at the clock that the power limit leaves, some
# 15 % below a short probe's; stream: a fused kernel's share of the data sheet (STREAM on GPUs
# reaches 0.9, chains of kernels with reductions less); wire: bus bandwidth of NCCL's tests over
# the link's; host: seconds for one kernel of an eager framework.
PRIOR = GpuCalibration(gemm=0.86, gemm_low=0.80, stream=0.75, wire=0.72, host=6e-6)
ROW_SPREAD, PRIOR_SPREAD = 0.05, 0.20


def fit(
    start: Mapping[str, float], errors: Callable[[dict[str, float]], Sequence[float]]
) -> dict[str, float]:
    """Constants near ``start`` for which ``errors`` (on logarithms) are small.

    Gauss-Newton on logarithms, with the starting values as observations of their own.

    Args:
        start: constant -> starting value, above 0.
        errors: constants -> logarithm of predicted over reported for each row.
    """
    names = list(start)
    origin = np.log(np.array([start[name] for name in names]))
    at = origin.copy()

    def residuals(point: np.ndarray) -> np.ndarray:
        values = {n: float(v) for n, v in zip(names, np.exp(point), strict=True)}
        rows = [error / ROW_SPREAD for error in errors(values)]
        return np.array([*rows, *((point - origin) / PRIOR_SPREAD)])

    for _ in range(8):
        here = residuals(at)
        step = 0.01
        slope = np.stack(
            [(residuals(at + step * unit) - here) / step for unit in np.eye(len(at))], axis=1
        )
        move = np.clip(np.linalg.lstsq(slope, -here, rcond=None)[0], -0.2, 0.2)
        at = at + move
        if float(np.abs(move).max()) < 1e-3:
            break
    return {n: float(f"{v:.4g}") for n, v in zip(names, np.exp(at), strict=True)}


def at_most_five(number: int) -> None:
    """Refuse to calibrate on more.

    Raises:
        ConfigError: there are more than five rows.
    """
    require(number <= 5, "rows to calibrate on", number, expected="at most 5")


def calibrate(rows: Iterable[PublishedRow], prior: GpuCalibration = PRIOR) -> GpuCalibration:
    """The constants that ``rows`` ask for, starting from ``prior``.

    Raises:
        ConfigError: more than five rows, or one that cannot be replayed.
    """
    chosen = tuple(rows)
    at_most_five(len(chosen))
    replays = [replay(row) for row in chosen]

    def errors(values: dict[str, float]) -> list[float]:
        k = GpuCalibration(**values)
        return [math.log(predict(r, k).value / r.row.value) for r in replays]

    return GpuCalibration(**fit(asdict(prior), errors))


def calibration_for(group: str, rows: tuple[PublishedRow, ...] | None = None) -> GpuCalibration:
    """The constants for the rows of one publication, set without any of them."""
    table = read() if rows is None else rows
    named = [row for row in table if row.id in NAMED and row.group != group]
    return _fitted(tuple((row.id, row.value, row) for row in named))


@functools.lru_cache(maxsize=64)
def _fitted(rows: tuple[tuple[str, float, PublishedRow], ...]) -> GpuCalibration:
    return calibrate(row for _, _, row in rows)


def fitted() -> GpuCalibration:
    """The constants by all named rows: what plans are priced with."""
    return calibration_for("")
