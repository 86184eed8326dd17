"""[41] GemmForest: does a forest know how long a matrix product takes, and on which tile?

Source: Huynh-Tran et al., Understanding GEMM Performance and Energy on NVIDIA Ada Lovelace: A
Machine-Learning-based Analytical Approach, 2024.

A sweep of torch's products and of an own tiled kernel; the forest predicts unseen rows and shapes.
The A/A run has the roofline, which knows no tile. The quick run counts: products against NumPy's,
and the forest on elements that the kernel's loops move instead of times. Draw and energy need a
sensor.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.protocols import ExperimentContext
from shoal.core.parts import part
from shoal.core.random import generator
from shoal.cost.gemm.predictor import fit
from shoal.cost.gemm.validate import SPLITS, HeldOut, held_out, tile_choices
from shoal.machine.probes.gemm import Gemm, drawn, moved_elements, own_product
from shoal.machine.probes.gemm_table import TILES, GemmPoint, GemmShape, GemmTable, telling
from shoal.machine.protocols import ProbeContext as Probing

_ROOFLINE = "roofline"
_WITHIN = 1.10
_EDGE = 1024
# Rounding of fp32 sums: an error of so many units of the sum of the terms' sizes.
_TOLERANCE = 1e-5
_SENSORLESS = "no sensor of power on this machine: draw and energy are modelled, not measured"


@part
class GemmForest(BaseClaim, row=41, needs=("c++", "sklearn", "torch")):
    """A sweep of this machine's products, and a forest on it.

    Args:
        budget_s: seconds of the sweep.
        trees: trees of the forest.
        pairs: rounds of the best and the worst tile at 1024^3.
    """

    budget_s: Annotated[float, Gt(0)] = 150.0
    trees: Annotated[int, Ge(1)] = 100
    pairs: Annotated[int, Ge(1)] = 25

    def collect(self, run: ClaimRun) -> None:
        """See :class:`~shoal.claims.catalogue.BaseClaim`."""
        run.put("wrong_products", _wrong(run.seed, run.as_baseline))
        run.progress("counting what the tiles move", 0.05)

        def count() -> HeldOut:
            turns = 0, 3 * (90 if run.quick else 200), 3
            shapes = [s for i in range(*turns) for s in drawn(run.seed, i, threads=1)]
            trees = 30 if run.quick else self.trees
            return held_out(_counted(shapes), "grouped", trees=trees, folds=3, peers=False)

        # Median errors of forest and roofline on elements moved, of shapes held out.
        run.put("moved_error_over_roofline", *_medians(run, run.remember("moved", count)))
        if not run.quick:
            self._time(run)

    def _time(self, run: ClaimRun) -> None:
        context = run.context
        table = run.remember("sweep", lambda: self._sweep(context))
        splits = {}
        for name in SPLITS:
            run.progress(f"predicting: {name} split", 0.65 + 0.05 * SPLITS.index(name))
            made = functools.partial(held_out, table, name, trees=self.trees, seed=run.seed)
            splits[name] = run.remember(name, made)
        who, grouped = run.pick("forest", _ROOFLINE), splits["grouped"]
        run.put("time_r2", splits["random"].r2(who), bound=1.0)
        run.put("grouped_error", grouped.errors(who))
        run.put("error_over_roofline", *_medians(run, grouped))
        inside = (
            not run.as_baseline and low <= real <= high
            for low, real, high in zip(grouped.low, grouped.seconds, grouped.high, strict=True)
        )
        run.put("interval_coverage", inside, bound=0.9)
        run.progress("choosing tiles", 0.85)
        chosen = tile_choices(table, trees=self.trees, seed=run.seed, roofline=run.as_baseline)
        run.put("good_tiles", (c.loss <= _WITHIN for c in chosen), bound=1.0)
        predictor = run.remember("forest", lambda: fit(table, trees=self.trees))
        run.put("shrinking", _shrinking(predictor.seconds))
        best = predictor.best_tile(_EDGE, _EDGE, _EDGE)[0].shape.tile
        best = run.pick(best, min(TILES))
        run.progress("best and worst tile", 0.9)
        seconds = self._tiles(run, best)
        if "watts_error" in predictor.errors:
            run.put("power_error", predictor.errors["watts_error"])
        else:
            run.skip(_SENSORLESS, "power_error")
        run.details["splits"] = {name: split.summary() for name, split in splits.items()}
        run.profile = f"{len(table.points)} products in {self.budget_s:g} s; tiles at {_EDGE}^3: "
        run.profile += ", ".join(f"{tile}: {1e3 * s:.0f} ms" for tile, s in seconds.items())

    def _sweep(self, context: ExperimentContext) -> GemmTable:
        probe = Gemm(
            budget_s=self.budget_s, path=str(context.work_dir / "gemm.jsonl"), seed=context.seed
        )
        with Probing(home=Path(context.work_dir)) as probing:
            return probe.sweep(
                probing,
                lambda done, total, text: context.progress(f"sweep: {text}", 0.6 * done / total),
            )

    def _tiles(self, run: ClaimRun, best: int) -> dict[str, float]:
        """Rounds of the chosen and of the slowest tile; seconds of one run of each tile."""
        random = generator(run.seed, purpose="gemm tiles")
        a = random.random((_EDGE, _EDGE), dtype=np.float32)
        b = random.random((_EDGE, _EDGE), dtype=np.float32)
        arms = {str(t): functools.partial(own_product, a, b, t) for t in TILES}

        def once() -> dict[str, float]:
            return {name: s[0] for name, s in run.race(arms, 1, warmup=1, swaps={}).items()}

        seconds = run.remember("tiles", once)
        worst = max(seconds, key=lambda name: seconds[name])
        both = {"chosen": arms[str(best)], "worst": arms[worst]}
        timed = run.race(both, self.pairs, warmup=1, swaps={})
        run.put("tile_gain", timed["chosen"], timed["worst"])
        return seconds


def _medians(run: ClaimRun, found: HeldOut) -> tuple[float, float]:
    """Median error of the predictor and of the roofline."""
    forest, roofline = (float(np.median(found.errors(name))) for name in ("forest", _ROOFLINE))
    return run.pick(forest, roofline), roofline


def _counted(shapes: list[GemmShape]) -> GemmTable:
    """A table whose seconds are elements moved, as the kernel's loops count them."""
    points = []
    for shape in shapes:
        moved = float(moved_elements(shape))
        points.append(
            GemmPoint(**shape.model_dump(), seconds=moved, low=moved, high=moved, repeats=1)
        )
    return GemmTable(fingerprint=telling(), points=tuple(points))


def _wrong(seed: int, by_numpy: bool) -> int:
    """Products of irregular shapes, at every tile, off from fp64 by more than rounding."""
    wrong = 0
    for index in range(8):
        random = generator(seed, purpose="gemm check", index=index)
        M, N, K = (int(size) for size in random.integers(1, 300, 3))
        a = random.standard_normal((M, K), dtype=np.float32)
        b = random.standard_normal((K, N), dtype=np.float32)
        exact = a.astype(np.float64) @ b.astype(np.float64)
        room = _TOLERANCE * (np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64))
        for tile in TILES:
            result = a @ b if by_numpy else own_product(a, b, tile)
            wrong += bool((np.abs(result - exact) > room + 1e-30).any())
    return wrong


def _shrinking(seconds: object) -> float:
    """Products that are predicted to take less than 0.9 times as long when K doubles."""
    shapes, longer = [], []
    for index in range(300):
        for shape in drawn(1, index, threads=2, largest=2048):
            shapes.append(shape)
            longer.append(shape.model_copy(update={"K": 2 * shape.K}))
    notes = [np.asarray(seconds(list(which))) for which in (shapes, longer)]  # type: ignore[operator]
    return float(np.sum(notes[1] < (0.9 - 1e-9) * notes[0]))
