"""[15] Guide: is a table prepared in little memory, and does the guide's plan pay?

Source: Deep Learning, Machine Learning, Advancing Big Data Analytics and Management, 2024, a survey
without a figure of its own.

A generated table is planned and prepared for a machine with 512 MiB by a process whose peak is
measured; its profile is compared with what numpy says of each column in memory. The same passes run
with one worker and with two. Then eight bundled tables are made dirty: a linear model learns from
what the guide's plan makes of the training rows, and from what dropping rows and scikit-learn's
defaults make of them, and both are scored on the same dirty held-out rows. The A/A run has the
whole table in memory, the first rows only, one worker twice, and the defaults in both places.
"""

from __future__ import annotations

import shutil
import time
import warnings
from functools import partial
from pathlib import Path

import numpy as np

from shoal.claims.catalogue import BaseClaim
from shoal.claims.experiments.guide_stream import errors_of, in_child, make
from shoal.claims.experiments.guide_tables import TABLES, dirty, guided, score, usual
from shoal.claims.frame import ClaimRun
from shoal.core.parts import Choice, part
from shoal.fields.data.prepare.batches import PrepTable
from shoal.fields.data.prepare.passes import Passes
from shoal.fields.data.prepare.pipeline import build_steps, fit
from shoal.fields.data.readers import BadRowCount
from shoal.fields.data.shards import opened

_STEPS = ("outliers", "impute", "scale")


@part
class GuideClaim(BaseClaim, row=15, needs=("sklearn", "statsmodels", "pyarrow"), cores=2):
    """A table that is streamed, and eight that are dirty.

    Args:
        num_bytes: of the large table.
        rounds: of one worker and two.
        draws: of dirt and held-out rows, for each small table.
    """

    num_bytes: int = 2**30
    rounds: int = 5
    draws: int = 10

    def collect(self, run: ClaimRun) -> None:
        """The quick run has a table of 64 MiB, and neither workers nor small tables."""
        run.progress("the large table", 0.0)
        data = run.work_dir / "large.parquet"
        make(data, 2**26 if run.quick else self.num_bytes, run.seed)
        found = {
            way: run.remember(way, partial(in_child, way, data, run.work_dir / way))
            for way in ("streamed", "in_memory", "first_rows")
        }
        run.put("peak_mib", found[run.pick("streamed", "in_memory")]["peak_mib"])
        run.details["peak in memory, MiB"] = found["in_memory"]["peak_mib"]
        exact = run.remember("errors", partial(errors_of, data, found))
        moments, ranks = exact[run.pick("streamed", "first_rows")]
        run.put("moment_error", moments)
        run.put("rank_error", ranks)
        if run.quick:
            return
        one, two = (partial(_prepared, data, run.work_dir / "pool", count) for count in (1, 2))
        pairs = {"two_workers": ("two", "one")}
        run.versus({"one": one, "two": two}, pairs, self.rounds, warmup=0)
        gains = []
        for at, name in enumerate(TABLES):
            run.progress(f"dirty {name}", 0.5 + 0.5 * at / len(TABLES))
            ours, theirs = run.remember(name, partial(_scores, name, self.draws))
            gains.append(float(np.mean(run.pick(ours, theirs)) - np.mean(theirs)))
            run.details[f"{name}: guide, defaults"] = [float(np.mean(ours)), float(np.mean(theirs))]
        run.put("wins", float(sum(gain > 0 for gain in gains)))


def _prepared(data: Path, place: Path, workers: int) -> float:
    """Fit and transform half of the table in a pool; s."""
    shutil.rmtree(place, ignore_errors=True)
    begin = time.perf_counter()
    choice = Choice(name="local", options={"workers": workers})
    shards = PrepTable(str(data)).shards(BadRowCount())
    shards = shards[: max(1, len(shards) // 2)]
    with opened(choice) as pool:
        passes = Passes(shards, place / "shards", pool, workers)
        passes.write(fit(build_steps(_STEPS), passes.gather, shards[0].nothing()))
    return time.perf_counter() - begin


def _scores(name: str, draws: int) -> tuple[list[float], list[float]]:
    ours, theirs = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of scikit-learn's solver on data that are not scaled well
        for seed in range(draws):
            rows = dirty(name, seed)
            ours.append(score(name, *guided(*rows)))
            theirs.append(score(name, *usual(*rows)))
    return ours, theirs
