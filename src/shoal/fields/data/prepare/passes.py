"""Passes over the shards of a table: to look at rows, and to change and write them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.files import open_atomic, write_json
from shoal.core.parts import Choice, table
from shoal.core.pool import Pool
from shoal.fields.data.prepare.batches import PrepBatch, PrepShard
from shoal.fields.data.prepare.errors import PrepareError
from shoal.fields.data.prepare.pipeline import FittedStep, apply, look
from shoal.fields.data.prepare.profile import sketch_profile
from shoal.fields.data.prepare.protocols import Preparation
from shoal.fields.data.prepare.sketches import Sketches, dump_all, load_all, merged
from shoal.fields.data.readers import BadRowCount, arrow
from shoal.fields.data.shards import map_shards

PREPARED, HELD_OUT = "prepared", "held_out"
"""Directories of a run with the rows that were learned from, and the others."""

_SKETCHES = ".sketches.json"


@dataclass(frozen=True)
class Passes:
    """How passes over a table are made.

    Args:
        shards: of the table.
        directory: keeps what is done, so that a run that was stopped goes on.
        pool: where shards are processed; if it is open, processes start once for all passes.
        workers: shards that are in work at a time.
        tick: called with (shards done, shards, what is done).
    """

    shards: Sequence[PrepShard]
    directory: Path
    pool: Choice | Pool | None
    workers: int
    tick: Callable[[int, int, str], None] = lambda done, total, text: None

    def _map(self, name: str, text: str, function: Any, shared: Any) -> list[dict[str, Any]]:
        return map_shards(
            function,
            self.shards,
            self.directory / name,
            pool=self.pool,
            workers=self.workers,
            shared=shared,
            tick=lambda done, total: self.tick(done, total, text),
        )

    def gather(self, before: Sequence[FittedStep], group: Sequence[Preparation]) -> list[Sketches]:
        """What steps see of the training rows after other steps."""
        spell = table("preparation").spell
        names = ", ".join(spell(step).name for step in group)
        shared = ([one.dump() for one in before], [spell(step) for step in group])
        directory = f"fit-{len(before):03}"
        results = self._map(directory, f"fitting {names}", _look_shard, shared)
        if not sum(one["rows"] for one in results):
            raise PrepareError(f"steps: no rows are left for {names} to learn from")
        return self._merged(directory)

    def profile(self) -> tuple[Sketches, BadRowCount]:
        """What a profile is made of, and rows that were passed over."""
        bad = BadRowCount()
        for one in self._map("profile", "profile", _profile_shard, None):
            bad.add(one["first_bad"], one["bad"])
        return self._merged("profile")[0], bad

    def write(self, fitted: Sequence[FittedStep]) -> tuple[dict[str, int], Sketches, BadRowCount]:
        """Write the prepared rows; counts of them, what their profile is made of, bad rows."""
        counts, bad = {"rows": 0, PREPARED: 0, HELD_OUT: 0}, BadRowCount()
        dumps = [one.dump() for one in fitted]
        for one in self._map("transform", "preparing", _write_shard, dumps):
            bad.add(one["first_bad"], one["bad"])
            counts = {name: number + one[name] for name, number in counts.items()}
        return counts, self._merged("transform")[0], bad

    def _merged(self, name: str) -> list[Sketches]:
        """In the order of the shards, so that it does not depend on who was first."""
        whole: list[Sketches] = []
        for at in range(len(self.shards)):
            place = self.directory / name / f"{at:06}{_SKETCHES}"
            found = [load_all(one) for one in json.loads(place.read_bytes())]
            whole = [merged(*both) for both in zip(whole, found, strict=True)] if whole else found
        return whole


def _look_shard(shard: PrepShard, place: Path, shared: Any) -> dict[str, Any]:
    fitted = [FittedStep.load(one) for one in shared[0]]
    group = [table("preparation").build(one, where="steps") for one in shared[1]]
    found, rows = [Sketches() for _ in group], 0
    for batch in shard.batches():
        batch = apply(batch, fitted)
        rows += batch.num_rows
        found = [merged(*both) for both in zip(found, look(batch, group), strict=True)]
    write_json(place.with_suffix(_SKETCHES), [dump_all(one) for one in found])
    return {"rows": rows}


def _profile_shard(shard: PrepShard, place: Path, shared: Any) -> dict[str, Any]:
    bad, found = BadRowCount(), sketch_profile(shard.nothing())
    for batch in shard.batches(bad=bad):
        found = merged(found, sketch_profile(batch))
    write_json(place.with_suffix(_SKETCHES), [dump_all(found)])
    return {"bad": bad.rows, "first_bad": bad.first}


def _write_shard(shard: PrepShard, place: Path, shared: Any) -> dict[str, Any]:
    fitted, bad = [FittedStep.load(one) for one in shared], BadRowCount()
    nothing = apply(shard.nothing(), fitted)
    found, counts = sketch_profile(nothing), {"rows": 0, PREPARED: 0, HELD_OUT: 0}
    root = place.parent.parent.parent
    schema = nothing.to_arrow().schema
    with ExitStack() as files:
        writers = {}
        for side in (PREPARED, HELD_OUT)[: 1 + (shard.holdout > 0)]:
            file = files.enter_context(open_atomic(root / side / f"{place.name}.parquet"))
            writer = arrow("parquet").ParquetWriter(file, schema, compression="zstd")
            writers[side] = files.enter_context(writer)
        for batch in shard.batches(held_out=True, bad=bad):
            counts["rows"] += batch.num_rows
            made: PrepBatch = apply(batch, fitted)
            side = PREPARED if batch.training else HELD_OUT
            counts[side] += made.num_rows
            if made.num_rows:
                writers[side].write_batch(made.to_arrow())
            if batch.training:
                found = merged(found, sketch_profile(made))
    write_json(place.with_suffix(_SKETCHES), [dump_all(found)])
    return {**counts, "bad": bad.rows, "first_bad": bad.first}
