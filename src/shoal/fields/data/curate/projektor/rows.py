"""Projektor as a method of curation: probe some rows of each source, draw the best mixture.

Source: Kang et al., Performance Scaling via Optimal Transport: Enabling Data Selection from
Partially Revealed Sources, 2023.

Rows are first counted by source. Vectors and classes are then made of those that are revealed, and
of no others until the mixture is chosen.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

import numpy as np
from annotated_types import Ge

from shoal.core.errors import DataError, require
from shoal.core.parts import part
from shoal.fields.data.curate.costs import streaming
from shoal.fields.data.curate.keeping import kept_of
from shoal.fields.data.curate.projektor.distance import LABEL_WEIGHT
from shoal.fields.data.curate.projektor.model import SIZES, Projektor
from shoal.fields.data.curate.projektor.probes import counts_of, linear_probe
from shoal.fields.data.curate.projektor.revealing import SourceRows, examples_of
from shoal.fields.data.curate.protocols import CurateProblem, CurateWork, Curation
from shoal.fields.data.prune.costs import prune_rates
from shoal.fields.data.prune.examples import TEXT_DIM
from shoal.fields.data.prune.protocols import PruneError
from shoal.fields.data.prune.scored_rows import by_shard, write_chosen
from shoal.fields.data.sources import open_source
from shoal.ir import Estimate, Interval, Machine

# Mixtures that are probed, at least, and probes of each at each size.
_MIXTURES, _PROBES = 66, 4
# Rows up to which a model is trained on what was kept, to measure what was predicted.
_CHEAP = 50_000
# Of logistic regression: passes over its rows, each with two products. Of transport: seconds of a
# pair of points. What is assumed: sources, rows of the validation data, classes, imports' seconds.
_PASSES, _PAIR_S = 40.0, 4e-7
_SOURCES, _VALIDATION, _CLASSES, _IMPORT_S = 3, 500, 10, 2.5


@part
class ProjektorRows:
    """Keep the mixture of sources on which a model is predicted to score best.

    Args:
        validation: file of rows that the model is to do well on, with the columns of the data.
        source: column that says which source a row is of; empty for ``source``, if there is one,
            and else every file is a source.
        label: column of classes; empty for ``label``.
        smaller: rows of the smaller probes.
        larger: rows of the larger probes; so many are revealed of each source.
        size: rows that are kept; 0 for the job's share.
        label_weight: of the distance between labels, beside that between vectors.
    """

    validation: str = ""
    source: str = ""
    label: str = ""
    smaller: Annotated[int, Ge(1)] = SIZES[0]
    larger: Annotated[int, Ge(2)] = SIZES[1]
    size: Annotated[int, Ge(0)] = 0
    label_weight: Annotated[float, Ge(0)] = LABEL_WEIGHT

    def __post_init__(self) -> None:
        require(
            self.smaller < self.larger,
            "method.smaller",
            self.smaller,
            expected=f"fewer rows than method.larger, {self.larger}",
        )

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """Read three times, train the probes, and solve transport for each mixture."""
        both = streaming(work, machine, write=work.keep, fixed_s=_IMPORT_S)
        read, rates, dim = both.terms_s.get("read", 0.0), prune_rates(machine), work.dim or TEXT_DIM
        revealed = _SOURCES * self.larger
        macs = 2 * _PASSES * _MIXTURES * _PROBES * (self.smaller + self.larger) * dim * _CLASSES
        terms = {
            **both.terms_s,
            "count and reveal": 2 * read,
            "probes": macs * rates.mac_s,
            "transport": _PAIR_S * 2 * _MIXTURES * revealed * _VALIDATION,
        }
        total, spread = sum(terms.values()), 1 + max(rates.spread, 1.0)
        return Estimate(
            step_s=Interval(value=total, low=total / spread, high=total * spread),
            terms_s=terms,
            memory_bytes={**both.memory_bytes, "transport": 24.0 * revealed * _VALIDATION},
        )

    def candidates(self, work: CurateWork, machine: Machine) -> Iterator[Self]:
        """Where validation data are named."""
        if self.validation:
            yield self

    def curate(self, problem: CurateProblem) -> Curation:
        """Count, reveal, probe, choose, and write the rows of the mixture."""
        if not self.validation:
            raise PruneError(
                "method.validation: empty; name a file with rows that the model is to do well on"
            )
        try:
            validation = open_source(self.validation, bad=problem.source.bad)
        except DataError as cause:
            raise PruneError(f"method.validation: {cause}") from cause
        rows = SourceRows.counted(problem, self.source, self.label)
        size = self.size or max(1, round(problem.keep * len(rows.codes)))
        if size > len(rows.codes):
            raise PruneError(
                f"method.size = {size}: expected at most {len(rows.codes)}, the rows of the data"
            )
        shown = rows.drawn([self.larger] * len(rows.names), problem.seed)
        seen = rows.read(problem, shown, "shown")
        wanted = rows.read_validation(problem, validation)
        *sources, test = examples_of(
            *(seen.take(rows.codes[shown] == code) for code in range(len(rows.names))), wanted
        )
        projektor = Projektor(
            sources,
            test,
            names=rows.names,
            sizes=(self.smaller, self.larger),
            mixtures=_MIXTURES,
            probes=_PROBES,
            label_weight=self.label_weight,
            seed=problem.seed,
        )
        projektor.fit(lambda done: problem.tick(0.2 + 0.5 * done, "probes"))
        best = projektor.best_mixture(size, rows.sizes)
        counts = counts_of(best.mixture, size)
        chosen = rows.drawn(counts, problem.seed)
        last = replace(problem, tick=lambda done, text: problem.tick(0.7 + 0.3 * done, text))
        parts = by_shard(chosen, rows.per_shard)
        result = kept_of(last, write_chosen, ("projektor", parts))
        measured = {}
        if size <= _CHEAP:
            train, test = examples_of(rows.read(problem, chosen, "kept"), wanted)
            measured["score"] = linear_probe(train, test)
        shutil.rmtree(problem.place / "revealed")
        equal = np.full(len(sources), 1 / len(sources))
        alone = zip(rows.names, np.eye(len(sources)), strict=True)
        known = [
            {
                "mixture": name,
                "shares": dict(zip(rows.names, mixture.tolist(), strict=True)),
                "distance": projektor.distance(mixture)[0],
                "probe": projektor.probed(mixture, self.larger),
                "predicted": projektor.predict(mixture, size),
            }
            for name, mixture in (("chosen", best.mixture), ("equal", equal), *alone)
        ]
        return result._replace(
            measured={"predicted_score": best.score, **measured},
            details={
                "size": size,
                "sources": dict(zip(rows.names, rows.sizes, strict=True)),
                "kept": dict(zip(rows.names, counts.tolist(), strict=True)),
                "mixtures": known,
                "tables": [_table(known, size, self.larger, measured)],
            },
        )


def _table(
    known: Sequence[Mapping[str, Any]], size: int, probed: int, measured: Mapping[str, float]
) -> dict[str, Any]:
    """What the mixtures score, for the report."""
    sources = [*known[0]["shares"]]
    rows = [
        [
            one["mixture"],
            *(f"{100 * one['shares'][name]:.1f} %" for name in sources),
            f"{one['distance']:.3f}",
            f"{one['probe']:.3f}",
            f"{one['predicted']:.3f}",
            f"{measured['score']:.3f}" if at == 0 and measured else "",
        ]
        for at, one in enumerate(known)
    ]
    columns = ["mixture", *sources, "distance", f"probes of {probed:,}", "predicted", "measured"]
    return {
        "title": f"scores of {size:,} rows on the validation data",
        "columns": columns,
        "rows": rows,
        "right": " " + "r" * (len(columns) - 1),
    }
