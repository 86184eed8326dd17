"""[6] T3: does a product hide the reduce-scatter of its own output?

Source: Pati et al., T3: Transparent Tracking & Triggering for Fine-grained Overlap of Compute &
Collectives, 2024.

Simulated: the hardware of the paper on the sublayers of four published models, on 8 and 16
devices: how much faster than one after the other, how many bytes less, never faster than
product or link alone, and every tile updated once by every device. Really run: the software
form on two processes, a thread each, joined by a link so slow that messages take as long as
the product. The A/A run puts one after the other in its place.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, MultipleOf
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.protocols import ClaimSamples, ExperimentContext, PairedSamples
from shoal.core.meter import Meter
from shoal.core.parts import part
from shoal.cost.t3.sublayers import MODELS, SublayerComparison, compare, sublayers
from shoal.machine.emulate import emulate, unavailable

if TYPE_CHECKING:
    from shoal.parallel.protocols import Comm

__all__ = ["DEGREES", "T3"]

DEGREES = (8, 16)
_RANKS = "shoal.claims.experiments.t3_ranks"
_REAL = ("scatter_speedup", "gather_speedup")


@part
class T3(BaseClaim):
    """Simulated sublayers of T-NLG, GPT-3, PaLM and MT-NLG; two real processes with a slow link.

    Args:
        tokens: rows of the product that is really run.
        width: its columns, and its inner dimension on each process.
        repeats: pairs of timings.
    """

    tokens: Annotated[int, MultipleOf(2), Ge(64)] = 8192
    width: Annotated[int, MultipleOf(2), Ge(64)] = 1024
    repeats: Annotated[int, Ge(3)] = 15

    rows: ClassVar[tuple[int, ...]] = (6,)

    def run(
        self, context: ExperimentContext, *, quick: bool, as_baseline: bool = False
    ) -> ClaimSamples:
        """Simulate, and count bytes; the full run also times two processes, for a minute."""
        result = context.remember("simulated", lambda: _simulated(context))
        metrics = {
            "simulated_speedup": PairedSamples(
                method=(1.0 if as_baseline else _geomean([c.speedup for c in result]),)
            ),
            "simulated_movement": PairedSamples(
                method=(0.0 if as_baseline else _geomean([1 + c.movement for c in result]) - 1,)
            ),
            "over_bound": PairedSamples(
                method=tuple(
                    (c.product_s + c.reduce_scatter_s if as_baseline else c.fused.seconds)
                    / c.bound_s
                    for c in result
                )
            ),
            "missing_updates": PairedSamples(
                method=tuple(
                    max(abs(n - c.sublayer.product.tp) for n in c.fused.updates) for c in result
                )
            ),
            "bytes_over_ring": PairedSamples(method=tuple(_bytes_over_ring(n) for n in (2, 3, 4))),
        }
        details: dict[str, JsonValue] = {"sublayers": [_row(c) for c in result]}
        if quick:
            return ClaimSamples(metrics=metrics, details=details)
        reason = unavailable()
        if reason is not None:
            return ClaimSamples(
                metrics=metrics, details=details, skipped=dict.fromkeys(_REAL, reason)
            )
        return self._real(context, metrics, details, as_baseline)

    def _real(
        self,
        context: ExperimentContext,
        metrics: dict[str, PairedSamples],
        details: dict[str, JsonValue],
        as_baseline: bool,
    ) -> ClaimSamples:
        from shoal.parallel.comm.processes import run_processes
        from shoal.parallel.overlap import TILES

        shape = {"rows": self.tokens, "inner": self.width, "outer": self.width}
        context.progress("the product alone", 0.2)
        alone = context.remember(
            "product",
            lambda: run_processes(f"{_RANKS}:product_s", 2, {**shape, "repeats": self.repeats}),
        )
        product = max(statistics.median(times) for times in alone)
        sent = self.tokens // 2 * self.width * 4
        bandwidth = sent / product
        context.progress("products and messages", 0.3)
        with emulate(2, bandwidth=bandwidth) as network:
            ranks = run_processes(
                f"{_RANKS}:pairs",
                2,
                {**shape, "repeats": self.repeats, "tiled": not as_baseline},
                ranks_per_node=1,
                start=network.start,
                timeout_s=120.0 + 30.0 * product * self.repeats,
            )

        def seconds(form: str) -> tuple[float, ...]:
            return tuple(max(turn) for turn in zip(*(r[form] for r in ranks), strict=True))

        after, library = seconds("scatter_after"), seconds("library")
        metrics["scatter_speedup"] = PairedSamples(method=seconds("scatter"), baseline=after)
        metrics["gather_speedup"] = PairedSamples(
            method=seconds("gather"), baseline=seconds("gather_after")
        )
        # Messages begin after the first tile, or end before the last.
        bound = 2.0 / (1.0 + 1.0 / (2 * TILES))
        middle = {name: statistics.median(seconds(name)) for name in ranks[0] if name != _APART}
        details |= {
            "product_s": product,
            "bandwidth": bandwidth,
            "sent_bytes": sent,
            "medians_s": {name: float(value) for name, value in middle.items()},
            "difference": max(float(r[_APART]) for r in ranks),
        }
        messages = middle["scatter_after"] - product
        return ClaimSamples(
            metrics=metrics,
            details=details,
            bounds=dict.fromkeys(_REAL, bound),
            peers={
                "scatter_speedup": PairedSamples(
                    method=tuple(1 / s for s in after), baseline=tuple(1 / s for s in library)
                )
            },
            profile=f"product {1e3 * product:.0f} ms, messages after it {1e3 * messages:.0f} ms, "
            f"tiled {1e3 * middle['scatter']:.0f} ms, gathered {1e3 * middle['gather']:.0f} ms",
        )


_APART = "difference"


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
    sent = sum(v for name, v in meter.totals().items() if name.startswith("wire_bytes"))
    return sent / ((world - 1) * rows * width * 4)


def _row(found: SublayerComparison) -> dict[str, JsonValue]:
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
