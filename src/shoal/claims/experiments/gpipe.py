"""[139] GPipe: do micro-batches keep the ranks of a pipeline busy, and recomputation small?

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism, 2018.

Counted: how many equal layers fit under a number of bytes that autograd may keep, on four cells
with recomputation and on one without. Simulated: the makespan against its closed form. Really
run: two processes, a thread each, with eight micro-batches and with one. The A/A run takes one
micro-batch, and one cell without recomputation, in their place.

Reported but not judged, since the section of the claim sets no threshold: the speed-up of four and
eight cells with 32 micro-batches over two cells with one, simulated with times of passes that
were measured here; the paper has 3.4 / 1.8 and 6.3 / 1.8 times that of two.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from typing import Annotated, Any, ClassVar

from annotated_types import Ge
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.cost.pipeline.simulator import simulate
from shoal.ir.schedule import OpCosts
from shoal.plan.schedules.gpipe import GPipe

__all__ = ["GPipeClaim", "makespan", "most_layers"]

_RANKS = "shoal.claims.experiments.gpipe_ranks"
_MANY = 32


@part
class GPipeClaim(BaseClaim):
    """Equal layers on two real processes, four and eight simulated ones, and bytes kept.

    Args:
        layers: of the network that is timed.
        width: of its layers.
        batch: samples of a mini-batch, a multiple of 32.
        repeats: pairs of timings.
        budget: activations of one layer, for the whole mini-batch, that may be kept.
    """

    layers: int = 8
    width: Annotated[int, Ge(8)] = 512
    batch: int = 4096
    repeats: Annotated[int, Ge(3)] = 11
    budget: Annotated[int, Ge(4)] = 6

    rows: ClassVar[tuple[int, ...]] = (139,)

    def __post_init__(self) -> None:
        require(
            self.layers >= 8 and self.layers % 8 == 0,
            "claim.gpipe.layers",
            self.layers,
            expected="a multiple of 8, the most cells",
        )
        require(
            self.batch >= _MANY and self.batch % _MANY == 0,
            "claim.gpipe.batch",
            self.batch,
            expected=f"a multiple of {_MANY}, the most micro-batches",
        )

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """Count and simulate; the full run also times processes, for a minute."""
        context.progress("layers in a budget", 0.0)
        alone = context.remember("alone", lambda: most_layers(self.budget, 1, 1, recompute=False))
        split = alone if as_baseline else most_layers(self.budget, 4, 8, recompute=True)
        cases = list(itertools.product((2, 4, 8), (1, 8, _MANY)))
        simulated = tuple(
            # One micro-batch has the work of all of them.
            makespan(k, 1, float(m), 3.0 * m) if as_baseline else makespan(k, m, 1.0, 3.0)
            for k, m in cases
        )
        metrics = {
            "layers_in_budget": PairedSamples(method=(float(split),), baseline=(float(alone),)),
            "makespan_error": PairedSamples(
                method=simulated, baseline=tuple((m + k - 1) * 4.0 for k, m in cases)
            ),
        }
        if quick:
            return ClaimSamples(metrics=metrics)
        return self._timed(context, metrics, as_baseline)

    def _timed(
        self, context: ExperimentContext, metrics: dict[str, PairedSamples], as_baseline: bool
    ) -> ClaimSamples:
        from shoal.parallel.comm.processes import run_processes

        shape = {"layers": self.layers, "width": self.width}
        many = 1 if as_baseline else 8
        context.progress("two processes", 0.2)
        ranks = run_processes(
            f"{_RANKS}:times",
            2,
            {
                **shape,
                "batch": self.batch,
                "ms": [1, many],
                "recompute": True,
                "repeats": self.repeats,
            },
            timeout_s=300.0,
        )

        def seconds(at: int) -> tuple[float, ...]:
            return tuple(max(turn) for turn in zip(*(r[str(at)] for r in ranks), strict=True))

        metrics["two_ranks"] = PairedSamples(method=seconds(1), baseline=seconds(0))
        context.progress("passes", 0.7)
        most = 1 if as_baseline else _MANY
        ms = [1] if most == 1 else [1, most]
        (passes,) = run_processes(
            f"{_RANKS}:pass_times",
            1,
            {**shape, "batch": self.batch, "ms": ms, "repeats": self.repeats},
            timeout_s=300.0,
        )
        whole, small = passes["1"], passes[str(most)]
        base = statistics.median(_split(2, 1, *times) for times in whole)
        larger: dict[str, JsonValue] = {
            f"{k} ranks, {most} micro-batches": base
            / statistics.median(_split(k, most, *times) for times in small)
            for k in (4, 8)
        }
        middle = [statistics.median(seconds(at)) for at in (0, 1)]
        details: dict[str, JsonValue] = {
            "seconds_m1": middle[0],
            "seconds_m8": middle[1],
            "passes_s": passes,
            "simulated_speedup": larger,
        }
        return ClaimSamples(
            metrics=metrics,
            details=details,
            bounds={"two_ranks": 2 * 8 / (8 + 1)},
            profile=f"two ranks: {1e3 * middle[0]:.0f} ms with 1 micro-batch, "
            f"{1e3 * middle[1]:.0f} ms with {many}",
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
