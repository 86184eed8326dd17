"""Does a training job fit, what fills a rank, and which ways would make it fit?"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.core.tables import Table, digits, table_of
from shoal.cost.shapes import shape_of
from shoal.cost.training.memory import tier_bytes
from shoal.ir import Machine, TrainJob, TrainPlan
from shoal.plan.memory.offload import TIERS
from shoal.plan.strategy.beyond import all_ways
from shoal.plan.strategy.judge import beyond_room, tier_room, usable_bytes
from shoal.plan.table import spell


def fit_tables(plan: TrainPlan) -> Iterator[Table | str]:
    """Whether a plan fits, what fills a rank, and what would help if it does not."""
    assert plan.estimate is not None
    room = usable_bytes(plan.job, plan.machine)
    causes = plan.estimate.memory_bytes
    total = tier_bytes(plan.job, plan.machine, causes)["device"]
    verdict = "fits" if plan.fits else "does not fit"
    yield f"{plan.job.model} {verdict} on {plan.machine.name}: {spell(plan)}"
    rows = [*((cause, size) for cause, size in causes.items() if size > 0), ("total", total)]
    rows.append(("usable", room))
    cells = [(name, f"{size / 1e9:.1f}", f"{100 * size / room:.0f}") for name, size in rows]
    yield table_of("memory per rank", ("", "GB", "% of usable"), cells, right=" rr")
    yield from plan.notes


def way_tables(job: TrainJob, machine: Machine) -> Iterator[Table | str]:
    """Every offloading option: bytes of each memory tier, and the step time."""
    ways = all_ways(job, shape_of(job), machine)
    rows, unknown = [], set[str]()
    for way in ways:
        if way.best is None:
            continue
        concrete, cost = way.best
        needed = tier_bytes(concrete, machine, cost.memory_bytes)
        unknown |= {tier for tier in needed if tier not in tier_room(concrete, machine)}
        short = beyond_room(concrete, machine, cost.memory_bytes)
        options = {} if concrete.offload is None else concrete.offload.options
        rows.append(
            (
                "\n  ".join(
                    [
                        way.name,
                        *(f"{k}={v}" for k, v in options.items() if not k.endswith("_budget")),
                    ]
                ),
                concrete.recompute,
                *(f"{needed[tier] / 1e9:.1f}" if tier in needed else "" for tier in TIERS),
                digits(cost.step_s.value),
                f"no: {', '.join(short)}" if short else "yes",
            )
        )
    if rows:
        heads = ("offload", "recompute", *(f"{tier}\nGB" for tier in TIERS), "step\ns", "fits")
        yield table_of("offloading options", heads, rows, right="  rrrr ")
    for way in ways:
        if way.best is None:
            yield f"{way.name}: {way.refused}"
    if unknown:
        yield (
            f"the description of {machine.name} has no size for {' and '.join(sorted(unknown))}, "
            f"so these were not checked; add device.memory tiers dram and disk to it"
        )
