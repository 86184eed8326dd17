"""Decontamination: documents that share many words in a row with a benchmark are dropped.

Source: Brown et al., Language Models are Few-Shot Learners, 2020, appendix C: 13 words in a row.

Differs: the whole document is dropped, where the paper cuts it. Hashes find the documents; each is
then compared word by word, so none is dropped because two hashes are the same.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from annotated_types import Ge, Le

from shoal.core.errors import ConfigError, DataError
from shoal.core.parts import part
from shoal.fields.data.curate.protocols import CurateWork
from shoal.fields.data.filters import statistics
from shoal.fields.data.filters.costs import filter_estimate
from shoal.fields.data.filters.protocols import FilterBatch, FilterVerdict
from shoal.fields.data.filters.reference import grams_of
from shoal.fields.data.filters.statistics import Hashes, columns_of, gram_hashes, hash_table
from shoal.fields.data.readers import arrow
from shoal.fields.data.sources import Source, open_source
from shoal.ir import Estimate, Machine

# Bytes that one n-gram of a benchmark takes: its text in a set, and its hash in a table.
_EACH = 250.0


@part
class Decontaminate:
    """Drop documents that share ``n`` words in a row with a text of a benchmark.

    Words are runs of letters and digits, in lower case. Benchmarks' texts with fewer words are not
    looked for.

    Args:
        against: files or directories of the benchmarks, in any format that data may have; all
            columns of text are taken, also those within lists and structures.
        n: words in a row.
    """

    reasons: ClassVar = ("shares words in a row with a benchmark",)

    against: tuple[str, ...] = ()
    n: Annotated[int, Ge(5), Le(100)] = 13

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """One pass over the text, and a look-up for each word."""
        size = sum(open_source(place).num_bytes for place in self._places())
        return filter_estimate(work, machine, 6e-9, held=_EACH / 6 * size)

    def judge(self, batch: FilterBatch) -> FilterVerdict:
        """By hashes, then word by word."""
        index = _index(self._places(), self.n)
        broken = np.full(len(batch.texts), -1, np.int64)
        for at in np.flatnonzero(statistics.contains(batch.columns(), self.n, index.table)):
            if any(gram in index.grams for gram in grams_of(batch.texts[int(at)].as_py(), self.n)):
                broken[at] = 0
        return FilterVerdict(broken)

    def _places(self) -> tuple[str, ...]:
        if not self.against:
            raise ConfigError(
                "text_filter.decontaminate.against: no benchmark; give files, as in "
                "{name: decontaminate, against: [benchmark.jsonl]}"
            )
        return self.against


class _GramIndex(NamedTuple):
    """The n-grams of some benchmarks, as texts and as a table of hashes."""

    grams: frozenset[str]
    table: Hashes


@functools.lru_cache(maxsize=4)
def _index(places: tuple[str, ...], n: int) -> _GramIndex:
    grams: set[str] = set()
    hashes = [np.zeros(0, np.uint64)]
    for place in places:
        before = len(grams)
        for texts in _texts(open_source(place)):
            hashes.append(gram_hashes(columns_of(texts), n))
            for text in texts.to_pylist():
                grams.update(grams_of(text, n))
        if len(grams) == before:
            raise DataError(f"{place}: no text with {n} words in a row; give another benchmark")
    return _GramIndex(frozenset(grams), hash_table(np.concatenate(hashes)))


def _texts(source: Source) -> Any:
    """All texts of a source, ``large_string`` without nulls, an array for each column."""
    pa = arrow()
    for batch in source.batches():
        waiting = list(batch.columns)
        while waiting:
            column = waiting.pop()
            kind = column.type
            if pa.types.is_struct(kind):
                waiting += column.flatten()
            elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
                waiting.append(column.flatten())
            elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
                yield column.drop_null().cast(pa.large_string())
