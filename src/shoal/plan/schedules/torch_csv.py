"""Schedules in the format of ``torch.distributed.pipelining``, both ways.

A line is a rank, a cell a pass such as ``1F0``: stage, kind, micro-batch; an empty cell is an idle
moment. It is the compute-only form, which torch's ``_PipelineScheduleRuntime._load_csv`` reads and
completes with transfers itself. That form has no words for routes or for the vocabulary's passes.
"""

from __future__ import annotations

import csv
import io
import re

from shoal.core.errors import PlanError, require
from shoal.ir.schedule import Op, Schedule

_PASS = re.compile(r"(\d{1,7})([FBIW])(\d{1,7})")
# When weights are gathered and gradients reduced is not the pipeline's to say.
_OF_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD)\d*")


def to_torch_csv(schedule: Schedule) -> str:
    """The schedule as torch's compute-only CSV.

    Raises:
        PlanError: it has routes or passes of the vocabulary, which the format cannot say.
    """
    given = "routes" if schedule.routes else f"vocab_barriers = {schedule.vocab_barriers}"
    require(
        not schedule.routes and not schedule.vocab_barriers,
        f"schedule {schedule.name}",
        given,
        expected="every micro-batch through all stages, and no passes of the vocabulary, "
        "in torch's format",
        error=PlanError,
    )
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(map(str, program) for program in schedule.ops)
    return out.getvalue()


def from_torch_csv(text: str, *, name: str = "torch_csv") -> Schedule:
    """The schedule that torch's compute-only CSV describes.

    Cells that gather weights or reduce gradients are left out.

    Raises:
        PlanError: a cell is no pass (names line and column), or the passes are no schedule.
    """
    programs, place = [], dict[int, int]()
    for rank, cells in enumerate(csv.reader(io.StringIO(text))):
        program = []
        for column, cell in enumerate(cells):
            word = cell.strip()
            if not word or _OF_SHARDING.fullmatch(word):
                continue
            match = _PASS.fullmatch(word)
            require(
                match is not None,
                f"{name}, line {rank + 1}, column {column + 1}",
                word,
                expected="a pass such as 1F0, 1B0, 1I0 or 1W0; write the compute_only form",
                error=PlanError,
            )
            assert match is not None
            program.append(Op(match[2], int(match[1]), int(match[3])))
            place.setdefault(int(match[1]), rank)
        programs.append(tuple(program))
    missing = next((stage for stage in range(len(place)) if stage not in place), None)
    require(
        bool(place) and missing is None,
        name,
        f"stages {', '.join(map(str, sorted(place)[:8])) or 'none'}",
        expected="stages 0, 1, 2 ... without a gap",
        error=PlanError,
    )
    microbatches = 1 + max(op.mb for program in programs for op in program)
    require(
        microbatches <= sum(map(len, programs)),
        name,
        f"micro-batch {microbatches - 1}",
        expected="micro-batches 0, 1, 2 ... without a gap",
        error=PlanError,
    )
    schedule = Schedule(
        name, tuple(programs), tuple(place[stage] for stage in range(len(place))), microbatches
    )
    schedule.validate()
    return schedule
