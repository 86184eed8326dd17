"""QQT as a method of curation: rank rows, cut pools, probe each, keep the best union for a budget.

Source: Goyal et al., Scaling Laws for Data Filtering: Data Curation cannot be Compute Agnostic,
2024.

*Differs*: the probes are small networks on labelled vectors, and quality is the opposite of a
score of difficulty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Self

import numpy as np
from annotated_types import Ge, Le

from shoal.core.config import Kind
from shoal.core.parts import Choice, part, table
from shoal.cost.scaling.repetition import PoolCurve
from shoal.fields.data.curate.costs import streaming
from shoal.fields.data.curate.protocols import CurateProblem, CurateWork, Curation
from shoal.fields.data.curate.qqt.curves import QQT, probe
from shoal.fields.data.prune.examples import LABEL
from shoal.fields.data.prune.protocols import PruneError
from shoal.fields.data.prune.rows import score_work
from shoal.fields.data.prune.scored_rows import read_rows
from shoal.fields.data.prune.scorers.networks import BATCH, training_macs
from shoal.fields.data.prune.scoring import canonical_order, scored
from shoal.ir import Estimate, Interval, Machine

_TEST, _MODELS, _POINTS = 0.2, 4, 16


@part
class QQTRows:
    """Keep the quality pools that are best for so many training samples.

    Args:
        samples: that a model will be trained on, repetitions counted; 0 for as many as rows.
        pools: of equal size, by quality.
        passes: over its pool that each probe takes.
        scorer: how hard a row is, of the kind ``data_scorer``; the easiest are the best.
        label: column of classes; empty for ``label``.
    """

    samples: Annotated[int, Ge(0)] = 0
    pools: Annotated[int, Ge(2), Le(100)] = 4
    passes: Annotated[int, Ge(3)] = 8
    scorer: Annotated[Choice, Kind("data_scorer")] = Choice(name="prototypes")
    label: str = ""

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """Read for vectors, score, train a probe on each pool, read and write what is kept."""
        inner = score_work(work, machine, self.label or LABEL)
        score = table("data_scorer").build(self.scorer).estimate(inner, machine)
        both = streaming(work, machine, write=0.5, fixed_s=1.5)
        test = _POINTS * inner.rows * _TEST
        steps = int(self.passes * inner.rows * (1 - _TEST) / self.pools / BATCH)
        macs = training_macs(_MODELS, steps, int(test), inner.dim, inner.classes)
        terms = {
            **both.terms_s,
            "vectors": both.terms_s.get("read", 0.0),
            "scores": score.step_s.value,
            "probes": self.pools * macs * inner.rates.mac_s,
        }
        total, spread = sum(terms.values()), 1 + inner.rates.spread
        return Estimate(
            step_s=Interval(value=total, low=total / spread, high=total * spread),
            terms_s=terms,
            memory_bytes={**both.memory_bytes, **score.memory_bytes},
        )

    def candidates(self, work: CurateWork, machine: Machine) -> Iterator[Self]:
        """On labelled vectors."""
        if work.dim and LABEL in work.columns:
            yield self

    def curate(self, problem: CurateProblem) -> Curation:
        """Probe the pools, and write the rows of the best union."""
        rows = read_rows(problem, self.label)
        examples, n = rows.examples, len(rows.examples.X)
        problem.tick(0.3, f"scores of {n:,} rows")
        scorer = table("data_scorer").build(self.scorer, where="method.scorer")
        scores = scored(scorer, examples, problem.seed)
        if examples.y is None or examples.classes < 2:
            raise PruneError(
                f"{problem.source.where}: probes need two classes or more; name their column with "
                "method.label"
            )
        by_quality = np.array_split(np.argsort(scores, kind="stable"), self.pools)
        # A fifth of all rows, whichever pool they are of, is for the probes' errors alone.
        test = np.zeros(n, bool)
        test[canonical_order(examples)[: max(1, round(_TEST * n))]] = True
        training = [pool[~test[pool]] for pool in by_quality]
        size = min(map(len, training))
        if size < 2 * BATCH:
            raise PruneError(
                f"{self.pools} pools of {size} rows: too few for a probe; expected "
                f"{2 * BATCH} or more each: give fewer pools"
            )
        points = np.unique(np.geomspace(BATCH, self.passes * size, _POINTS).astype(int) // BATCH)
        samples, held, curves = points * BATCH, examples.take(np.flatnonzero(test)), []
        for number, pool in enumerate(training):
            problem.tick(0.4 + 0.1 * number / self.pools, f"probe of pool {number}")
            errors = probe(
                examples.take(pool[:size]),
                held,
                samples.tolist(),
                models=_MODELS,
                seed=problem.seed,
            )
            curves.append(PoolCurve(size, samples.astype(float), errors))
        qqt, budget = QQT(seed=problem.seed).fit(curves), self.samples or n
        choice = qqt.choose(budget)
        chosen = np.sort(np.concatenate([by_quality[pool] for pool in choice.pools]))
        result = rows.keep(problem, "qqt", scores, chosen)
        frontier = list(qqt.law_.frontier(budget * 2.0**power for power in range(-3, 4)))
        return result._replace(
            measured={"predicted_error": choice.error.value},
            details={
                "utilities": qqt.law_.utilities.tolist(),
                "half_lives": qqt.law_.half_lives.tolist(),
                "pools": list(choice.pools),
                "frontier": [
                    {
                        "samples": math.ceil(one.budget),
                        "pools": list(one.pools),
                        "error": one.error.value,
                    }
                    for one in frontier
                ],
                "tables": [
                    {
                        "title": "the best pools for each budget",
                        "columns": ["samples", "pools", "predicted error"],
                        "rows": [
                            [f"{math.ceil(one.budget):,}", len(one.pools), f"{one.error.value:.3f}"]
                            for one in frontier
                        ],
                        "right": "rrr",
                    }
                ],
            },
        )
