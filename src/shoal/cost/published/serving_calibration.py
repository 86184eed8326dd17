"""The constants of the serving model, set by five named rows; see :mod:`.calibration`."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import asdict

from shoal.cost.gpu.serve import ServeCalibration
from shoal.cost.published.calibration import at_most_five, fit
from shoal.cost.published.serving import ServeRow, predict_serving, read_serving, replay_serving

__all__ = ["SERVE_NAMED", "SERVE_PRIOR", "calibrate_serving", "serving_calibration_for"]

# One row each for products, for cached keys, for kernels that follow each other among
# devices, for one device's streams, and for an engine's steps.
SERVE_NAMED = (
    "trtllm1.0-llama-3.3-70b-h100x2-2048-128",
    "trtllm1.0-llama-3.1-8b-h200x1-2048-2048",
    "gptfast-llama-2-7b-bf16-a100-80gbx8",
    "gpubench-llama3-8b-f16-a100-sxm-80gbx1-tg1024",
    "nano-vllm-vllm-qwen3-0.6b-rtx4070-laptop",
)
SERVE_PRIOR = ServeCalibration()


def calibrate_serving(
    rows: Iterable[ServeRow], prior: ServeCalibration = SERVE_PRIOR
) -> ServeCalibration:
    """The constants that ``rows`` ask for, starting from ``prior``.

    Raises:
        ConfigError: more than five rows, or one that cannot be replayed.
    """
    chosen = tuple(rows)
    at_most_five(len(chosen))
    replays = [replay_serving(row) for row in chosen]

    def errors(values: dict[str, float]) -> list[float]:
        k = ServeCalibration(**values)
        return [math.log(predict_serving(r, k) / r.row.value) for r in replays]

    return ServeCalibration(**fit(asdict(prior), errors))


def serving_calibration_for(
    group: str, rows: tuple[ServeRow, ...] | None = None
) -> ServeCalibration:
    """The constants for the rows of one publication, set without any of them."""
    table = read_serving() if rows is None else rows
    named = [row for row in table if row.id in SERVE_NAMED and row.group != group]
    return _fitted(tuple((row.id, row.value, row) for row in named))


@functools.lru_cache(maxsize=64)
def _fitted(rows: tuple[tuple[str, float, ServeRow], ...]) -> ServeCalibration:
    return calibrate_serving(row for _, _, row in rows)
