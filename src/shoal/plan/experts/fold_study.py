"""``shoal explain fold``: which split of attention with which split of the experts?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import PositiveInt

from shoal.core.parts import part
from shoal.core.sizes import human_bytes
from shoal.core.tables import Table, digits
from shoal.ir import Explanation, Machine, Progress, TrainJob
from shoal.plan.experts.fold import Fold, folds
from shoal.plan.experts.fold_picture import grids

_SHOWN = 4
_NEAR = "near and far: bytes that a rank sends in a step to experts of its node and of others"


@part
class FoldStudy:
    """Compare expert grids that differ from the attention grid (MoE parallel folding).

    Prices every valid pair of grids; nothing runs.

    **Examples**

        shoal explain fold Mixtral-8x7B-v0.1

        shoal explain fold Qwen2-57B-A14B -m 64xH100 --pp 2 --seq-len 16384 --inside

        shoal explain fold Mixtral-8x22B-v0.1 --picture grids.svg

    Args:
        model: a mixture of experts: name, directory or file.
        pp: pipeline stages, of which each has both grids.
        seq_len: tokens of a sequence.
        global_batch: sequences of a step.
        inside: also show grids with experts inside dp.
        rows: pairs of grids to show.
    """

    subject: ClassVar = "model"
    machine: ClassVar = "64xH100"

    model: str = "Mixtral-8x7B-v0.1"
    pp: PositiveInt = 1
    seq_len: PositiveInt = 4096
    global_batch: PositiveInt = 256
    inside: bool = False
    rows: PositiveInt = 12

    def explain(self, machine: Machine, progress: Progress) -> Explanation:
        """Every legal pair of grids, fastest first, and the groups of the best one."""
        job = TrainJob(model=self.model, seq_len=self.seq_len, global_batch=self.global_batch)
        result = folds(job, machine, pp=self.pp, inside=self.inside)
        best = result[0].parallel
        pairs = Table(
            title=f"{self.model} on {machine.name}: {len(result)} pairs of grids, sequences of "
            f"{self.seq_len}",
            columns=("attention", "experts", "step", "memory/rank", "near", "far", "fits"),
            rows=tuple(_row(one) for one in result[: self.rows]),
            right="  rrrr ",
        )
        groups = [
            _groups(name, grid.groups(*axes))
            for name, axes, grid in (
                ("tp", ("tp",), best.attention()),
                ("dp x cp", ("dp", "cp"), best.attention()),
                ("ep", ("ep",), best.experts()),
                ("edp", ("edp", "inner"), best.experts()),
            )
        ]
        return Explanation(
            blocks=(pairs, _NEAR, *groups),
            data=[_record(one) for one in result[: self.rows]],
            picture=grids(best, machine.devices_per_node),
        )


def _row(one: Fold) -> tuple[str, ...]:
    split = one.parallel
    return (
        f"pp{split.pp} dp{split.dp} cp{split.cp} tp{split.tp}",
        f"edp{split.edp} ep{split.ep} etp{split.etp}" + ("" if split.fold else " inside dp"),
        f"{digits(one.estimate.step_s.value)} s",
        human_bytes(int(sum(one.estimate.memory_bytes.values()))),
        human_bytes(int(one.near_bytes)),
        human_bytes(int(one.far_bytes)),
        "yes" if one.fits else "no",
    )


def _groups(name: str, groups: Sequence[tuple[int, ...]]) -> str:
    shown = "; ".join(_span(group) for group in groups[:_SHOWN])
    more = f"; and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
    return f"{name:8} groups of the first: {shown}{more}"


def _span(group: tuple[int, ...]) -> str:
    """Ranks in few words: 0-7, or 0 4 8 12."""
    if len(group) > 2 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    return " ".join(map(str, group[:8])) + (" ..." if len(group) > 8 else "")


def _record(one: Fold) -> dict[str, Any]:
    return {
        "parallel": one.parallel.model_dump(mode="json", exclude_defaults=True),
        "step_s": one.estimate.step_s.model_dump(),
        "memory_bytes": sum(one.estimate.memory_bytes.values()),
        "near_bytes": one.near_bytes,
        "far_bytes": one.far_bytes,
        "fits": one.fits,
    }
