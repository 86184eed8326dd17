"""The method ``filters``: rows whose text passes every filter, in the order of the filters."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
from annotated_types import MinLen

from shoal.core.config import Kind
from shoal.core.errors import DataError
from shoal.core.parts import Choice, part, table
from shoal.fields.data.curate.costs import streaming
from shoal.fields.data.curate.keeping import kept_of, write_rows
from shoal.fields.data.curate.protocols import CurateProblem, CurateWork, Curation
from shoal.fields.data.filters.protocols import FilterBatch, TextFilter
from shoal.fields.data.readers import BadRowCount, arrow
from shoal.fields.data.sources import SourceShard
from shoal.ir import Estimate, Interval, Machine

# Rows that are filtered together: their texts and counts stay in the caches.
_ROWS = 4096
# Examples of a shard, for each filter; their characters.
_EXAMPLES, _SHOWN = 3, 240
# Rows that are searched together for one that was changed.
_COMPARED = 64
# Bytes that are copied as quickly as they are made a part of a table of their own.
_COPIED = 8192
# Share of the text that is kept where no row can be looked at.
_KEPT = 0.5


@part
class FilteredRows:
    """Keep rows whose text passes every filter; some filters also change the text.

    Args:
        filters: which, in order; a row that one drops is not shown to the next.
    """

    filters: Annotated[tuple[Annotated[Choice, Kind("text_filter")], ...], MinLen(1)] = (
        Choice(name="gopher_quality"),
        Choice(name="gopher_repetition"),
        Choice(name="fineweb"),
    )

    def built(self) -> tuple[TextFilter, ...]:
        """The filters."""
        filters = table("text_filter")
        return tuple(filters.build(choice, where="method.filters") for choice in self.filters)

    def estimate(self, work: CurateWork, machine: Machine) -> Estimate:
        """Reading, every filter, writing: timed on some of the rows where there are some.

        Raises:
            DataError: there is no column of text.
        """
        _require_text(work.text, work.columns)
        parts = self.built()
        costs = [one.estimate(work, machine) for one in parts]
        held = sum(cost.memory_total for cost in costs)
        if work.sample:
            chain = FilterChain(self.names(), parts, work.text)
            for batch in work.sample:  # once for what is built or loaded when it is first used
                chain.kept(batch.slice(0, 16))
            begin = time.perf_counter()
            kept = sum(chain.kept(batch).nbytes for batch in work.sample)
            seconds = time.perf_counter() - begin
            size = sum(batch.nbytes for batch in work.sample)
            result = streaming(work, machine, write=kept / size, rate=size / seconds)
        else:
            result = streaming(work, machine, write=_KEPT)
            seconds = sum(cost.step_s.value for cost in costs)
            total = result.step_s.value + seconds
            terms = {**result.terms_s, "compute": seconds}
            result = result.model_copy(
                update={"step_s": Interval.around(total, 1.0), "terms_s": terms}
            )
        memory = {**result.memory_bytes, "filters": held}
        return result.model_copy(update={"memory_bytes": memory})

    def candidates(self, work: CurateWork, machine: Machine) -> Iterator[Self]:
        """Where there is text."""
        if work.text:
            yield self

    def names(self) -> tuple[str, ...]:
        """The filters as stages are called; one that comes again is numbered."""
        seen: Counter[str] = Counter()
        names = []
        for choice in self.filters:
            seen[choice.name] += 1
            names.append(choice.name + (f" {n}" if (n := seen[choice.name]) > 1 else ""))
        return tuple(names)

    def curate(self, problem: CurateProblem) -> Curation:
        """Filter each shard.

        Raises:
            DataError: there is no column of text.
        """
        _require_text(problem.text, problem.source.schema.names)
        return kept_of(problem, _filter_shard, (self.names(), self.built(), problem.text))


def _require_text(text: str, columns: Sequence[str]) -> None:
    if not text:
        raise DataError(
            "data: no column of text to filter; name one, as in --set columns=[text]; there are "
            f"{', '.join(columns[:20])}"
        )


@dataclass
class _StageTally:
    """What one filter did in a shard."""

    rows: int = 0
    dropped: int = 0
    seconds: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str]] = field(default_factory=list)


class FilterChain:
    """Filters one after the other, and what each has done.

    Args:
        names: of the stages.
        filters: as many.
        text: column of the rows.
    """

    def __init__(self, names: Sequence[str], filters: Sequence[TextFilter], text: str) -> None:
        self._filters, self._text = filters, text
        self.tallies = {name: _StageTally() for name in names}

    def kept(self, batch: Any) -> Any:
        """The rows of a record batch that pass, as a table, with their texts as they are now."""
        place = batch.schema.get_field_index(self._text)
        texts = FilterBatch(batch.column(place))
        changed = False
        for one, tally in zip(self._filters, self.tallies.values(), strict=True):
            begin, before = time.perf_counter(), texts.texts
            verdict = one.judge(texts)
            tally.rows += int(texts.alive.sum())
            dropped = texts.alive & (verdict.broken >= 0)
            texts.alive &= ~dropped
            if verdict.texts is not None:
                texts.replace(verdict.texts)
                changed = True
            tally.seconds += time.perf_counter() - begin
            tally.dropped += int(dropped.sum())
            broken = np.bincount(verdict.broken[dropped], minlength=len(one.reasons)).tolist()
            tally.counts.update(dict(zip(one.reasons, broken, strict=True)))
            tally.counts.update(verdict.counts)
            _show(
                tally,
                before,
                texts,
                dropped,
                [one.reasons[at] for at in verdict.broken[dropped][:_EXAMPLES]],
            )
        if changed:
            field_ = batch.schema.field(place)
            now = texts.texts.cast(field_.type)
            columns = [now if at == place else column for at, column in enumerate(batch.columns)]
            batch = arrow().RecordBatch.from_arrays(columns, schema=batch.schema)
        return _those(batch, texts.alive)


def _those(batch: Any, alive: npt.NDArray[np.bool_]) -> Any:
    """A table of some rows of a batch; long texts are not copied."""
    edges = np.flatnonzero(np.diff(alive, prepend=False, append=False)).reshape(-1, 2)
    if batch.nbytes < _COPIED * len(edges):
        parts = [batch.filter(arrow().array(alive))]
    else:
        parts = [batch.slice(first, end - first) for first, end in edges.tolist()]
    return arrow().Table.from_batches(parts, batch.schema)


def _show(
    tally: _StageTally, before: Any, texts: FilterBatch, dropped: Any, reasons: Sequence[str]
) -> None:
    """Keep a few examples of what was dropped, each with its reason, or changed."""
    for at, why in zip(np.flatnonzero(dropped).tolist(), reasons, strict=False):
        if len(tally.examples) >= _EXAMPLES:
            return
        tally.examples.append((before[at].as_py()[:_SHOWN], why))
    if texts.texts is before or len(tally.examples) >= _EXAMPLES:
        return
    for first in range(0, len(before), _COMPARED):
        some = slice(first, first + _COMPARED)
        differ = arrow("compute").not_equal(before[some], texts.texts[some])
        changed = differ.to_numpy(zero_copy_only=False) & texts.alive[some]
        for at in (first + np.flatnonzero(changed)).tolist():
            was, now = before[at].as_py(), texts.texts[at].as_py()
            same = next((i for i, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), 0)
            shown = slice(max(0, same - _SHOWN // 4), max(0, same - _SHOWN // 4) + _SHOWN)
            tally.examples.append((was[shown], f"changed to: {now[shown]}"))
            if len(tally.examples) == _EXAMPLES:
                return


def _filter_shard(
    shard: SourceShard, place: Path, shared: tuple[Sequence[str], Sequence[TextFilter], str]
) -> dict[str, Any]:
    chain, bad, rows = FilterChain(*shared), BadRowCount(), 0

    def kept() -> Iterator[Any]:
        nonlocal rows
        for batch in shard.batches(_ROWS, bad=bad):
            rows += batch.num_rows
            yield chain.kept(batch)

    count = write_rows(place.with_suffix(".parquet"), arrow().schema(list(shard.fields)), kept())
    return {
        "rows": rows,
        "kept": count,
        "bad": bad.rows,
        "first_bad": bad.first,
        "stages": [
            [name, one.rows, one.dropped, one.examples, dict(+one.counts), one.seconds]
            for name, one in chain.tallies.items()
        ],
    }
