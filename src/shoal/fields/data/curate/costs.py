"""What a pass over the rows of a data set costs, timed on some of these rows where they are.

A machine that is only described has the rates of one core of a server.
"""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Sequence
from typing import Any

from shoal.core.native import cpu_model
from shoal.fields.data.curate.protocols import CurateRates, CurateWork
from shoal.fields.data.readers import arrow
from shoal.fields.data.sources import SHARD_BYTES, Source, SourceShard
from shoal.ir import Estimate, Interval, Machine

# The rows of a shard in Arrow, decompressed, a few copies of a batch beside it.
_COPIES = 3.0
# Opening a shard's files, and writing them durably.
_SHARD_S = 0.01
# Starting a process that imports numpy and Arrow.
_WORKER_S = 1.0
# Bytes of rows that are timed; half-widths of a sum of timed rates, and of others.
_SAMPLE = 8e6
_SPREAD_TIMED, _SPREAD_DERIVED = 0.3, 1.0
# Bytes of text in a byte of a compressed file.
_COMPRESSED = 3.5


def workers_of(work: CurateWork, machine: Machine) -> int:
    """Shards that are in work at a time, on cores of their own."""
    return max(1, min(work.workers, machine.device.num_cores or work.workers))


def streaming(
    work: CurateWork, machine: Machine, *, write: float, rate: float = 0.0, fixed_s: float = 0.0
) -> Estimate:
    """One pass that reads every shard, computes, and writes a share of the rows.

    Args:
        work: the data.
        machine: whose processes do it.
        write: share of the bytes that is written.
        rate: bytes of rows that one process computes on in a second; 0 where that is nothing.
        fixed_s: seconds that do not depend on the data.
    """
    workers, rates = workers_of(work, machine), work.rates
    size = work.num_bytes * rates.inflate
    shards = max(1.0, work.num_bytes / SHARD_BYTES)
    terms = {
        "read": size * rates.read_s / workers,
        "write": write * size * rates.write_s / workers,
        "compute": size / rate / workers if rate else 0.0,
        "fixed": fixed_s + shards * _SHARD_S / workers + (_WORKER_S if work.workers > 1 else 0.0),
    }
    held = min(size, SHARD_BYTES * max(1.0, rates.inflate)) * _COPIES * workers
    spread = _SPREAD_TIMED if rates.measured else _SPREAD_DERIVED
    return Estimate(
        step_s=Interval.around(sum(terms.values()), spread),
        terms_s={name: seconds for name, seconds in terms.items() if seconds},
        memory_bytes={"shards": held},
    )


def rates_of(source: Source, machine: Machine) -> tuple[CurateRates, tuple[Any, ...]]:
    """How fast rows are read and written, and some of the rows; timed if it is this machine.

    Args:
        source: the rows; those that cannot be read are passed over here.
        machine: where they are to be curated.

    Raises:
        DataError: the data cannot be read.
    """
    rows = source.count()
    guess = _COMPRESSED if source.compressed else 1.0
    if machine.fingerprint.get("cpu") != cpu_model():
        return CurateRates(inflate=guess), ()
    shards = dataclasses.replace(source, bad="skip").shards(int(_SAMPLE / 4))
    chosen = [
        shards[at * len(shards) // min(len(shards), 16)] for at in range(min(len(shards), 16))
    ]
    batches, _, _ = _read(chosen)  # once, so that files are opened and code is loaded
    batches, stored, seconds = _read(chosen)
    size = sum(batch.nbytes for batch in batches)
    if not size:
        return CurateRates(inflate=guess), ()
    if rows is not None:
        total = rows * size / sum(batch.num_rows for batch in batches)
        guess = total / max(source.num_bytes, 1)
    elif stored:
        guess = size / stored
    begin = time.perf_counter()
    with arrow("parquet").ParquetWriter(
        io.BytesIO(), batches[0].schema, compression="zstd"
    ) as writer:
        for batch in batches:
            writer.write_batch(batch)
    write_s = (time.perf_counter() - begin) / size
    rates = CurateRates(read_s=seconds / size, write_s=write_s, inflate=guess, measured=True)
    return rates, tuple(batches)


def _read(shards: Sequence[SourceShard]) -> tuple[list[Any], int, float]:
    """Some rows of shards, their bytes as stored where that is known, and the seconds it took."""
    batches: list[Any] = []
    size = stored = 0
    begin = time.perf_counter()
    for shard in shards:
        for batch in shard.batches(4096):
            batches.append(batch)
            size += batch.nbytes
            if size > 2 * _SAMPLE:
                return batches, 0, time.perf_counter() - begin
        stored += shard.stored_bytes
        if size > _SAMPLE:
            break
    return batches, stored, time.perf_counter() - begin
