"""A job on logs from a plan to a report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

from shoal.core.errors import DataError
from shoal.core.files import expanded, open_atomic, write_atomic
from shoal.core.parts import Choice, table
from shoal.fields.data.logs.anomalies.groups import EventCollector, detection_f1
from shoal.fields.data.logs.events import (
    EventWriter,
    TemplateTimes,
    write_anomalies,
    write_templates,
)
from shoal.fields.data.logs.formats import LogFormat
from shoal.fields.data.logs.job import ParseLogsJob, ParseLogsPlan
from shoal.fields.data.logs.packed.container import pack_files, unpack, unpacked_bytes
from shoal.fields.data.logs.planning import input_of, parser_of, truth_of
from shoal.fields.data.logs.protocols import Ints, LogParser
from shoal.fields.data.logs.reading import LogFiles, masked
from shoal.fields.data.logs.score import read_truth, scores
from shoal.fields.data.readers import arrow
from shoal.fields.running import RunOutcome, RunProgress

# What the first pass found, until the events are written.
_MINED = ".mined.npz"
# Templates that the report names.
_SHOWN = 20
# Shares of the work that the two passes over the lines take.
_FIRST = 0.5


def execute(plan: ParseLogsPlan, progress: RunProgress) -> RunOutcome:
    """Parse, pack or unpack; files go to the run's directory, each whole or not at all.

    Raises:
        ShoalError: the data cannot be read, or what is asked cannot be done with it.
    """
    progress.say(0.0, "reading")
    if plan.job.unpack:
        return _unpacked(plan.job, progress)
    files, form = input_of(plan.job)
    if plan.job.pack:
        return _packed(files, form, progress)
    return _parsed(plan, files, form, progress)


def _parsed(
    plan: ParseLogsPlan, files: LogFiles, form: LogFormat, progress: RunProgress
) -> RunOutcome:
    path = progress.directory / _MINED
    found = _kept(path, files)
    if found is None:
        found = _mine(parser_of(plan, form), files, form, progress)
        _keep(path, files, found)
    templates, ids, without = found
    lines = len(ids)
    if not lines:
        raise DataError(f"data = {plan.job.data!r}: no line; give a log with lines in it")
    mine_s = progress.seconds
    texts = [text.decode("utf-8", "replace") for text in templates]
    times = TemplateTimes(len(texts), lines)
    collector = None
    if plan.job.anomalies is not None:
        collector = EventCollector(form, plan.job.window, plan.job.stride)
    writer, first = EventWriter(form), 0
    with (
        open_atomic(progress.directory / "events.parquet") as file,
        arrow("parquet").ParquetWriter(file, writer.schema, compression="zstd") as rows,
    ):
        for block in files.blocks(form):
            some = ids[first : first + len(block.ok)]
            rows.write_table(writer.table(block, some, templates, first))
            times.add(some, first)
            if collector is not None:
                collector.add(block, some)
            first += len(some)
            _tick(progress, _FIRST + 0.5 * first / lines, first, "written")
    counts = np.bincount(ids, minlength=len(texts))
    write_templates(progress.directory / "templates.csv", texts, counts)
    write_atomic(progress.directory / "templates.svg", times.picture(texts))
    measured = {
        "mine_s": mine_s,
        "lines": float(lines),
        "templates": float(len(texts)),
        "no_header_share": without / lines,
    }
    order = np.argsort(-counts, kind="stable")[:_SHOWN].tolist()
    details: dict[str, Any] = {
        "format": form.name,
        "templates": [[texts[at], int(counts[at])] for at in order],
        "first_without_header": _first_without(files, form) if without else "",
        "bad_lines": files.bad.rows if files.bad else 0,
    }
    truth = truth_of(files)
    if truth is not None:
        known = read_truth(truth, f"the truth beside {plan.job.data}")
        if len(known.ids) == lines:
            result = scores(ids, texts, known.ids, known.templates)
            measured |= {name: float(value) for name, value in result._asdict().items()}
            del measured["groups"]
        else:
            details["truth"] = f"{len(known.ids)} lines of truth for {lines} lines: not compared"
    if collector is not None and plan.job.anomalies is not None:
        measured |= _anomalies(plan.job.anomalies, plan.job.seed, collector, len(texts), progress)
    path.unlink()
    total_s = progress.seconds
    measured |= {"total_s": total_s, "bytes_per_s": plan.num_bytes / max(total_s, 1e-9)}
    return RunOutcome(measured=measured, details=details)


class _MinedLines(NamedTuple):
    """What the first pass over a log found.

    Args:
        templates: text of each.
        ids: int32 [n], template of each line.
        without: lines without a header.
    """

    templates: list[bytes]
    ids: Ints
    without: int


def _keep(path: Path, files: LogFiles, found: _MinedLines) -> None:
    """Write what was found, so that a run that is stopped does not read the log twice again."""
    sizes = np.array([files.num_bytes, *map(len, found.templates)])
    text = np.frombuffer(b"".join(found.templates), np.uint8)
    with open_atomic(path) as file:
        np.savez(file, sizes=sizes, text=text, ids=found.ids, without=found.without)


def _kept(path: Path, files: LogFiles) -> _MinedLines | None:
    """What :func:`_keep` has written; None if there is nothing whole of a log of this size."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as data:
            size, *lengths = data["sizes"].tolist()
            text, ends = data["text"].tobytes(), np.cumsum(lengths).astype(int).tolist()
            ids, without = data["ids"], int(data["without"])
    except (OSError, ValueError, KeyError, BadZipFile):
        return None
    if size != files.num_bytes:
        return None
    begins = [0, *ends[:-1]]
    return _MinedLines([text[a:b] for a, b in zip(begins, ends, strict=True)], ids, without)


