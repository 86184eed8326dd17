"""Which plan an engine is given, and what it costs there: plans are priced for Shoal's runtime."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cost.training.step import Pricer
from shoal.ir import ServePlan, TrainPlan, Work
from shoal.plan.emit.protocols import Emitter

__all__ = ["chosen_for"]

_NOTE = "priced as"
_Plan = TrainPlan | ServePlan


def chosen_for(plans: Sequence[_Plan], emitter: Emitter) -> tuple[int, _Plan]:
    """(place, plan) of the plan that an engine is given; the first if it can run none.

    Training plans for accelerators get that engine's price, and the one that is fastest there is
    chosen among those that fit as well as the first of them, where the job wants to be fast.

    Args:
        plans: ranked, for Shoal's own runtime.
        emitter: of the engine.
    """
    able = [(at, plan) for at, plan in enumerate(plans) if not emitter.refuses(plan)]
    if not able:
        return 0, plans[0]
    priced = [(at, _priced(plan, emitter)) for at, plan in able]
    first = priced[0][1]
    if not isinstance(first, TrainPlan) or first.job.objective != "time":
        return priced[0]
    alike = [one for one in priced if isinstance(one[1], TrainPlan) and one[1].fits == first.fits]
    return min(alike, key=lambda one: one[1].estimate.step_s.value if one[1].estimate else 0.0)


def _priced(plan: _Plan, emitter: Emitter) -> _Plan:
    """The plan with its estimate under the engine, and a note of it."""
    engine = emitter.runs_as
    if not isinstance(plan, TrainPlan) or engine is None or plan.machine.device.kind != "gpu":
        return plan
    pricer = Pricer(plan.machine, engine.compiled() if plan.job.compile else engine)
    estimate = pricer.estimate(Work(shape=plan.shape, job=plan.job))
    notes = [note for note in plan.notes if not note.startswith(_NOTE)]
    notes.append(f"{_NOTE} {engine.name} runs it; memory as under Shoal's own runtime")
    return plan.model_copy(update={"estimate": estimate, "notes": tuple(notes)})
