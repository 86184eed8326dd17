"""``shoal plan fold``: which split of attention with which split of the experts?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.plan.fold import Fold

__all__ = ["fold"]

_SHOWN = 4


def fold(
    model: Annotated[str, typer.Argument(help="A mixture of experts: name, directory or file.")],
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="local, 64xH100, or a file.")
    ] = "64xH100",
    pp: Annotated[
        int, typer.Option(help="Pipeline stages, of which each has both grids.", min=1)
    ] = 1,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 4096,
    global_batch: Annotated[int, typer.Option(help="Sequences of a step.", min=1)] = 256,
    inside: Annotated[bool, typer.Option("--inside", help="Show experts inside dp, too.")] = False,
    rows: Annotated[int, typer.Option(help="Pairs of grids to show.", min=1)] = 12,
    svg: Annotated[Path | None, typer.Option(help="Draw the best pair's groups.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Give experts a grid of their own over the ranks that attention splits its own way.

    Every legal pair of grids is priced; nothing runs. **Examples**

        shoal plan fold Mixtral-8x7B-v0.1

        shoal plan fold Qwen2-57B-A14B -m 64xH100 --pp 2 --seq-len 16384 --inside

        shoal plan fold Mixtral-8x22B-v0.1 --svg grids.svg
    """
    from shoal.app.show import as_json, table
    from shoal.core.files import write_atomic
    from shoal.core.sizes import human_bytes
    from shoal.ir import TrainJob
    from shoal.machine.described import load
    from shoal.plan.fold import folds
    from shoal.plan.fold_picture import grids

    target = load(machine)
    job = TrainJob(model=model, seq_len=seq_len, global_batch=global_batch)
    found = folds(job, target, pp=pp, inside=inside)
    if svg is not None:
        write_atomic(svg, grids(found[0].parallel, target.devices_per_node))
    if output is Format.json:
        as_json([_told(one) for one in found[:rows]])
        return
    table(
        f"{model} on {target.name}: {len(found)} pairs of grids, sequences of {seq_len}",
        ("attention", "experts", "step", "memory/rank", "near", "far", "fits"),
        [
            (
                f"pp{one.parallel.pp} dp{one.parallel.dp} cp{one.parallel.cp} tp{one.parallel.tp}",
                f"edp{one.parallel.edp} ep{one.parallel.ep} etp{one.parallel.etp}"
                + ("" if one.parallel.fold else " inside dp"),
                f"{one.estimate.step_s.value:.3g} s",
                human_bytes(int(sum(one.estimate.memory_bytes.values()))),
                human_bytes(int(one.near_bytes)),
                human_bytes(int(one.far_bytes)),
                "yes" if one.fits else "no",
            )
            for one in found[:rows]
        ],
        numeric="  rrrr ",
    )
    best = found[0].parallel
    typer.echo(
        "near and far: bytes that a rank sends in a step to experts of its node and of others"
    )
    for name, axes, grid in (
        ("tp", ("tp",), best.attention()),
        ("dp x cp", ("dp", "cp"), best.attention()),
        ("ep", ("ep",), best.experts()),
        ("edp", ("edp", "inner"), best.experts()),
    ):
        groups = grid.groups(*axes)
        shown = "; ".join(_span(group) for group in groups[:_SHOWN])
        more = f"; and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
        typer.echo(f"{name:8} groups of the first: {shown}{more}")


def _span(group: tuple[int, ...]) -> str:
    """Ranks in few words: 0-7, or 0 4 8 12."""
    if len(group) > 2 and group[-1] - group[0] == len(group) - 1:
        return f"{group[0]}-{group[-1]}"
    return " ".join(map(str, group[:8])) + (" ..." if len(group) > 8 else "")


def _told(one: Fold) -> dict[str, Any]:
    return {
        "parallel": one.parallel.model_dump(mode="json", exclude_defaults=True),
        "step_s": one.estimate.step_s.model_dump(),
        "memory_bytes": sum(one.estimate.memory_bytes.values()),
        "near_bytes": one.near_bytes,
        "far_bytes": one.far_bytes,
        "fits": one.fits,
    }
