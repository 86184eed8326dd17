"""``shoal explain schedule``: who does what when in a pipeline?"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from shoal.core.errors import DataError, require
from shoal.core.parts import part
from shoal.core.tables import Table
from shoal.cost.pipeline.simulator import Timeline, UniformLinks, simulate
from shoal.cost.pipeline.text import lines
from shoal.ir import Explanation, Progress
from shoal.ir.explanation import Text
from shoal.ir.schedule import OpCosts, Schedule
from shoal.plan.schedules import SCHEDULES

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "none": 1.0}
# Rows of a terminal; the others are in the files.
_MOST_ROWS = 16
_MOST_EVENTS = 100_000
_MOST_BYTES = 64 * 2**20
_MOST_PASSES = 2_500_000
_Time = Annotated[float, Ge(0), Lt(math.inf)]


@part
class ScheduleStudy:
    """Show a pipeline schedule: passes, idle time and memory of every rank.

    It is simulated with equal stages; the runtime executes the same passes. `--out` saves a
    web page, a trace for ui.perfetto.dev and what torch.distributed.pipelining reads.

    **Examples**

        shoal explain schedule 1f1b --pp 4 --microbatches 8

        shoal explain schedule interleaved --vpp 2 --send 0.05 --picture schedule.svg

        shoal explain schedule vhalf --vocab-barriers 1 --output-layer 2 --save '[html]' --out vhalf

        shoal explain schedule zbv --out zbv

        shoal explain schedule zbv.csv --send 0.1

    Args:
        schedule: gpipe, 1f1b, interleaved, zb_h1, zbv, vhalf, skippipe, or a CSV file of torch's.
        pp: ranks of the pipeline.
        microbatches: micro-batches of a step.
        vpp: stages of a rank; what the schedule needs, or 2, if not given.
        forward: time of one micro-batch's forward through a rank's layers.
        backward: time of its backward; half of it is for the weights.
        send: time of a boundary from rank to rank.
        output_layer: time of a forward through the whole output layer; its backward takes as many
            times more as that of the layers.
        vocab_barriers: split the vocabulary over all ranks, with 1 or 2 meetings; 0 does not.
        unit: unit of the times: s, ms, us or none.
        save: what `--out` saves: html, perfetto, csv.
    """

    subject: ClassVar = "schedule"
    machine: ClassVar = None

    schedule: str
    pp: int = 4
    microbatches: int = 8
    vpp: int | None = None
    forward: Annotated[float, Gt(0), Lt(math.inf)] = 1.0
    backward: _Time = 2.0
    send: _Time = 0.0
    output_layer: _Time = 0.0
    vocab_barriers: Literal[0, 1, 2] = 0
    unit: Literal["s", "ms", "us", "none"] = "none"
    save: tuple[Literal["html", "perfetto", "csv"], ...] = ("html", "perfetto", "csv")

    def explain(self, machine: None, progress: Progress) -> Explanation:
        """The numbers, a row for each rank, and the timeline as text.

        Raises:
            UnknownPartError: no schedule of this name.
            PlanError: numbers that the schedule does not fit, or a file that is none.
            DataError: a file that cannot be read.
        """
        made = self._built()
        links = UniformLinks(latency_s=self.send * _UNITS[self.unit])
        timeline = simulate(made, self._costs(made), links)
        return Explanation(
            blocks=tuple(self._rows(made, timeline)),
            data=_summary(made, timeline),
            picture=lambda: self._drawn("svg", made, timeline),
            files={
                f"{made.name}.{'json' if kind == 'perfetto' else kind}": self._file(
                    kind, made, timeline
                )
                for kind in self.save
            },
        )

    def _built(self) -> Schedule:
        if self.schedule.endswith(".csv"):
            from shoal.plan.schedules.torch_csv import from_torch_csv

            made = from_torch_csv(_text(Path(self.schedule)), name=Path(self.schedule).stem)
        else:
            chosen = SCHEDULES.build(self.schedule, where="schedule")
            vpp = chosen.chunks or 2 if self.vpp is None else self.vpp
            require(
                self.pp * self.microbatches * vpp <= _MOST_PASSES,
                "--pp, --microbatches, --vpp",
                f"{self.pp}, {self.microbatches}, {vpp}",
                expected=f"a product of at most {_MOST_PASSES}",
            )
            made = chosen.build(self.pp, self.microbatches, vpp)
        if self.vocab_barriers:
            from shoal.plan.schedules.vocab import with_vocabulary

            made = with_vocabulary(made, self.vocab_barriers)
        return made

    def _costs(self, schedule: Schedule) -> OpCosts:
        stages, ranks, scale = schedule.stages, schedule.ranks, _UNITS[self.unit]
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

    def _rows(self, schedule: Schedule, timeline: Timeline) -> list[Table | str]:
        def told(seconds: float) -> str:
            word = "" if self.unit == "none" else f" {self.unit}"
            return f"{seconds / _UNITS[self.unit]:,.6g}{word}"

        shown, flying = _shown(schedule.ranks), schedule.in_flight()
        held = "in flight" if schedule.stages == schedule.ranks else "chunks in flight"
        rows = [
            (
                str(rank),
                ", ".join(str(s) for s, place in enumerate(schedule.place) if place == rank),
                told(timeline.busy[rank]),
                told(timeline.makespan - timeline.busy[rank]),
                str(flying[rank]),
            )
            for rank in shown
        ]
        wide = len(str(schedule.ranks - 1))
        # COLUMNS, or the terminal's; a pipe has no width.
        terminal = shutil.get_terminal_size((160, 24)).columns
        drawn = lines(timeline, max(40, min(160, terminal) - wide - 1), shown)
        hidden = schedule.ranks - len(shown)
        return [
            f"{schedule.name}: makespan {told(timeline.makespan)}, "
            f"bubble {100 * timeline.bubble:.1f} % of the work",
            Table(
                title="",
                columns=("rank", "stages", "busy", "idle", held),
                rows=tuple(rows),
                right="r rrr",
            ),
            *([f"{hidden} ranks between them are not shown"] if hidden else []),
            *(f"{rank:>{wide}} {line}" for rank, line in zip(shown, drawn, strict=True)),
        ]

    def _drawn(self, kind: Literal["svg", "html"], schedule: Schedule, timeline: Timeline) -> str:
        from shoal.cost.pipeline.picture import page, svg

        return (svg if kind == "svg" else page)(
            {"predicted": timeline},
            title=f"{schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} micro-batches",
            unit="" if self.unit == "none" else "s",
        )

    def _file(
        self, kind: Literal["html", "perfetto", "csv"], schedule: Schedule, timeline: Timeline
    ) -> Text:
        from shoal.cost.pipeline.trace import trace
        from shoal.plan.schedules.torch_csv import to_torch_csv

        if kind == "html":
            return lambda: self._drawn("html", schedule, timeline)
        if kind == "csv":
            return lambda: to_torch_csv(schedule)
        # Without a unit, one is shown as a millisecond.
        unit_s = 1e-3 if self.unit == "none" else 1.0
        return lambda: json.dumps(trace({"predicted": timeline}, unit_s=unit_s), indent=1)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path}: larger than 64 MiB, too large for a schedule")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        raise DataError(f"{path}: cannot be read as text: {cause}") from cause


def _summary(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """The schedule and its timeline as plain values; events only of fewer than 100,000 passes."""
    summary: dict[str, Any] = {
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
        summary["events"] = [
            {"rank": rank, "pass": str(op), "start": start, "end": end}
            for rank, op, start, end in timeline.events()
        ]
    return summary


def _shown(ranks: int) -> list[int]:
    """Ranks to show: all, or the first and the last ones."""
    if ranks <= _MOST_ROWS:
        return list(range(ranks))
    half = _MOST_ROWS // 2
    return [*range(half), *range(ranks - half, ranks)]
