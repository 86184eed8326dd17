"""[6] T3: does a product hide the reduce-scatter of its own output?

Source: Pati et al., T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute &
Collectives, 2024.

Simulated: the paper's hardware on sublayers of four models, 8 and 16 devices. Really run: the
software form on two processes over a link so slow that messages take as long as the product. The
A/A run puts one after the other in its place.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, MultipleOf

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun, wire_bytes
from shoal.claims.protocols import ExperimentContext
from shoal.claims.ranks import on_ranks, slowest
from shoal.core.meter import Meter
from shoal.core.parts import part
from shoal.cost.t3.sublayers import MODELS, SublayerComparison, compare, sublayers
from shoal.machine.emulate import emulate, unavailable

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm

DEGREES = (8, 16)
_RANKS = "shoal.claims.experiments.t3_ranks"
_REAL = ("scatter_speedup", "gather_speedup")


@part
class T3(BaseClaim, row=6):
    """Simulated sublayers of T-NLG, GPT-3, PaLM and MT-NLG; two real processes with a slow link.

    Args:
        tokens: rows of the product that is really run.
        width: its columns, and its inner dimension on each process.
        repeats: pairs of timings.
    """

    tokens: Annotated[int, MultipleOf(2), Ge(64)] = 8192
    width: Annotated[int, MultipleOf(2), Ge(64)] = 1024
    repeats: Annotated[int, Ge(3)] = 15

    def collect(self, run: ClaimRun) -> None:
        """Simulate, and count bytes; the full run also times two processes, for a minute."""
        result = run.remember("simulated", lambda: _simulated(run.context))
        run.put("simulated_speedup", run.pick(_geomean([c.speedup for c in result]), 1.0))
        movement = _geomean([1 + c.movement for c in result]) - 1
        run.put("simulated_movement", run.pick(movement, 0.0))
        run.put(
            "over_bound",
            (
                run.pick(c.fused.seconds, c.product_s + c.reduce_scatter_s) / c.bound_s
                for c in result
            ),
        )
        run.put(
            "missing_updates",
            (max(abs(n - c.sublayer.product.tp) for n in c.fused.updates) for c in result),
        )
        run.put("bytes_over_ring", (_bytes_over_ring(n) for n in (2, 3, 4)))
        run.details["sublayers"] = [_row(c) for c in result]
        if run.quick:
            return
        if run.lacks(unavailable(), *_REAL):
            return
        self._real(run)

    def _real(self, run: ClaimRun) -> None:
        from shoal.parallel.overlap import TILES

        shape: dict[str, Any] = {"rows": self.tokens, "inner": self.width, "outer": self.width}
        run.progress("the product alone", 0.2)
        alone = run.remember(
            "product", lambda: on_ranks(f"{_RANKS}:product_s", 2, **shape, repeats=self.repeats)
        )
        product = max(statistics.median(times) for times in alone)
        sent = self.tokens // 2 * self.width * 4
        bandwidth = sent / product
        run.progress("products and messages", 0.3)
        with emulate(2, bandwidth=bandwidth) as network:
            ranks = on_ranks(
                f"{_RANKS}:pairs", 2, network=network, repeats=self.repeats,
                timeout_s=120.0 + 30.0 * product * self.repeats, tiled=not run.as_baseline, **shape,
            )  # fmt: skip
        forms = [form for form in ranks[0] if form != "difference"]
        seconds = {form: slowest(ranks, form) for form in forms}
        middle = {name: statistics.median(of) for name, of in seconds.items()}
        # Messages begin after the first tile, or end before the last.
        bound = 2.0 / (1.0 + 1.0 / (2 * TILES))
        for form in ("scatter", "gather"):
            run.put(f"{form}_speedup", seconds[form], seconds[f"{form}_after"], bound=bound)
        run.put_peer("scatter_speedup", seconds["scatter_after"], seconds["library"])
        messages = middle["scatter_after"] - product
        run.profile = (
            f"product {1e3 * product:.0f} ms, messages after it {1e3 * messages:.0f} ms, "
            f"tiled {1e3 * middle['scatter']:.0f} ms, gathered {1e3 * middle['gather']:.0f} ms"
        )


def _simulated(context: ExperimentContext) -> list[SublayerComparison]:
    results = []
    for index, (model, sizes) in enumerate(MODELS.items()):
        context.progress(f"simulating {model}", 0.2 * index / len(MODELS))
        for tp in DEGREES:
            results += [compare(layer) for layer in sublayers(model, *sizes, tp)]
    return results


def _geomean(values: list[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def _bytes_over_ring(world: int) -> float:
    """Bytes that threads in place of ranks really sent, over those of a ring."""
    import torch

    from shoal.claims.lab.thread_ranks import run_ranks
    from shoal.parallel.overlap.tile import scattered_product

    rows, width = 4 * world, 8
    meter = Meter([])

    def on(comm: Comm) -> None:
        scattered_product(torch.ones(rows, 3), torch.ones(3, width), comm)[1].wait()

    run_ranks(world, on, meter=meter)
    return wire_bytes(meter.totals()) / ((world - 1) * rows * width * 4)


def _row(found: SublayerComparison) -> dict[str, Any]:
    layer = found.sublayer
    return {
        "model": layer.model,
        "sublayer": layer.name,
        "tp": layer.product.tp,
        "speedup": found.speedup,
        "ideal_speedup": found.sequential_s / found.ideal_s,
        "ideal_near_memory_speedup": found.sequential_s / found.ideal_near_memory_s,
        "movement": found.movement,
    }
