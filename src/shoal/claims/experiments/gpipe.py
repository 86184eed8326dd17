"""[139] GPipe: do micro-batches keep the ranks of a pipeline busy, and recomputation small?

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism,
2018.

Equal layers that fit under a number of bytes that autograd may keep; simulated makespans beside the
closed form; two processes with eight micro-batches and with one. The A/A run takes one micro-batch,
and one cell without recomputation. Speed-ups of four and eight cells with measured passes are
reported only.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from typing import Annotated, Any

from annotated_types import Ge, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.parts import part
from shoal.cost.pipeline.simulator import simulate
from shoal.ir.schedule import OpCosts
from shoal.plan.schedules.gpipe import GPipe

_RANKS = "shoal.claims.experiments.gpipe_ranks"
_MANY = 32


@part
class GPipeClaim(BaseClaim, row=139):
    """Equal layers on two real processes, four and eight simulated ones, and bytes kept.

    Args:
        layers: layers of the network that is timed, a multiple of 8, the most cells.
        width: width of its layers.
        batch: samples of a mini-batch, a multiple of 32.
        repeats: pairs of timings.
        budget: activations of one layer, for the whole mini-batch, that may be kept.
    """

    layers: Annotated[int, MultipleOf(8), Ge(8)] = 8
    width: Annotated[int, Ge(8)] = 512
    batch: Annotated[int, MultipleOf(_MANY), Ge(_MANY)] = 4096
    repeats: Annotated[int, Ge(3)] = 11
    budget: Annotated[int, Ge(4)] = 6

    def collect(self, run: ClaimRun) -> None:
        """Count and simulate; the full run also times processes, for a minute."""
        run.progress("layers in a budget", 0.0)
        alone = run.remember("alone", lambda: most_layers(self.budget, 1, 1, recompute=False))
        split = alone if run.as_baseline else most_layers(self.budget, 4, 8, recompute=True)
        run.put("layers_in_budget", split, alone)
        cases = list(itertools.product((2, 4, 8), (1, 8, _MANY)))
        simulated = (
            # One micro-batch has the work of all of them.
            makespan(k, *run.pick((m, 1.0, 3.0), (1, float(m), 3.0 * m)))
            for k, m in cases
        )
        run.put("makespan_error", simulated, ((m + k - 1) * 4.0 for k, m in cases))
        if run.quick:
            return
        shape = {"layers": self.layers, "width": self.width, "batch": self.batch}
        timed: dict[str, Any] = {**shape, "repeats": self.repeats, "timeout_s": 300.0}
        many = run.pick(8, 1)
        run.progress("two processes", 0.2)
        ranks = on_ranks(f"{_RANKS}:times", 2, ms=[1, many], recompute=True, **timed)
        one, several = slowest(ranks, "0"), slowest(ranks, "1")
        run.put("two_ranks", several, one, bound=2 * 8 / (8 + 1))
        run.progress("passes", 0.7)
        most = run.pick(_MANY, 1)
        ms = sorted({1, most})
        (passes,) = on_ranks(f"{_RANKS}:pass_times", 1, ms=ms, **timed)
        base = statistics.median(_split(2, 1, *times) for times in passes["1"])
        middle = statistics.median(one), statistics.median(several)
        run.details["simulated_speedup"] = {
            f"{k} ranks, {most} micro-batches": base
            / statistics.median(_split(k, most, *times) for times in passes[str(most)])
            for k in (4, 8)
        }
        run.profile = (
            f"two ranks: {1e3 * middle[0]:.0f} ms with 1 micro-batch, "
            f"{1e3 * middle[1]:.0f} ms with {many}"
        )


def makespan(k: int, m: int, forward: float, backward: float) -> float:
    """Simulated time of a step of k equal cells with m micro-batches."""
    costs = OpCosts.uniform(k, forward=forward, backward=backward)
    return float(simulate(GPipe().build(k, m), costs).makespan)


def _split(k: int, m: int, forward: float, backward: float) -> float:
    """The same, of passes that were measured through all layers."""
    return makespan(k, m, forward / k, backward / k)


def most_layers(budget: int, k: int, m: int, *, recompute: bool) -> int:
    """Most equal layers of which no rank keeps more than ``budget`` activations of one layer.

    Counted from what autograd really keeps in a step; ranks are threads.
    """
    from shoal.claims.experiments.gpipe_ranks import saved_bytes
    from shoal.claims.lab.thread_ranks import run_ranks

    batch, width = 4 * m, 4
    allowed = 4.0 * budget * batch * width

    @functools.cache
    def peak(layers: int) -> float:
        how: dict[str, Any] = {"layers": layers, "width": width, "batch": batch}
        run = functools.partial(saved_bytes, **how, m=m, recompute=recompute)
        return max(run_ranks(k, run))

    # It grows evenly with the layers of a cell: two counts say where to look.
    few, more = k, 5 * k
    slope = (peak(more) - peak(few)) / (more - few)
    result = max(k, k * math.floor((few + (allowed - peak(few)) / slope) / k))
    while result > k and peak(result) > allowed:
        result -= k
    while peak(result + k) <= allowed:
        result += k
    return result
