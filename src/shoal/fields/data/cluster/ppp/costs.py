"""What PPP costs: the rates of a machine, and how often a fit does what they are of.

Three loops take the time: rounds of k-means, steps of EM, and, of many rows, the search for each
row's micro-cluster. A number of each is timed here in under a second and kept in ``ppp.json`` of
Shoal's home; for a machine that is only described it follows from its peak rate.
"""

from __future__ import annotations

import numpy as np

from shoal.core.config import Value
from shoal.core.native import cpu_model
from shoal.core.random import generator
from shoal.fields.data.cluster.ppp.points import MICRO, MOST_POINTS, ROUNDS, WeightedPoints
from shoal.fields.data.cluster.protocols import ClusterWork
from shoal.fields.rates import kept_rates, least_seconds
from shoal.ir import Estimate, Interval, Machine

# Rounds of k-means until a restart stands still, and steps of EM of all the mixtures of a fit; both
# with those of the parts that are cut again.
_LLOYD = Interval(value=30.0, low=12.0, high=60.0)
_EM = Interval(value=400.0, low=100.0, high=1500.0)
# Clusters of those mixtures, as a share of the most.
_SHARE = 0.4
# Seconds of a call that do not depend on the rows, and calls of a fit with k_max = 20.
_CALL = 2e-4
# Seconds to import scikit-learn.
_IMPORT = Interval(value=1.0, low=0.0, high=4.0)
_SPREAD_TIMED, _SPREAD_DERIVED = 0.5, 3.0
_FLOPS_REACHED = 0.15


class PPPRates(Value):
    """How fast a machine does what PPP does.

    Args:
        lloyd_s: seconds of one row and centre in a round of k-means.
        em_s: seconds of one row and component in a step of EM.
        near_s: seconds of one row and micro-cluster in the search for the nearest.
        row_s: seconds of one row of all that is done once: sorting, posteriors.
        measured: on this machine, or derived from its description.
    """

    lloyd_s: float
    em_s: float
    near_s: float
    row_s: float
    measured: bool


def price(work: ClusterWork, machine: Machine, k_max: int, restarts: int) -> Estimate:
    """Seconds and bytes of a fit."""
    rates = rates_of(machine, max(work.dim, 1))
    few = work.n > MOST_POINTS
    points = min(work.n, MICRO if few else MOST_POINTS)
    once = work.n * rates.row_s + (work.n * MICRO / 2 * (ROUNDS + 1) * rates.near_s if few else 0.0)
    centres = restarts * (k_max * (k_max + 1) / 2 - 1)
    components = max(2.0, _SHARE * k_max)

    def seconds(rounds: float, steps: float) -> float:
        rows = points * (rounds * centres * rates.lloyd_s + steps * components * rates.em_s)
        return once + rows + _CALL * (rounds * k_max + steps)

    spread = 1 + (_SPREAD_TIMED if rates.measured else _SPREAD_DERIVED)
    total = Interval(
        value=_IMPORT.value + seconds(_LLOYD.value, _EM.value),
        low=_IMPORT.low + seconds(_LLOYD.low, _EM.low) / spread,
        high=_IMPORT.high + seconds(_LLOYD.high, _EM.high) * spread,
    )
    return Estimate(
        step_s=total,
        total_s=total,
        terms_s={"data": once, "compute": total.value - once},
        memory_bytes={
            "objects": 40.0 * work.n * work.dim,
            "restarts": 24.0 * points * restarts * k_max,
            "labels": 8.0 * work.n * (6 + min(k_max, 20)),
        },
        bound="compute",
    )


def rates_of(machine: Machine, dim: int) -> PPPRates:
    """How fast a machine is: timed if it is this one, else derived from its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    if machine.fingerprint.get("cpu") == cpu_model():
        return kept_rates("ppp.json", f"{cpu_model()}|{dim}", PPPRates, lambda: timed(dim))
    cores = max(machine.device.num_cores or 1, 1)
    flops = machine.device.peak_flops.get("fp32", 1e11) / cores
    if machine.device.kind == "gpu":  # its host is not described; a core of a server
        flops = 5e10
    flops *= _FLOPS_REACHED
    return PPPRates(
        lloyd_s=(2.0 * dim + 20.0) / flops,
        em_s=(4.0 * dim**2 + 12.0 * dim + 60.0) / flops,
        near_s=(2.0 * dim + 4.0) / flops,
        row_s=(40.0 * dim * dim + 2000.0) / flops,
        measured=False,
    )


def timed(dim: int, rows: int = 2000) -> PPPRates:
    """Time the loops on this machine, for most of a second.

    Args:
        dim: numbers of a row.
        rows: how many are used.
    """
    from shoal.fields.data.cluster.ppp.lloyd import Averages, nearest_of
    from shoal.fields.data.cluster.ppp.mixture import OWN, mixture_of
    from shoal.fields.data.cluster.ppp.points import canonical, nearest_rows

    draw = generator(0, purpose="ppp rates")
    X = draw.standard_normal((rows, dim))
    points = WeightedPoints(X, np.ones(rows))
    centres = X[:100].reshape(10, 10, dim)

    averages = Averages(points)

    def round_() -> None:
        averages.of(nearest_of(X, centres)[0], centres)

    lloyd, _ = least_seconds(round_)
    posterior = draw.dirichlet(np.ones(10), rows)
    em, _ = least_seconds(lambda: mixture_of(points, posterior, OWN).posterior(X))
    many = draw.standard_normal((10 * rows, dim))
    near, _ = least_seconds(lambda: nearest_rows(many, X))
    mixture = mixture_of(points, posterior, OWN)
    once, _ = least_seconds(lambda: (canonical(many), mixture.posterior(many)))
    return PPPRates(
        lloyd_s=lloyd / (rows * 100),
        em_s=em / (rows * 10),
        near_s=near / (10 * rows * rows),
        row_s=once / (10 * rows),
        measured=True,
    )
