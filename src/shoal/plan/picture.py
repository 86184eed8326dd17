"""Plans to look at: where time and memory go, and the timeline of the best plan's pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.core.bars import StackedBars
from shoal.core.errors import PlanError, require
from shoal.core.parts import table
from shoal.core.sizes import human_bytes
from shoal.core.tables import cut
from shoal.cost.pipeline.picture import MOST_BOXES, Picture
from shoal.cost.pipeline.simulator import MachineLinks, Timeline, simulate
from shoal.cost.price.shares import passes_of
from shoal.cost.training.step import Pricer
from shoal.ir import TrainPlan, Work
from shoal.plan.schedules.vocab import with_vocabulary
from shoal.plan.strategy.judge import usable_bytes
from shoal.plan.table import choices, details, numbers, spell

if TYPE_CHECKING:
    from shoal.core.web.site import Drawing
    from shoal.plan.what_if import WhatIfResult


def timeline(plan: TrainPlan) -> tuple[Timeline, str] | None:
    """The simulated step of one pipeline, and what was left out; None without a pipeline."""
    job = plan.job
    split = job.parallel
    if split.pp == 1:
        return None
    part = table("schedule").build(split.schedule, where="parallel.schedule")
    passes = passes_of(job)
    # Some rounds show the shape of the pipeline; hundreds would be a grey bar.
    shown = min(passes, max(2 * split.pp * split.vpp, 8), MOST_BOXES // (4 * split.pp * split.vpp))
    shown = max(split.pp, shown - shown % split.pp)
    if shown >= passes:
        shown = passes
    schedule = part.build(split.pp, shown, split.vpp)
    if split.vocab_split == "pp":
        schedule = with_vocabulary(schedule, split.vocab_barriers)
    costs = Pricer(plan.machine).passes(Work(shape=plan.shape, job=job))
    result = simulate(schedule, costs, MachineLinks(plan.machine, split.attention()))
    note = "" if shown == passes else f", the first {shown} of {passes} micro-batches"
    return result, note


def pictures(plans: Sequence[TrainPlan]) -> list[Drawing]:
    """Seconds of a step by cause, bytes of a rank by cause, and the best plan's timeline.

    Raises:
        PlanError: no plan exists, or one has no estimate.
    """
    require(bool(plans), "plans to draw", 0, expected="at least one", error=PlanError)
    times, memory = {}, {}
    for place, plan in enumerate(plans, 1):
        require(
            plan.estimate is not None,
            "plan.estimate",
            None,
            expected="a plan with an estimate; plan the job again",
            error=PlanError,
        )
        assert plan.estimate is not None
        name = f"{place}. {spell(plan)}"
        times[name] = {k: max(0.0, s) for k, s in plan.estimate.terms_s.items() if s > 0}
        memory[name] = {k: float(b) for k, b in plan.estimate.memory_bytes.items() if b > 0}
    best = plans[0]
    pictures: list[Drawing] = [
        StackedBars("step time by cause", _short(times), _seconds),
        StackedBars(
            "memory per rank",
            _short(memory),
            human_bytes,
            limit=usable_bytes(best.job, best.machine),
            limit_name="usable by a rank",
        ),
    ]
    drawn = timeline(best)
    if drawn is not None:
        events, note = drawn
        pictures.append(
            Picture(title=f"one pipeline of the best plan{note}", timelines={"predicted": events})
        )
    return pictures


def content(plans: Sequence[TrainPlan], answers: Sequence[WhatIfResult] = ()) -> dict[str, object]:
    """What ``plans_body.html`` shows."""
    return {
        "why": plans[0].why,
        "notes": plans[0].notes,
        "tables": [numbers(plans), choices(plans), details(plans)],
        "pictures": pictures(plans),
        "answers": answers,
    }


def page(plans: Sequence[TrainPlan], answers: Sequence[WhatIfResult] = (), *, title: str) -> str:
    """Plans as one HTML page without links to other files."""
    from shoal.core.web import WebSite

    return WebSite("shoal.plan").render_alone("plans.html", title=title, **content(plans, answers))


def _short(rows: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Names that fit beside their bars; they stay different by their numbers."""
    return {cut(name, 60): parts for name, parts in rows.items()}


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
