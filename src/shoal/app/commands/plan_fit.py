"""``shoal plan train --fit``: does it fit, and which ways would make it fit?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from shoal.ir import Machine, TrainJob, TrainPlan

__all__ = ["show_fit", "show_ways"]


def show_fit(plan: TrainPlan) -> None:
    """Print whether a plan fits, what fills a rank, and what would help if it does not."""
    from shoal.app.show import table
    from shoal.core.sizes import human_bytes
    from shoal.cost.training.memory import tier_bytes
    from shoal.plan.strategy.judge import usable_bytes
    from shoal.plan.table import spell

    assert plan.estimate is not None
    room = usable_bytes(plan.job, plan.machine)
    causes = plan.estimate.memory_bytes
    total = tier_bytes(plan.job, plan.machine, causes)["device"]
    verdict = "fits" if plan.fits else "does not fit"
    typer.echo(f"{plan.job.model} {verdict} on {plan.machine.name}: {spell(plan)}")
    memory = [
        (cause, human_bytes(size), f"{100 * size / room:.0f} %")
        for cause, size in causes.items()
        if size > 0
    ]
    memory.append(("of a rank's", human_bytes(room), f"{100 * total / room:.0f} %"))
    table("memory of a rank", ("", "", "of what it may fill"), memory, numeric=" rr")
    for note in plan.notes:
        typer.echo(note)


def show_ways(job: TrainJob, machine: Machine) -> None:
    """Print every way beyond the device's memory: bytes of each tier, and how long a step takes."""
    from shoal.app.show import table
    from shoal.core.sizes import human_bytes
    from shoal.cost.shapes import shape_of
    from shoal.cost.training.memory import tier_bytes
    from shoal.plan.memory.offload import TIERS
    from shoal.plan.strategy.beyond import all_ways
    from shoal.plan.strategy.judge import beyond_room, tier_room

    ways = all_ways(job, shape_of(job), machine)
    rows, unknown = [], set[str]()
    for way in ways:
        if way.best is None:
            continue
        concrete, cost = way.best
        needed = tier_bytes(concrete, machine, cost.memory_bytes)
        unknown |= {tier for tier in needed if tier not in tier_room(concrete, machine)}
        short = beyond_room(concrete, machine, cost.memory_bytes)
        rows.append(
            (
                way.spelled,
                *(human_bytes(needed[tier]) if tier in needed else "" for tier in TIERS),
                f"{cost.step_s.value:.3g} s",
                f"no: {', '.join(short)}" if short else "yes",
            )
        )
    if rows:
        table("every way", ("way", *TIERS, "step", "fits"), rows, numeric=" rrrr ")
    for way in ways:
        if way.best is None:
            typer.echo(f"{way.name}: {way.refused}")
    if unknown:
        typer.echo(
            f"{machine.name} does not say how large {' and '.join(sorted(unknown))} are; add "
            "device.memory tiers dram and disk to its description to have them checked"
        )
