"""Mining from a plan to a report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.bars import StackedBars
from shoal.core.files import open_atomic, write_atomic
from shoal.core.parts import Choice, table
from shoal.fields.data.mine.inputs import shards_of, together
from shoal.fields.data.mine.job import MineJob
from shoal.fields.data.mine.planning import check
from shoal.fields.data.mine.protocols import Itemsets, MiningProblem, least_support
from shoal.fields.data.mine.rules import rules_table, sets_table
from shoal.fields.data.mine.sharded import mine_sharded
from shoal.fields.data.readers import BadRowCount, arrow
from shoal.fields.running import RunOutcome, RunProgress

# Sets of two items and more that people are shown.
_SHOWN = 10


def execute(job: MineJob, choice: Choice, progress: RunProgress) -> RunOutcome:
    """Mine, and write ``itemsets.parquet``, ``rules.parquet`` and a picture.

    Raises:
        ShoalError: the data cannot be read, or there are more sets than the limit.
    """
    check(job)
    progress.say(0.0, "reading")
    begun = time.perf_counter()
    bad = BadRowCount()
    shards = shards_of(job, bad=bad)
    if job.sharded:
        read_s = 0.0
        found, more = mine_sharded(
            job,
            choice,
            shards,
            progress.directory / "shards",
            lambda done, text: progress.tick(done, text, {"done": done}),
        )
        bad.add(more.first, more.rows)
    else:
        baskets = together(shards, bad)
        read_s = time.perf_counter() - begun

        def tick(done: float, sets: int) -> None:
            rate = sets / max(time.perf_counter() - begun - read_s, 1e-9)
            text = f"{sets:,} sets ({rate:,.0f}/s)"
            progress.tick(max(done, 0.0), text, {"done": done}, sets=sets)

        problem = MiningProblem(
            baskets,
            least_support(job.min_support, baskets.num_baskets),
            target=job.target,
            max_len=job.max_len,
            max_itemsets=job.max_itemsets,
            tick=tick,
        )
        found = table("miner").build(choice, where="method").mine(problem)
    total_s = progress.seconds - read_s
    progress.say(0.99, "writing")
    found = found.take(np.lexsort((found.lengths, -found.support)))
    measured = {"total_s": total_s, "read_s": read_s, "itemsets": float(len(found))}
    _write_table(progress.directory / "itemsets.parquet", sets_table(found))
    if job.min_confidence is not None:
        rules = rules_table(found, job.min_confidence)
        measured["rules"] = float(rules.num_rows)
        _write_table(progress.directory / "rules.parquet", rules)
    lengths = np.bincount(found.lengths, minlength=1)[1:].tolist()
    _picture(lengths, progress.directory / "itemsets.svg")
    return RunOutcome(
        measured=measured,
        details={
            "lengths": lengths,
            "top": _top(found),
            "baskets": found.num_baskets,
            "bad_rows": bad.rows,
            "first_bad": bad.first,
        },
    )


def _top(found: Itemsets) -> list[list[str]]:
    """The most frequent sets of two items and more, of sets by descending support."""
    several = found.take(np.flatnonzero(found.lengths > 1)[:_SHOWN])
    rows = sets_table(several).to_pylist()
    return [[", ".join(map(str, row["items"])), f"{row['count']:,}"] for row in rows]


def _write_table(path: Path, rows: Any) -> None:
    with open_atomic(path) as file:
        arrow("parquet").write_table(rows, file, compression="zstd")


def _picture(lengths: list[int], path: Path) -> None:
    bars = StackedBars(
        "frequent sets by their number of items",
        {
            f"{length + 1} item{'s' if length else ''}": {"sets": float(count)}
            for length, count in enumerate(lengths or [0])
        },
        lambda value: f"{value:,.0f}",
    )
    write_atomic(path, bars.render())
