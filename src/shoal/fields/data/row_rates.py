"""How fast the rows of a data set are read and written, timed on some of these rows where they are.

A machine that is only described has the rates of one core of a server.
"""

from __future__ import annotations

import dataclasses
import io
import time
from collections.abc import Sequence
from typing import Any

from shoal.core.config import Value
from shoal.core.native import cpu_model
from shoal.fields.data.readers import arrow
from shoal.fields.data.sources import Source, SourceShard
from shoal.ir import Machine

# Bytes of rows that are timed.
_SAMPLE = 8e6
# Bytes of text in a byte of a compressed file.
_COMPRESSED = 3.5


class RowRates(Value):
    """How fast rows are read and written: of one core of a server, unless they were timed.

    Args:
        read_s: seconds to read a byte of rows, as it is in memory.
        write_s: seconds to write one as Parquet.
        inflate: bytes in memory for each byte as stored.
        row_bytes: of a row in memory; 0 where none was read.
        measured: timed on some of the rows, on this machine.
    """

    read_s: float = 1 / 0.35e9
    write_s: float = 1 / 0.12e9
    inflate: float = 1.0
    row_bytes: float = 0.0
    measured: bool = False


def row_rates(source: Source, machine: Machine) -> tuple[RowRates, tuple[Any, ...]]:
    """How fast rows are read and written, and some of the rows; timed if it is this machine.

    Args:
        source: the rows; those that cannot be read are passed over here.
        machine: where they are to be read.

    Raises:
        DataError: the data cannot be read.
    """
    rows = source.count()
    guess = _COMPRESSED if source.compressed else 1.0
    if machine.fingerprint.get("cpu") != cpu_model():
        return RowRates(inflate=guess), ()
    shards = dataclasses.replace(source, bad="skip").shards(int(_SAMPLE / 4))
    chosen = [
        shards[at * len(shards) // min(len(shards), 16)] for at in range(min(len(shards), 16))
    ]
    batches, _, _ = _read(chosen)  # once, so that files are opened and code is loaded
    batches, stored, seconds = _read(chosen)
    size = sum(batch.nbytes for batch in batches)
    if not size:
        return RowRates(inflate=guess), ()
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
    rates = RowRates(
        read_s=seconds / size,
        write_s=write_s,
        inflate=guess,
        row_bytes=size / sum(batch.num_rows for batch in batches),
        measured=True,
    )
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
