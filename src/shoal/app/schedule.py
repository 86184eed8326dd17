"""What ``shoal plan schedule`` shows and writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from shoal.app.show import console, table
from shoal.core.errors import ConfigError, DataError, require
from shoal.core.files import write_atomic, write_json
from shoal.cost.pipeline import Timeline, UniformLinks, simulate
from shoal.cost.pipeline_text import lines
from shoal.ir.schedule import OpCosts, Schedule
from shoal.plan.schedules import SCHEDULES

__all__ = ["Times", "built", "show", "summary", "write"]

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "none": 1.0}
# Rows of a terminal; the others are in the files.
_MOST_ROWS = 16
_MOST_EVENTS = 100_000
_MOST_BYTES = 64 * 2**20
_MOST_PASSES = 2_500_000


@dataclass(frozen=True, kw_only=True)
class Times:
    """What the passes take, all in one unit.

    Args:
        forward: one micro-batch through all layers of a rank.
        backward: back again; half of it is for the gradients of the weights.
        send: a boundary from rank to rank.
        output_layer: forward through the whole output layer; its backward takes as many times
            more as that of the layers.
        unit: s, ms, us or none.
    """

    forward: float
    backward: float
    send: float = 0.0
    output_layer: float = 0.0
    unit: str = "none"

    def simulate(self, schedule: Schedule) -> Timeline:
        """The timeline of ``schedule``, in seconds or in the unit without a name.

        Raises:
            ConfigError: a time that is no time.
        """
        for name in ("forward", "backward", "send", "output_layer"):
            value = getattr(self, name)
            require(
                math.isfinite(value) and value >= 0,
                f"--{name.replace('_', '-')}",
                value,
                expected="0 or more",
            )
        require(self.forward > 0, "--forward", self.forward, expected="more than 0")
        require(self.unit in _UNITS, "--unit", self.unit, expected=f"one of {', '.join(_UNITS)}")
        scale = _UNITS[self.unit]
        links = UniformLinks(latency_s=self.send * scale)
        return simulate(schedule, self._costs(schedule, scale), links)

    def _costs(self, schedule: Schedule, scale: float) -> OpCosts:
        stages, ranks = schedule.stages, schedule.ranks
        share = scale * ranks / stages
        forward, backward = self.forward * share, self.backward * share
        out, back = self.output_layer * scale, self.output_layer * scale * self.backward
        back /= self.forward
        rows = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
        seconds = {kind: [value] * stages for kind, value in rows.items()}
        if schedule.vocab_barriers == 0:
            for kind, more in (("F", out), ("B", back), ("I", back / 2), ("W", back / 2)):
                seconds[kind][-1] += more
        else:
            # With one meeting, S does its part of the input's gradient before it too.
            early = back / 2 if schedule.vocab_barriers == 1 else 0.0
            shards = {"EF": 0.0, "EB": 0.0, "S": out + early, "T": back - early}
            seconds |= {kind: [value / ranks] * ranks for kind, value in shards.items()}
        return OpCosts(
            seconds={kind: tuple(values) for kind, values in seconds.items()},
            held_bytes=(1.0,) * stages,
        )


def built(
    name: str,
    pp: int,
    microbatches: int,
    vpp: int | None,
    vocab_barriers: int,
) -> Schedule:
    """The schedule of this name, or in this file of torch's, whose name ends in ``.csv``.

    Raises:
        UnknownPartError: no schedule of this name.
        PlanError: numbers that the schedule does not fit, or a file that is none.
        DataError: a file that cannot be read.
    """
    if name.endswith(".csv"):
        from shoal.plan.schedules.torch_csv import from_torch_csv

        schedule = from_torch_csv(_text(Path(name)), name=Path(name).stem)
    else:
        part = SCHEDULES.build(name, where="NAME")
        if vpp is None:
            vpp = part.chunks or 2
        most = pp * microbatches * vpp
        require(
            most <= _MOST_PASSES,
            "--pp, --microbatches, --vpp",
            f"{pp}, {microbatches}, {vpp}",
            expected=f"a product of at most {_MOST_PASSES}",
        )
        schedule = part.build(pp, microbatches, vpp)
    if vocab_barriers:
        from shoal.plan.schedules.vocab import with_vocabulary

        require(vocab_barriers in (1, 2), "--vocab-barriers", vocab_barriers, expected="0, 1 or 2")
        schedule = with_vocabulary(schedule, cast(Literal[1, 2], vocab_barriers))
    return schedule


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path}: larger than 64 MiB; that is no schedule")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise DataError(f"{path}: cannot be read as text: {cause}") from cause


def write(
    schedule: Schedule, timeline: Timeline, times: Times, files: Mapping[str, Path | None]
) -> Iterator[str]:
    """Write the files that are asked for, and say which.

    Raises:
        PlanError: too many passes for a picture, or more than torch's format can say.
        ConfigError: a file that cannot be written.
    """
    unit = "" if times.unit == "none" else "s"
    title = f"{schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} micro-batches"
    timelines = {"predicted": timeline}
    for kind, path in files.items():
        if path is None:
            continue
        if kind == "perfetto":
            from shoal.cost.pipeline_trace import trace

            # Without a unit, one is shown as a millisecond.
            write_json(path, trace(timelines, unit_s=1.0 if unit else 1e-3), error=ConfigError)
        else:
            write_atomic(path, _file(kind, schedule, timelines, title, unit), error=ConfigError)
        yield f"wrote {path}"


def _file(
    kind: str, schedule: Schedule, timelines: Mapping[str, Timeline], title: str, unit: str
) -> str:
    if kind == "csv":
        from shoal.plan.schedules.torch_csv import to_torch_csv

        return to_torch_csv(schedule)
    from shoal.cost.pipeline_picture import page, svg

    return (svg if kind == "svg" else page)(timelines, title=title, unit=unit)


def summary(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """The schedule and its timeline as plain values; events only of fewer than 100,000 passes."""
    found: dict[str, Any] = {
        "name": schedule.name,
        "pp": schedule.ranks,
        "microbatches": schedule.microbatches,
        "vpp": schedule.stages // schedule.ranks,
        "vocab_barriers": schedule.vocab_barriers,
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "busy": timeline.busy,
        "in_flight": schedule.in_flight(),
        "passes": len(timeline),
    }
    if len(timeline) < _MOST_EVENTS:
        found["events"] = [
            {"rank": rank, "pass": str(op), "start": start, "end": end}
            for rank, op, start, end in timeline.events()
        ]
    return found


def show(schedule: Schedule, timeline: Timeline, times: Times) -> None:
    """Print the numbers, a row for each rank, and the timeline as text."""
    scale, word = _UNITS[times.unit], "" if times.unit == "none" else f" {times.unit}"

    def told(seconds: float) -> str:
        return f"{seconds / scale:,.6g}{word}"

    console().print(
        f"{schedule.name}: makespan {told(timeline.makespan)}, "
        f"bubble {100 * timeline.bubble:.1f} % of the work",
        markup=False,
    )
    shown = _rows(schedule.ranks)
    vpp = schedule.stages // schedule.ranks
    held = "in flight" if vpp == 1 else "chunks in flight"
    flying = schedule.in_flight()
    rows = [
        (
            rank,
            ", ".join(str(s) for s, place in enumerate(schedule.place) if place == rank),
            told(timeline.busy[rank]),
            told(timeline.makespan - timeline.busy[rank]),
            flying[rank],
        )
        for rank in shown
    ]
    table("", ("rank", "stages", "busy", "idle", held), rows, numeric="r rrr")
    if len(shown) < schedule.ranks:
        print(f"{schedule.ranks - len(shown)} ranks between them are not shown")
    wide = len(str(schedule.ranks - 1))
    columns = max(40, min(160, console().width) - wide - 1)
    for rank, line in zip(shown, lines(timeline, columns, shown), strict=True):
        print(f"{rank:>{wide}} {line}")


def _rows(ranks: int) -> list[int]:
    """Ranks to show: all, or the first and the last ones."""
    if ranks <= _MOST_ROWS:
        return list(range(ranks))
    half = _MOST_ROWS // 2
    return [*range(half), *range(ranks - half, ranks)]