def _mine(
    parser: LogParser, files: LogFiles, form: LogFormat, progress: RunProgress
) -> _MinedLines:
    miner, without, size = parser.open(), 0, 0
    groups: list[Ints] = []
    for block in files.blocks(form):
        groups.append(miner.add(masked(block.field(-1), form.masks)))
        without += len(block.ok) - int(block.ok.sum())
        size += len(block.text)
        done = _FIRST * min(1.0, size / max(files.num_bytes, 1.0))
        _tick(progress, done, sum(map(len, groups)), "parsed")
    mined = miner.finish()
    ids = np.concatenate(groups) if groups else np.empty(0, np.int32)
    return _MinedLines(mined.templates, mined.ids[ids] if len(ids) else ids, without)


def _anomalies(
    choice: Choice, seed: int, collector: EventCollector, templates: int, progress: RunProgress
) -> dict[str, float]:
    progress.say(0.95, "comparing groups of events")
    detector = table("anomaly_detector").build(choice, where="anomalies")
    groups = collector.groups(templates)
    result = detector.detect(groups, seed)
    path = progress.directory / "anomalies.csv"
    write_anomalies(path, groups.names, result.scores, result.anomalous)
    measured = {"groups": float(len(groups.names)), "anomalies": float(result.anomalous.sum())}
    if groups.labels is not None:
        measured["anomaly_f1"] = detection_f1(result, groups.labels)
    return measured


def _packed(files: LogFiles, form: LogFormat, progress: RunProgress) -> RunOutcome:
    whole = max(files.num_bytes, 1.0)
    target = progress.directory / "log.packed"
    sizes = [0]
    stored = pack_files(files, form, target, _bytes_done(progress, whole, sizes))
    return _of_bytes(sizes[0], progress, packed_share=stored / max(sizes[0], 1))


def _unpacked(job: ParseLogsJob, progress: RunProgress) -> RunOutcome:
    whole = max(unpacked_bytes(job.data), 1)
    target = progress.directory / "unpacked.log"
    size = unpack(expanded(job.data), target, tick=_bytes_done(progress, whole, [0]))
    return _of_bytes(size, progress)


def _of_bytes(size: int, progress: RunProgress, **measured: float) -> RunOutcome:
    seconds = progress.seconds
    rate = size / max(seconds, 1e-9)
    return RunOutcome(measured={"total_s": seconds, "bytes_per_s": rate, **measured})


def _bytes_done(progress: RunProgress, whole: float, sizes: list[int]) -> Callable[[float], None]:
    def tick(size: float) -> None:
        sizes[0] = int(size)
        rate = size / 1e6 / max(progress.seconds, 1e-9)
        progress.tick(min(size / whole, 1.0), f"{size / 1e6:,.0f} MB ({rate:,.1f} MB/s)", {})

    return tick


def _tick(progress: RunProgress, done: float, lines: int, what: str) -> None:
    rate = lines / max(progress.seconds, 1e-9)
    progress.tick(done, f"{lines:,} lines {what} ({rate:,.0f}/s)", {"lines": lines})


def _first_without(files: LogFiles, form: LogFormat) -> str:
    """The first line that has not the format's header."""
    number = 0
    for block in files.blocks(form):
        where = np.flatnonzero(~block.ok)
        if len(where):
            at = int(where[0])
            text = block.text[block.lines.begin[at] : block.lines.end[at]][:80]
            return f"line {number + at + 1}: {text.decode('utf-8', 'replace')}"
        number += len(block.ok)
    return ""
