"""What the models share: beginnings, updates of components that never leave a gap, their costs."""

from __future__ import annotations

import numpy as np

from shoal.core.random import generator
from shoal.fields.data.sparse_coding.protocols import CodingWork, Floats
from shoal.fields.data.sparse_coding.states import StateSpace
from shoal.ir import Estimate, Interval

# Probabilities stay this far from 0 and 1, and variances above this share of the data's.
TINY = 1e-12
_RIDGE = 1e-9
SAMPLE = 1000
"""Points that starts are compared on."""
# Share of the iterations in which the usual schedule changes nothing, and all points are learned.
_SETTLED = 0.1
# Points of a batch times states, so that a batch stays in the cache.
CELLS = 2**17


def batch_points(space: StateSpace) -> int:
    """Points of a batch."""
    return max(16, CELLS // space.num_states)


def start_components(
    mean: Floats, variance: Floats, components: int, seed: int, *, apart: float
) -> Floats:
    """[H, D]: the mean of the data, with noise.

    Args:
        mean: [D], of the data.
        variance: [D], of the data.
        components: H.
        seed: of the noise.
        apart: deviation of the noise over that of the data.
    """
    draw = generator(seed, purpose="sparse components")
    spread = np.sqrt(variance.mean()) * apart
    return np.asarray(mean + spread * draw.standard_normal((components, len(mean))), np.float64)


def least_squares(second: Floats, mixed: Floats, before: Floats) -> Floats:
    """Components [H, D] that explain the data best; those that were never active stay.

    Args:
        second: [H, H], sum of the second moments of the causes.
        mixed: [H, D], sum of causes times data.
        before: [H, D], the components so far.
    """
    ridge = _RIDGE * max(float(np.trace(second)) / len(second), np.finfo(float).tiny)
    held = second + ridge * np.eye(len(second))
    return np.asarray(np.linalg.solve(held, mixed + ridge * before), np.float64)


def rate_of(value: Floats) -> Floats:
    """Probabilities that are neither 0 nor 1."""
    return np.clip(value, TINY, 1 - TINY)


def estimate_of(
    work: CodingWork, space: StateSpace, *, flops: float, seconds: float = 0.0, numbers: float = 0.0
) -> Estimate:
    """Seconds and bytes of all iterations.

    Args:
        work: the data and the rates.
        space: the states.
        flops: of products of matrices, for a point and a pass.
        seconds: of what is neither that nor posteriors, for a point and a pass.
        numbers: float64 of the sums.
    """
    rates, alone = work.rates, 0.0
    shared = float(work.points * work.iterations) / min(work.workers, work.points)
    if work.restarts > 1:
        alone = float(min(work.points, SAMPLE) * work.iterations * work.restarts)
        shared *= _SETTLED
    batches = np.ceil((shared + alone) / batch_points(space))
    shared += alone
    terms = {
        "matmul": shared * flops * rates.flop_s,
        "memory": shared * (space.num_states * rates.state_s + seconds),
        "overhead": float(batches) * rates.call_s,
    }
    total = Interval.around(sum(terms.values()), rates.spread)
    held = 8.0 * batch_points(space) * (4 * space.num_states + 4 * work.components)
    return Estimate(
        step_s=total,
        total_s=total,
        terms_s=terms,
        memory_bytes={
            "data": 8.0 * work.points * work.dim * (3 if work.workers == 1 else 4),
            "states": held * work.workers
            + 8.0 * space.num_combinations * (space.num_candidates + space.num_active + 4),
            "sums": 8.0 * numbers * 16,
        },
        bound="compute" if terms["matmul"] > terms["memory"] else "memory",
    )
