"""The same orders as torch's own schedules, which read what we write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.ir.schedule import Op, Schedule
from shoal.plan.schedules import SCHEDULES
from shoal.plan.schedules.torch_csv import to_torch_csv

schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")


class Stage:
    """What torch asks of a stage before it runs; no process group behind it."""

    has_backward = True
    submod = None

    def __init__(self, rank: int, ranks: int, index: int, stages: int) -> None:
        self.group_rank, self.group_size = rank, ranks
        self.stage_index, self.num_stages = index, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.stage_index_to_group_rank: dict[int, int] = {}


def stages_of(schedule: Schedule, rank: int = 0) -> list[Stage]:
    return [
        Stage(rank, schedule.ranks, index, schedule.stages)
        for index, place in enumerate(schedule.place)
        if place == rank
    ]


def programs(theirs: Any) -> tuple[tuple[Op, ...], ...]:
    """The passes of torch's order; idle moments and reductions are not passes."""
    order: dict[int, list[Any]] = theirs.pipeline_order
    return tuple(
        tuple(
            Op(action.computation_type.value, action.stage_index, action.microbatch_index)
            for action in order[rank]
            if action is not None and action.is_compute_op
        )
        for rank in sorted(order)
    )


def build(name: str, pp: int, microbatches: int, vpp: int) -> Schedule:
    part: Schedule = SCHEDULES.build(name).build(pp, microbatches, vpp)
    return part


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 3), (2, 4), (4, 4), (4, 9)])
def test_1f1b_is_torchs(pp: int, microbatches: int) -> None:
    """But for a slip of some versions: the last rank's forwards are numbered from one there.

    That order is written out only; what torch runs counts from zero.
    """
    ours = build("1f1b", pp, microbatches, 1)
    theirs = programs(
        schedules.Schedule1F1B(stages_of(ours)[0], microbatches, loss_fn=lambda: None)
    )
    assert ours.ops[:-1] == theirs[:-1]
    slip = theirs[-1][0].mb
    assert slip in (0, 1)
    assert ours.ops[-1] == tuple(
        op._replace(mb=op.mb - slip) if op.kind == "F" else op for op in theirs[-1]
    )


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 6)])
def test_gpipe_is_torchs_but_for_the_order_of_backwards(pp: int, microbatches: int) -> None:
    """The paper goes back from the last micro-batch, torch from the first."""
    ours = build("gpipe", pp, microbatches, 1)
    theirs = programs(
        schedules.ScheduleGPipe(stages_of(ours)[0], microbatches, loss_fn=lambda: None)
    )
    for mine, other in zip(ours.ops, theirs, strict=True):
        assert mine[:microbatches] == other[:microbatches]
        assert mine[microbatches:][::-1] == other[microbatches:]


@pytest.mark.parametrize(
    ("pp", "microbatches", "vpp"), [(2, 4, 2), (4, 8, 2), (4, 4, 3), (3, 9, 4), (4, 2, 2)]
)
def test_interleaved_is_torchs(pp: int, microbatches: int, vpp: int) -> None:
    ours = build("interleaved", pp, microbatches, vpp)
    theirs = schedules.ScheduleInterleaved1F1B(stages_of(ours), microbatches, loss_fn=lambda: None)
    assert ours.ops == programs(theirs)


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 2), (2, 3), (4, 5), (4, 12)])
def test_zbv_is_torchs(pp: int, microbatches: int) -> None:
    ours = build("zbv", pp, microbatches, 2)
    theirs = schedules.ScheduleZBVZeroBubble(stages_of(ours), microbatches, loss_fn=lambda: None)
    assert ours.ops == programs(theirs)


@pytest.mark.parametrize("name", tuple(SCHEDULES))
def test_torchs_loader_reads_what_we_write(name: str, tmp_path: Path) -> None:
    pp, microbatches = 4, 8
    part = SCHEDULES.build(name)
    ours = build(name, pp, microbatches, part.chunks or 2)
    file = tmp_path / "schedule.csv"
    file.write_text(to_torch_csv(ours))
    runtime = schedules._PipelineScheduleRuntime(
        stages_of(ours), microbatches, loss_fn=lambda: None
    )
    runtime._load_csv(str(file), format="compute_only")
    assert programs(runtime) == ours.ops
    assert runtime.stage_index_to_group_rank == dict(enumerate(ours.place))
    # It has paired every transfer.
    sent = [a for ops in runtime.pipeline_order_with_comms.values() for a in ops]
    crossings = sum(a != b for a, b in zip(ours.place, ours.place[1:], strict=False))
    assert sum("SEND" in str(action) for action in sent) == 2 * crossings * microbatches
