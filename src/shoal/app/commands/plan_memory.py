"""``shoal plan memory``: which way to train beyond the device's memory?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shoal.ir import Machine, ModelShape, TrainJob
    from shoal.plan.swap import Iteration, Swappable

__all__ = ["memory"]


def memory(
    model: Annotated[str, typer.Argument(help="A model's name or directory, or a job in YAML.")],
    budget: Annotated[
        str, typer.Option(help="Sizes of tiers, such as device=64MiB,host=256MiB.")
    ] = "",
    policy: Annotated[str | None, typer.Option(help="One part of kind offload.")] = None,
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="local, 1xH100, or a file.")
    ] = "local",
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences of a step.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="path=value of the job.")] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="With --policy fuyou: the time of a step by what is swapped."
        ),
    ] = False,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Which way trains a model beyond the device's memory?

    Every part of kind offload, with and without recomputation: bytes of each tier and the time of
    a step. Nothing runs. Exits with status 1 if none fits. **Examples**

        shoal plan memory shoal-16m --budget device=64MiB,host=256MiB

        shoal plan memory Llama-3-8B -m 1xRTX-4090 --budget device=20GiB,host=100GiB

        shoal plan memory shoal-16m --policy zero_infinity --global-batch 8 -o json

        shoal plan memory shoal-16m --policy fuyou --set grad_clip=0 --explain
    """
    from dataclasses import asdict

    from shoal.app.commands.plan_swap import curve_of, show_curve
    from shoal.app.show import as_json, table
    from shoal.core.config import resolve
    from shoal.core.errors import require
    from shoal.core.sizes import human_bytes
    from shoal.cost.shapes import shape_of
    from shoal.ir import TrainJob
    from shoal.machine.described import load
    from shoal.plan.offload import TIERS, budgets_of, ways

    file = Path(model) if model.endswith((".yaml", ".yml")) else None
    flags: dict[str, object] = {
        "model": None if file else model,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "precision": precision,
    }
    job = resolve(TrainJob, file=file, flags=flags, sets=set_ or []).value
    shape = shape_of(job)
    target, budgets = load(machine), budgets_of(budget)
    if explain:
        require(
            policy == "fuyou",
            "--explain",
            policy or "every policy",
            expected="--policy fuyou with it, which chooses what is swapped",
        )
    found = ways(job, shape, target, budgets=budgets, only=policy)
    swapped = _swapped(job, shape, target, budgets) if explain else None
    if output is Format.json and swapped is not None:
        as_json(
            {"ways": [{**asdict(way), "fits": way.fits} for way in found], **curve_of(*swapped)}
        )
    elif output is Format.json:
        as_json([{**asdict(way), "fits": way.fits} for way in found])
    else:
        rows = [
            (
                way.choice,
                way.recompute,
                *(_size(way.tier_bytes.get(tier), way.refused) for tier in TIERS),
                "" if way.refused else f"{way.step_s:.3g} s",
                "refused" if way.refused else "yes" if way.fits else f"no: {', '.join(way.beyond)}",
            )
            for way in found
        ]
        columns = ("offload", "recompute", *TIERS, "step", "fits")
        table(
            f"{shape.name}: {job.global_batch} x {job.seq_len} tokens",
            columns,
            rows,
            numeric="  rrrr",
        )
        told = [f"{way.choice}: {why}" for way in found for why in (*way.notes, way.refused) if why]
        for line in dict.fromkeys(told):
            typer.echo(line)
        best = found[0]
        if best.fits:
            typer.echo(f"fastest that fits: offload: {best.choice}, recompute: {best.recompute}")
        else:
            least = min(
                (way for way in found if "device" in way.tier_bytes),
                key=lambda way: way.tier_bytes["device"],
                default=None,
            )
            typer.echo(
                "none fits"
                + (
                    f"; the smallest device is {human_bytes(least.tier_bytes['device'])}, with "
                    f"offload: {least.choice}, recompute: {least.recompute}"
                    if least is not None
                    else ""
                )
            )
        if swapped is not None:
            show_curve(*swapped, output)
    if not found[0].fits:
        raise typer.Exit(1)


def _swapped(
    job: TrainJob, shape: ModelShape, machine: Machine, budgets: Mapping[str, int]
) -> tuple[Iteration, Swappable]:
    """A step of the job with Fuyou, and what it can swap."""
    from shoal.ir import Work
    from shoal.memory.fuyou import Fuyou
    from shoal.memory.fuyou_needs import predicted

    part = Fuyou(device_budget=budgets.get("device"), host_budget=budgets.get("host"))
    found = predicted(part, Work(shape=shape, job=job), machine)
    return found.iteration, found.ordered


def _size(nbytes: float | None, refused: str) -> str:
    from shoal.core.sizes import human_bytes

    return "" if refused or nbytes is None else human_bytes(nbytes)
