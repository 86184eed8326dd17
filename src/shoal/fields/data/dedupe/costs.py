"""What deduplication costs: the rates of a machine, and the estimate that methods over rows share.

The rates are timed here in about a second and kept in ``dedupe.json`` of Shoal's home for this
processor; for a machine that is only described they follow from its peak rate.
"""

from __future__ import annotations

import numpy as np

from shoal.core.native import cpu_model
from shoal.core.random import generator
from shoal.fields.data.dedupe.protocols import DedupeRates, DedupeWork
from shoal.fields.data.minhash.hasher import MinHasher, text_digests
from shoal.fields.data.minhash.lsh import KeyedRows, RowClusters, sorted_runs
from shoal.fields.data.readers import arrow
from shoal.fields.data.sources import SHARD_BYTES
from shoal.fields.rates import core_share, kept_rates, least_seconds
from shoal.ir import Estimate, Interval, Machine

# Bytes of text of a word with its space, of English and of program text alike.
_WORD = 6.0
# Half-widths: of a sum of timed rates on a shared machine, and of derived ones.
_SPREAD_TIMED, _SPREAD_DERIVED = 0.5, 3.0
# The rows of a shard in Arrow, decompressed, a few copies of a batch beside it.
_COPIES = 4.0
# Of a lake, assumed: questions about a table, tables that contain each, and how much larger than
# the mean the largest is. What is contained in what is not known before.
_QUESTIONS, _CONTAINED, _LARGEST, _SPREAD_LAKE = 4.0, 3.0, 10.0, 4.0
# Rates of one core with AVX-512 at 2.6 GHz, in floating-point peak 83 GFLOP/s; others by that.
_KNOWN = 83e9
_CORE = {
    "shingles": 1.5e7,
    "slots": 3e9,
    "digest": 2.5e8,
    "sort": 1.5e7,
    "probe": 300.0,
}


def shingles_of(work: DedupeWork) -> float:
    """About how many shingles the data has."""
    return work.size / (_WORD if work.unit == "words" else 1.0)


def row_estimate(
    work: DedupeWork, machine: Machine, *, compute_s: float, bands: int, key_bytes: float
) -> Estimate:
    """Two passes that read, one that computes, sorting in one process, and writing all.

    Args:
        work: the data.
        machine: whose processes do it.
        compute_s: seconds of one process on all rows.
        bands: that are sorted.
        key_bytes: of memory for each row while a band is sorted.
    """
    workers = max(1, min(work.workers, machine.device.num_cores or work.workers))
    rates, shard = work.rates, SHARD_BYTES * max(1.0, work.reading.inflate)
    terms = {
        "read": 2 * work.size * work.reading.read_s / workers,
        "compute": compute_s / workers,
        "sort": bands * work.rows / rates.sort,
        "write": work.size * work.reading.write_s / workers,
    }
    total, spread = sum(terms.values()), 1 + rates.spread
    return Estimate(
        step_s=Interval(value=total, low=total / spread, high=total * spread),
        terms_s=terms,
        memory_bytes={
            "shards": min(work.size, shard) * _COPIES * workers,
            "rows": (key_bytes + 16.0) * work.rows,
        },
    )


def lake_estimate(work: DedupeWork, machine: Machine, *, full: bool) -> Estimate:
    """Footers, some questions about each table, and reading tables that are contained.

    Args:
        work: the tables.
        machine: whose processes do it.
        full: all rows of the pairs that samples leave are compared.
    """
    workers = max(1, min(work.workers, machine.device.num_cores or work.workers))
    rates = work.rates
    terms = {
        "footers": work.tables / rates.probe,
        "samples": _QUESTIONS * work.tables / rates.probe,
        "rows": (_CONTAINED if full else 0.0) * work.num_bytes * work.reading.read_s / workers,
        "recipes": 2 * work.num_bytes * work.reading.read_s,
    }
    total, spread = sum(terms.values()), 1 + max(rates.spread, _SPREAD_LAKE)
    largest = work.num_bytes / max(work.tables, 1) * _LARGEST
    return Estimate(
        step_s=Interval(value=total, low=total / spread, high=total * spread),
        terms_s=terms,
        memory_bytes={"tables": largest * _COPIES},
    )


def rates_of(machine: Machine) -> DedupeRates:
    """How fast a machine is: timed if it is this one, else derived from its description.

    Raises:
        ConfigError: the file of what was timed is damaged.
    """
    if machine.fingerprint.get("cpu") == cpu_model():
        return kept_rates("dedupe.json", cpu_model(), DedupeRates, timed)
    share = core_share(machine, _KNOWN)
    scaled = {name: share * rate for name, rate in _CORE.items()}
    return DedupeRates(**scaled, spread=_SPREAD_DERIVED, measured=False)


def timed(documents: int = 4000) -> DedupeRates:
    """Time the passes on this machine, for about a second.

    Args:
        documents: of 100 words, that are made for it.
    """
    draw = generator(0, purpose="dedupe rates")
    words = np.array([f"{'word':.{2 + at % 3}}{at:03}" for at in range(1000)])
    lines = [" ".join(row) for row in words[draw.integers(0, 1000, (documents, 100))]]
    texts = arrow().array(lines, arrow().large_string())
    size, shingles = sum(map(len, lines)), documents * 96.0
    few, many = MinHasher(16), MinHasher(144)
    short = least_seconds(lambda: few.signatures(texts))[0]
    longer = least_seconds(lambda: many.signatures(texts))[0]
    slots = 128 * shingles / max(longer - short, 1e-9)
    digest = size / least_seconds(lambda: text_digests(texts))[0]
    n = 50 * documents
    keys = draw.integers(0, 2**63, (1, n)).astype(np.uint64)
    rows = np.arange(n)

    def sort() -> None:
        clusters = RowClusters(n)
        for _, some, of in sorted_runs([KeyedRows(keys, rows)], 2.0**31):
            clusters.unite_equal(some, of)

    return DedupeRates(
        shingles=shingles / max(short - 16 * shingles / slots, 1e-9),
        slots=slots,
        digest=digest,
        sort=n / least_seconds(sort)[0],
        probe=_CORE["probe"],
        spread=_SPREAD_TIMED,
        measured=True,
    )
