"""One side of the guide claim's large table, in a process of its own, whose peak is measured.

``python -m shoal.claims.experiments.guide_stream WAY DATA DIRECTORY``: ``streamed`` plans and runs
the job ``prepare`` for a machine with 512 MiB; ``in_memory`` reads the table whole; ``first_rows``
profiles only some of it. Each writes ``result.json``.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shoal.core import children
from shoal.core.errors import ShoalError
from shoal.core.files import write_json
from shoal.fields.data.prepare.batches import batch_of
from shoal.fields.data.prepare.job import PrepareJob
from shoal.fields.data.prepare.kind import PrepareKind
from shoal.fields.data.prepare.profile import profile_of, sketch_profile
from shoal.machine import load

SHARES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_CAP = 512 * 2**20
_BLOCK = 2**16
_LIMIT_S = 900.0


def make(path: Path, num_bytes: int, seed: int) -> None:
    """Write numbers of several distributions, uncompressed: what lies on disk is what is read."""
    random = np.random.default_rng(seed)
    names = [f"x{at:02}" for at in range(16)]
    with pq.ParquetWriter(
        path,
        pa.schema([(name, pa.float64()) for name in names]),
        compression="none",
        use_dictionary=False,
    ) as writer:
        for _ in range(num_bytes // (8 * 16 * _BLOCK)):
            draws = [
                random.normal(1e3, 1, _BLOCK)
                if at % 4 == 0
                else random.lognormal(0, 2, _BLOCK)
                if at % 4 == 1
                else random.standard_t(2, _BLOCK)
                if at % 4 == 2
                else random.integers(0, 50, _BLOCK).astype(float)
                for at in range(16)
            ]
            draws[0][random.random(_BLOCK) < 0.1] = np.nan
            columns = [pa.array(one, from_pandas=True) for one in draws]
            writer.write_batch(pa.record_batch(columns, names))


def statistics(values: np.ndarray) -> list[float]:
    """Mean, standard deviation and quantiles of a column in memory."""
    return [float(values.mean()), float(values.std()), *np.quantile(values, SHARES).tolist()]


def _streamed(data: str, place: Path) -> dict[str, Any]:
    machine = load("laptop")
    tier = machine.device.main_memory.model_copy(update={"capacity_bytes": _CAP})
    device = machine.device.model_copy(update={"memory": (tier,)})
    small = machine.model_copy(update={"device": device})
    kind = PrepareKind()
    plan = kind.plan(PrepareJob(data=data), small)[0]
    report = kind.run(plan, place / "run", anyway=True)
    assert plan.profile is not None
    return {"columns": _columns(plan.profile), "seconds": report.measured["total_s"]}


def _columns(profile: Any) -> dict[str, list[float]]:
    return {one.name: [one.mean, one.std, *one.quantiles] for one in profile.columns}


def _in_memory(data: str) -> dict[str, Any]:
    """As a notebook would: the whole table, its numbers, their standard scores."""
    table, found = pq.read_table(data), {}
    for name in table.column_names:
        values = table[name].to_numpy()
        values = values[~np.isnan(values)]
        found[name] = statistics(values)
    return {"columns": found}


def _first_rows(data: str) -> dict[str, Any]:
    batch = next(pq.ParquetFile(data).iter_batches(_BLOCK // 100))
    places = np.arange(batch.num_rows, dtype=np.int64)
    return {"columns": _columns(profile_of(sketch_profile(batch_of(batch, places))))}


def in_child(way: str, data: Path, place: Path) -> Any:
    """What a process of its own has found."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    process = children.start("shoal.claims.experiments.guide_stream", way, str(data), str(place))
    if process.wait(_LIMIT_S):
        raise ShoalError(f"guide claim: the process {way} failed with {process.returncode}")
    return json.loads((place / "result.json").read_bytes())


def errors_of(data: Path, found: Any) -> dict[str, tuple[float, float]]:
    """Way -> largest error of mean and deviation, in deviations, and of the ranks of quantiles."""
    errors = dict.fromkeys(("streamed", "first_rows"), (0.0, 0.0))
    for name in pq.read_schema(data).names:
        values = pq.read_table(data, columns=[name])[name].to_numpy()
        values = np.sort(values[~np.isnan(values)])
        mean, std = float(values.mean()), float(values.std())
        for way, (moments, ranks) in errors.items():
            row = np.array(found[way]["columns"][name])
            moments = max(moments, abs(row[0] - mean) / std, abs(row[1] / std - 1))
            low, high = (
                np.searchsorted(values, row[2:], side) / len(values) for side in ("left", "right")
            )
            off = np.maximum(low - np.array(SHARES), np.array(SHARES) - high)
            errors[way] = (moments, max(ranks, float(off.max())))
    return errors


def main() -> None:
    """Do it, and write what was found and the peak of the resident set, MiB."""
    way, data, place = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    ways = {
        "streamed": lambda: _streamed(data, place),
        "in_memory": lambda: _in_memory(data),
        "first_rows": lambda: _first_rows(data),
    }
    result = ways[way]()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    write_json(place / "result.json", {**result, "peak_mib": peak})


if __name__ == "__main__":
    main()
