"""The passes of one step of a pipeline, as predicted and as they were done.

Every rank of the first replica's first pipeline records its passes in one step; the
chief writes them beside what the plan predicted. Times of ranks on different hosts are
as far apart as the hosts' clocks.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from shoal.core.files import write_json
from shoal.ir import Event, Op, TrainPlan, Work
from shoal.train.hooks import RankRun, RunHook
from shoal.train.layout import RunDir

if TYPE_CHECKING:
    from shoal.cost.pipeline.simulator import Timeline
    from shoal.parallel.engine import ParallelEngine
    from shoal.train.loop import TrainStepResult

# The step of a run whose passes are recorded.
_RECORDED = 4


class TimelineHook(RunHook):
    """Records the passes of one step, when memory and threads are warm."""

    kind = "timeline"

    def begin(self, run: RankRun, first: int) -> None:
        """Choose the step."""
        self._step = min(first + _RECORDED, run.total - 1)

    def step_begins(self, run: RankRun, number: int) -> bool:
        """Have its passes timed."""
        return number == self._step

    def step_done(self, run: RankRun, number: int, result: TrainStepResult) -> None:
        """Collect what the ranks recorded."""
        if number == self._step:
            gather(run.trainer.engine, run.directory, number)


def gather(engine: ParallelEngine, directory: RunDir, step: int) -> None:
    """Collect what the ranks of each pipeline recorded; the job's first pipeline writes it.

    Called by all ranks after a step with ``record``.
    """
    import torch

    runtime, pp = engine.runtime, engine.ranks.pp
    longest = max(len(ops) for ops in engine.schedule.ops)
    mine = torch.zeros(1, longest, 2, dtype=torch.float64)
    # Monotonic clocks of hosts begin anywhere: the wall clock, read now, puts them in line.
    began = runtime.began + (time.time() - time.perf_counter())
    for place, event in enumerate(runtime.events or ()):
        # In float64: seconds since 1970 have no fractions in float32.
        times = (began + event.start, began + event.end)
        mine[0, place] = torch.tensor(times, dtype=torch.float64)
    everyone = torch.empty(pp.world, longest, 2, dtype=torch.float64)
    pp.all_gather(everyone, mine, tag="timeline").wait()
    if engine.ranks.world.rank != 0:
        return
    begin = min(float(everyone[rank, 0, 0]) for rank in range(pp.world))
    rows = [
        [rank, *op, float(start - begin), float(end - begin)]
        for rank, ops in enumerate(engine.schedule.ops)
        for op, (start, end) in zip(ops, everyone[rank].tolist(), strict=False)
    ]
    write_json(directory.timeline, {"step": step, "passes": rows})


def read(directory: RunDir) -> list[Event]:
    """The measured passes; none where the run has no pipeline."""
    if not directory.timeline.exists():
        return []
    data = json.loads(directory.timeline.read_text())
    return [
        Event(rank, Op(kind, stage, mb), start, end)
        for rank, kind, stage, mb, start, end in data["passes"]
    ]


def timelines(plan: TrainPlan, directory: RunDir) -> dict[str, Timeline]:
    """Predicted and measured, for one picture; empty where the run has no pipeline."""
    from shoal.cost.pipeline.simulator import MachineLinks, Timeline, simulate
    from shoal.cost.training.step import Pricer
    from shoal.parallel.legal import schedule_of

    events = read(directory)
    if not events:
        return {}
    costs = Pricer(plan.machine).passes(Work(shape=plan.shape, job=plan.job))
    links = MachineLinks(plan.machine, plan.job.parallel.attention())
    predicted = simulate(schedule_of(plan.job), costs, links)
    return {"predicted": predicted, "measured": Timeline.of(events)}
