"""Plans for logs: every parser in every way that it offers, ranked."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import NamedTuple

from shoal.core.errors import ConfigError, DataError, PlanError
from shoal.core.parts import table
from shoal.core.sizes import human_bytes
from shoal.fields.data.logs.costs import work_of
from shoal.fields.data.logs.formats import LogFormat, check_masks, format_named
from shoal.fields.data.logs.imports_log import imports_log
from shoal.fields.data.logs.job import ParseLogsJob, ParseLogsPlan
from shoal.fields.data.logs.protocols import LogParser, LogWork
from shoal.fields.data.logs.reading import LogFiles
from shoal.fields.data.readers import BadRowCount
from shoal.ir import Interval, Machine

# The interpreter with numpy and Arrow; a block of lines in all its forms, for each of its bytes.
_RUNTIME, _FORMS, _BLOCK = 1.6e8, 14.0, 8e6
# Reading the first lines, loading libraries, and a picture.
_FIXED_S = Interval(value=0.4, low=0.15, high=1.5)
# Bytes of a line that are kept until all templates are known, and when groups are compared.
_LINE_BYTES, _EVENT_BYTES = 4.0, 40.0
# Accuracy within which the quickest parser is preferred.
_AS_GOOD = 0.02
# Packing: share of a log's bytes, memory for each byte of a block, and a block; unpacking takes a
# share of its time.
_PACKED_SHARE, _UNPACKING = Interval(value=0.06, low=0.01, high=0.4), 0.15
_PACKING, _PACK_BLOCK = 30.0, 32e6
_IMPORTS = "imports"


class LogInput(NamedTuple):
    """What a job reads.

    Args:
        files: the log.
        form: its format, with the user's header and masks.
    """

    files: LogFiles
    form: LogFormat


def input_of(job: ParseLogsJob) -> LogInput:
    """The log of a job, and its format.

    Raises:
        ConfigError: there is no such format, or a header or mask that cannot be read.
        DataError: nothing is there, or it is no text.
    """
    where = str(imports_log()) if job.data == _IMPORTS else job.data
    files = LogFiles(where, job.pattern, BadRowCount() if job.bad == "skip" else None)
    form = files.recognized() if job.format == "auto" else format_named(job.format)
    if job.header:
        form = LogFormat("own", job.header)
    masks = form.masks if job.masks is None else job.masks
    form = dataclasses.replace(form, session=job.session or form.session, masks=masks)
    _ = form.program  # read now, so that what is wrong is said here
    check_masks(form.masks)
    try:
        re.compile(form.session.encode())
    except re.error as cause:
        raise ConfigError(
            f"session = {job.session!r}: {cause}; give a regular expression"
        ) from None
    return LogInput(files, form)


def plan_logs(job: ParseLogsJob, machine: Machine) -> list[ParseLogsPlan]:
    """The ways to do it: as accurate as the best about, the fastest first; then the others.

    Raises:
        PlanError: nothing fits in the machine's memory.
        ConfigError: a format, header or mask that cannot be read.
        DataError: the data cannot be read.
    """
    if job.unpack:
        return [_unpacking(job, machine)]
    files, form = input_of(job)
    work = work_of(files.head, files.num_bytes, form, len(form.masks), machine)
    plans = [_plan(job, machine, work, form, parser) for parser in _parsers(job, work, machine)]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        least = min((plan.predicted["memory_bytes"].value for plan in plans), default=0.0)
        raise PlanError(
            f"{job.data} on {machine.name}: no parser fits; {human_bytes(least)} are needed; parse "
            "it in pieces, chosen by pattern"
        )
    best = max(_accuracy(plan) for plan in fitting)

    def rank(plan: ParseLogsPlan) -> tuple[bool, float, float]:
        worse = _accuracy(plan) < best - _AS_GOOD
        return worse, -_accuracy(plan) if worse else 0.0, plan.predicted["total_s"].value

    return sorted(fitting, key=rank)


def _accuracy(plan: ParseLogsPlan) -> float:
    assumed = plan.predicted.get("assumed_accuracy")
    return 1.0 if assumed is None else assumed.value


def _parsers(job: ParseLogsJob, work: LogWork, machine: Machine) -> Iterator[LogParser]:
    parsers = table("log_parser")
    if job.parser is not None:
        yield parsers.build(job.parser, where="parser")
        return
    for name in parsers:
        yield from parsers.build(name).candidates(work, machine)
        if job.pack:  # which does not depend on it
            return


def _plan(
    job: ParseLogsJob, machine: Machine, work: LogWork, form: LogFormat, parser: LogParser
) -> ParseLogsPlan:
    rates, spelled = work.rates, table("log_parser").spell(parser)
    if job.pack:
        seconds = Interval.around(work.num_bytes * rates.pack_s, rates.spread)
        memory = _PACKING * min(work.num_bytes, _PACK_BLOCK)
        predicted = {"packed_share": _PACKED_SHARE}
        why = f"packing {human_bytes(work.num_bytes)}"
    else:
        cost = parser.estimate(work, machine)
        read = 2 * work.num_bytes * rates.read_s  # once more for the parameters
        around = read + work.masks * work.num_bytes * rates.mask_s + work.lines * rates.write_s
        seconds = _sum(Interval.around(around, rates.spread), cost.step_s)
        memory = cost.memory_total + _LINE_BYTES * work.lines
        predicted = {"assumed_accuracy": parser.accuracy()}
        why = f"{spelled}: about {work.lines:,.0f} lines, {work.masks} masks"
        if job.anomalies is not None:
            detector = table("anomaly_detector").build(job.anomalies, where="anomalies")
            more = detector.estimate(work, machine)
            seconds = _sum(seconds, more.step_s)
            memory += more.memory_total + _EVENT_BYTES * work.lines
    memory += _RUNTIME + _FORMS * min(work.num_bytes, _BLOCK)
    seconds = _sum(seconds, _FIXED_S)
    capacity = machine.device.main_memory.capacity_bytes
    basis = "timed on this machine" if rates.measured else "those of one core of a server"
    return ParseLogsPlan(
        job=job.model_copy(update={"parser": spelled}),
        machine=machine,
        predicted={
            "total_s": seconds,
            "bytes_per_s": Interval(
                value=work.num_bytes / max(seconds.value, 1e-9),
                low=work.num_bytes / max(seconds.high, 1e-9),
                high=work.num_bytes / max(seconds.low, 1e-9),
            ),
            "memory_bytes": Interval.around(memory, 0.6),
            **predicted,
        },
        planner="log_parsers",
        fits=not capacity or memory <= capacity,
        why=f"{why}; format {form.name}",
        notes=(f"rates are {basis}", "accuracy is that published over sixteen systems of Loghub"),
        num_bytes=work.num_bytes,
        format=form.name,
    )


def _sum(one: Interval, other: Interval) -> Interval:
    """Two times after each other; the ends at once, as what is slow is slow in both."""
    return Interval(
        value=one.value + other.value, low=one.low + other.low, high=one.high + other.high
    )


def _unpacking(job: ParseLogsJob, machine: Machine) -> ParseLogsPlan:
    from shoal.fields.data.logs.costs import rates_of
    from shoal.fields.data.logs.packed.container import unpacked_bytes

    size = unpacked_bytes(job.data)
    rates = rates_of(machine)
    parser = job.parser or table("log_parser").spell(table("log_parser").build("drain"))
    seconds = _sum(Interval.around(size * rates.pack_s * _UNPACKING, rates.spread), _FIXED_S)
    return ParseLogsPlan(
        job=job.model_copy(update={"parser": parser}),
        machine=machine,
        predicted={
            "total_s": seconds,
            "memory_bytes": Interval.around(_RUNTIME + _PACKING * min(size, _PACK_BLOCK), 0.6),
        },
        planner="log_parsers",
        why=f"unpacking {human_bytes(size)}",
        num_bytes=float(size),
        format="packed",
    )


def parser_of(plan: ParseLogsPlan, form: LogFormat) -> LogParser:
    """The parser of a plan, with the settings of the format.

    Raises:
        ConfigError: it has none.
    """
    if plan.job.parser is None:
        raise ConfigError("parser: the plan has none; make one with shoal plan parse_logs --out")
    parser: LogParser = table("log_parser").build(plan.job.parser, where="parser")
    return parser.suited(form.depth, form.similarity)


def truth_of(files: LogFiles) -> bytes | None:
    """The file of Loghub's layout with the truth about a log; None where there is none.

    Raises:
        DataError: it cannot be read.
    """
    from shoal.fields.data.readers import FilePiece, opened

    if len(files.listing.files) != 1:
        return None
    url = files.listing.url(files.listing.files[0])
    for ending in ("", ".gz", ".bz2", ".xz"):
        if url.endswith(ending) and ending:
            url = url.removesuffix(ending)
    try:
        with opened(FilePiece(f"{url}_structured.csv")) as stream:
            return stream.read()
    except DataError:
        return None
