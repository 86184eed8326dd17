"""[82] QQT: do curves of single pools say which union of pools is best for a budget?

Source: Goyal et al., Scaling Laws for Data Filtering: Data Curation cannot be Compute Agnostic,
2024.

Four pools of source code, in which no characters, 15, 30 or 50 % of them change places; no
document is in two pools or in the test. A small reader predicts the next of 64 characters from the
eight before. The law sees its losses on single pools, up to eight passes; unions are trained only
to check it. The A/A run has the law for which a repeated sample is as good as a new one.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.tiny import corpus_of
from shoal.claims.frame import ClaimRun
from shoal.core.parts import Choice, part, table
from shoal.core.random import generator
from shoal.cost.scaling.repetition import PoolCurve, RepetitionLaw, fit_pools
from shoal.fields.data.curate.qqt.curves import probe
from shoal.fields.data.prune.protocols import PruneExamples

_CORRUPTED = (0.0, 0.15, 0.3, 0.5)
_CONTEXT, _CODE, _CHARACTERS, _DOCUMENT = 8, 16, 64, 4000
_PASSES, _POINTS, _TEST, _HIDDEN, _MODELS = 8, 24, 6000, 48, 2
# Budgets, as passes over a single pool.
_BUDGETS = (0.5, 2, 4, 8, 16)


class _Losses(NamedTuple):
    """Curves of the pools, and losses [unions, budgets] of unions of the best 1, 2, 3, 4."""

    curves: list[PoolCurve]
    unions: Any


@part
class QQTClaim(BaseClaim, row=82):
    """Pools of graded corruption, read by small networks.

    Args:
        size: characters to predict in each pool.
        draws: of documents.
    """

    size: int = 8000
    draws: int = 5

    def collect(self, run: ClaimRun) -> None:
        """Measure curves and unions, fit, compare; the quick run has one small draw."""
        rows, draws = (1500, 1) if run.quick else (self.size, self.draws)
        budgets = [round(passes * rows) for passes in _BUDGETS]
        corpus, results = corpus_of(run.context.data), []
        for draw in range(draws):
            run.progress(f"draw {draw + 1} of {draws}", draw / draws)
            losses = run.remember(f"draw {draw}", partial(_measured, corpus, rows, budgets, draw))
            laws = {f: fit_pools(losses.curves, form=f) for f in ("utility", "effective", "plain")}
            results.append(_judged(losses.unions, budgets, laws, run.pick("utility", "plain")))
        crossing, right, error, other = zip(*results, strict=True)
        run.put("crossing", [run.pick(one, 0.0) for one in crossing])
        run.put("choices_right", right)
        run.put("union_error", error, other)


def _judged(
    unions: Any, budgets: list[int], laws: dict[str, RepetitionLaw], form: str
) -> tuple[float, float, float, float]:
    """Growth of the best union, share of choices within 1 %, errors of this law and the others."""
    errors = {
        name: np.array([law.errors(budgets, range(count)) for count in range(1, 5)])
        for name, law in laws.items()
    }
    best, chosen = unions.argmin(axis=0), errors[form].argmin(axis=0)
    lost = unions[chosen, np.arange(len(budgets))] / unions.min(axis=0) - 1
    missed = {name: float(np.abs(one - unions)[1:].mean()) for name, one in errors.items()}
    other = min(missed["effective"], missed["plain"])
    return float(best[-1] - best[0]), float((lost <= 0.01).mean()), missed[form], other


def _measured(corpus: Choice, rows: int, budgets: list[int], draw: int) -> _Losses:
    *pools, test = _pools(corpus, rows, draw)
    samples = np.unique(np.geomspace(256, _PASSES * rows, _POINTS).astype(int) // 64) * 64

    def read(parts: list[PruneExamples], at: Any) -> Any:
        X, y = np.concatenate([p.X for p in parts]), np.concatenate([p.labels for p in parts])
        union = PruneExamples(X, y, _CHARACTERS)
        return probe(union, test, at, models=_MODELS, hidden=_HIDDEN, seed=draw)

    curves = [
        PoolCurve(rows, samples.astype(float), read([pool], samples.tolist())) for pool in pools
    ]
    return _Losses(curves, np.array([read(pools[: count + 1], budgets) for count in range(4)]))


def _pools(corpus: Choice, rows: int, draw: int) -> list[PruneExamples]:
    """Pools by corruption, the best first, and the test."""
    random = generator(draw, purpose="qqt documents")
    texts = [one.text[:_DOCUMENT] for one in table("corpus").build(corpus).documents()]
    order = random.permutation(len(texts))
    joined = ["".join(texts[at] for at in order[part::5]) for part in range(5)]
    names, counts = np.unique(list(joined[0]), return_counts=True)
    known = {name: at for at, name in enumerate(names[np.argsort(-counts)][: _CHARACTERS - 1])}
    codes = random.standard_normal((_CHARACTERS, _CODE)).astype(np.float32)
    result = []
    for share, size, text in zip((*_CORRUPTED, 0.0), (*[rows] * 4, _TEST), joined, strict=True):
        ids = np.array([known.get(one, _CHARACTERS - 1) for one in text[: 3 * size + _CONTEXT]])
        moved = np.flatnonzero(random.random(len(ids)) < share)
        ids[moved] = ids[random.permutation(moved)]
        at = np.sort(random.choice(len(ids) - _CONTEXT, size, replace=False))
        windows = codes[ids[at[:, None] + np.arange(_CONTEXT)]].reshape(size, -1)
        result.append(PruneExamples(windows, ids[at + _CONTEXT].astype(np.int64), _CHARACTERS))
    return result
