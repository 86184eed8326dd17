"""Data pruning as a method of curation: score every row, keep the hard or the easy ones.

Source: Sorscher et al., Beyond neural scaling laws: beating power law scaling via data pruning,
2022.

Rows are read twice: once for their vectors, of which float32 must fit in memory, and once for those
that are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Self

import numpy as np
from annotated_types import Gt, Le

from shoal.core.config import Kind
from shoal.core.parts import Choice, part, table
from shoal.cost.scaling.pruning import PruneAdvisor
from shoal.fields.data.curate.costs import streaming
from shoal.fields.data.curate.protocols import CurateProblem, CurateWork, Curation
from shoal.fields.data.prune.costs import prune_rates
from shoal.fields.data.prune.examples import LABEL
from shoal.fields.data.prune.protocols import DataScorer, DataSelector, RowIds, ScoreWork
from shoal.fields.data.prune.scored_rows import read_rows
from shoal.fields.data.prune.scoring import scored
from shoal.ir import Estimate, Interval, Machine

# What is assumed where only reading tells: bytes of a document, numbers of a vector, classes.
_DOCUMENT, _DIM, _CLASSES = 4000.0, 128, 10
# Seconds until scikit-learn is imported.
_IMPORT_S = 1.5


@part
class PruneRows:
    """Keep the rows that are hard, or easy, to learn.

    Args:
        scorer: how hard a row is, of the kind ``data_scorer``.
        selector: which are kept, of the kind ``data_selector``.
        label: column of classes; empty for ``label``, if there is one.
        keep: share of the rows; None for the job's.
    """

    scorer: Annotated[Choice, Kind("data_scorer")] = Choice(name="ssl_prototypes")
    selector: Annotated[Choice, Kind("data_selector")] = Choice(name="balanced")
    label: str = ""
    keep: Annotated[float, Gt(0), Le(1)] | None = None

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """Read for vectors, score, read and write what is kept."""
        inner, scorer = score_work(work, machine, self.label), self._scorer()
        keep = work.keep if self.keep is None else self.keep
        both = streaming(work, machine, write=keep, fixed_s=_IMPORT_S)
        score = scorer.estimate(inner, machine)
        text = 0.0 if work.dim else work.num_bytes * inner.rates.ngram_s
        terms = {
            **both.terms_s,
            "vectors": both.terms_s.get("read", 0.0) + text,
            "scores": score.step_s.value,
        }
        total, spread = sum(terms.values()), 1 + inner.rates.spread
        return Estimate(
            step_s=Interval(value=total, low=total / spread, high=total * spread),
            terms_s=terms,
            memory_bytes={**both.memory_bytes, **score.memory_bytes},
        )

    def candidates(self, work: CurateWork, machine: Machine) -> Iterator[Self]:
        """On vectors whose number is known: each scorer, on the side that the theory advises.

        With the share of the job, and with the share that the theory would keep, if it is another.
        """
        if not work.dim or not work.rows:
            return
        advisor, inner = PruneAdvisor(work.rows, work.dim), score_work(work, machine, self.label)
        advised = round(advisor.advise().keep, 2)
        for keep in dict.fromkeys((None, None if advised == work.keep else advised)):
            advice = advisor.advise(work.keep if keep is None else keep)
            selector = Choice(name="balanced", options={"side": advice.side})
            for name in table("data_scorer"):
                for one in table("data_scorer").build(name).candidates(inner, machine):
                    yield type(self)(
                        scorer=table("data_scorer").spell(one), selector=selector, keep=keep
                    )

    def curate(self, problem: CurateProblem) -> Curation:
        """Score all rows and write those that are chosen, and ``scores.parquet``."""
        scorer, selector = self._scorer(), self._selector()
        rows = read_rows(problem, self.label)
        examples = rows.examples
        problem.tick(0.4, f"scores of {len(examples.X):,} rows")
        scores = scored(scorer, examples, problem.seed)
        keep, dim = problem.keep if self.keep is None else self.keep, examples.X.shape[1]
        budget = max(1, round(keep * len(scores)))
        chosen = selector.select(scores, budget, groups=examples.y, dim=dim)
        result = rows.keep(problem, self.scorer.name, scores, chosen)
        advice = PruneAdvisor(len(scores), dim).advise(keep)
        return result._replace(
            details={
                "advice": advice._asdict(),
                "classes": _by_class(examples.y, chosen, rows.classes),
            }
        )

    def _scorer(self) -> DataScorer:
        built: DataScorer = table("data_scorer").build(self.scorer, where="method.scorer")
        return built

    def _selector(self) -> DataSelector:
        built: DataSelector = table("data_selector").build(self.selector, where="method.selector")
        return built


def score_work(work: CurateWork, machine: Machine, label: str) -> ScoreWork:
    """What scorers' estimates read of a curation."""
    labelled = label or LABEL in work.columns
    dim = work.dim or _DIM
    each = 4.0 * dim if work.dim else _DOCUMENT
    return ScoreWork(
        rows=max(2, work.rows or int(work.num_bytes / each)),
        dim=dim,
        classes=_CLASSES if labelled else 0,
        rates=prune_rates(machine),
    )


def _by_class(labels: RowIds | None, chosen: RowIds, names: list[str]) -> dict[str, list[int]]:
    """Rows of each class, and how many of them are kept."""
    if labels is None:
        return {}
    sizes = np.bincount(labels, minlength=len(names)).tolist()
    left = np.bincount(labels[chosen], minlength=len(names)).tolist()
    return {name: [size, kept] for name, size, kept in zip(names, sizes, left, strict=True)}
