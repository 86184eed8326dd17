"""What keeps Shoal one system: parts are reached from jobs and change plans; jobs have rivals.

A part that no job can choose, or that no plan feels, is dead weight however good it is.
"""

from __future__ import annotations

import functools
from types import NoneType
from typing import Any, get_args, get_origin

import pytest

from shoal.core.config import Kind, Value
from shoal.core.parts import KINDS, Choice, table
from shoal.ir import (
    DrafterJob,
    DrafterPlan,
    Estimate,
    Interval,
    Job,
    Machine,
    Plan,
    ServeJob,
    ServePlan,
    TrainJob,
    TrainPlan,
    Work,
    kinds,
    predictions,
)

from .conftest import BESIDE, PARTS, REACHED, choice, small_job, small_machine, small_serve_job

JOBS: list[type[Job]] = [kind.job_type for kind in kinds().values()]
NAMES = {job.__name__ for job in JOBS}


def choices_of(job: type[Value]) -> dict[str, str]:
    """Field of a job, dotted where it lies deeper -> kind of the part that it chooses."""
    choices: dict[str, str] = {}
    for name, field in job.model_fields.items():
        # A choice that may be left out carries its kind inside, and so do several in a tuple.
        inside = get_args(field.annotation)
        each = [*inside, *(one for some in inside for one in get_args(some))]
        perhaps = [m for part in each for m in getattr(part, "__metadata__", ())]
        if NoneType not in inside:
            perhaps = []
        for annotation in (*field.metadata, *perhaps):
            if isinstance(annotation, Kind) and (
                annotation in field.metadata or REACHED[annotation.kind] in NAMES
            ):
                choices[name] = annotation.kind
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Value):
            choices |= {f"{name}.{key}": kind for key, kind in choices_of(inner).items()}
    return choices


def stated(kind: str, name: str) -> dict[str, Any]:
    """What a small job says to choose this part where it counts."""
    field = FIELD_OF[kind]
    if kind in SEVERAL:
        return {field: [choice(kind, name)]}
    if (kind, name) == ("decode", "diffusion"):  # of models that no other part is for
        return {field: choice(kind, name), "model": "shoal-mdlm-3m", "max_position": 128}
    if kind == "attack":
        return {field: choice(kind, name), "attackers": 1}
    if (kind, name) in BESIDE:
        return {**BESIDE[kind, name], field: choice(kind, name)}
    if "." not in field:
        # Two replicas, so that what is sent between them counts.
        return {field: choice(kind, name), **({"parallel": {"dp": 2}} if kind in CAUSES else {})}
    outer, key = field.split(".")
    if kind == "placer":  # of experts
        grids = {"dp": 2, "ep": 2, key: choice(kind, name)}
        return {"model": "shoal-moe-4m", outer: grids}
    if outer == "checkpoint":
        return {outer: {"every": 1, key: choice(kind, name)}}
    axis = {"schedule": "pp", "context": "cp"}[key]
    inner: dict[str, Any] = {axis: 2, key: choice(kind, name)}
    chunks = getattr(table(kind).load(name), "chunks", 1)
    if chunks != 1:
        inner["vpp"] = chunks or 2
    return {outer: inner}


# The cause under which the parts of a kind of a training job spend their time.
CAUSES = {
    "corpus": "data",
    "packing": "data",
    "optimizer": "optimizer",
    "lr_schedule": "overhead",
    "shard": "collective",
    "sync": "collective",
    "assigner": "collective",
    "offload": "memory",
    "activation": "memory",
    "schedule": "collective",
    "context": "collective",
    "placer": "collective",
    "save_mode": "memory",
}

# Kinds whose parts make a difference where requests meet, so that many must come.
SIMULATED = ("scheduler", "kv", "workload")

# What several kinds of job choose, such as a text or a pool, counts for one of them or none.
CHOSEN = {
    (kind, field, job)
    for job in JOBS
    for field, kind in choices_of(job).items()
    if job is TrainJob or REACHED[kind] == job.__name__
}
FIELD_OF = {kind: field for kind, field, _ in CHOSEN}
# Kinds of which a job chooses a list.
SEVERAL = {
    kind
    for kind, field, job in CHOSEN
    if "." not in field
    and any(get_origin(one) is tuple for one in get_args(job.model_fields[field].annotation))
}
CHOSEN_PARTS = [(kind, name) for kind, name in PARTS if kind in FIELD_OF]
TRAINED_PARTS = [(kind, name) for kind, name in CHOSEN_PARTS if kind in CAUSES]


def plan(job: TrainJob, planner: str = "search") -> TrainPlan:
    plans: list[TrainPlan] = table("planner").build(planner).plan(job, small_machine())
    return plans[0]


@functools.cache
def train_plan_of(kind: str, name: str, planner: str = "search") -> TrainPlan:
    return plan(small_job(**stated(kind, name)), planner)


@functools.cache
def plan_of(kind: str, name: str) -> Plan[Any]:
    """The plan of a small job that chooses this part."""
    chosen = stated(kind, name)
    if REACHED[kind] == "TrainJob":
        return train_plan_of(kind, name)
    if REACHED[kind] == "DrafterJob":
        return drafter_plan(**chosen)
    if REACHED[kind] == "ServeJob":
        return serve_plan(small_serve_job(**chosen), requests=24 if kind in SIMULATED else 6)
    return first_plan(REACHED[kind], **chosen)


def first_plan(job: str, **chosen: Any) -> Plan[Any]:
    """The best plan of the example of a kind of job."""
    kind = next(one for one in kinds().values() if one.job_type.__name__ == job)
    return kind.plan(kind.job_type.model_validate({**kind.example, **chosen}), small_machine())[0]


def serve_plan(job: ServeJob, requests: int = 6) -> ServePlan:
    from shoal.plan.serving.plans import plan_serve

    return plan_serve(job, small_machine(), requests=requests)


def drafter_plan(**changes: Any) -> DrafterPlan:
    from shoal.plan.drafting import plan_drafter

    return plan_drafter(DrafterJob(model="shoal-27m", **changes), small_machine())


def test_there_are_jobs() -> None:
    assert {TrainJob, ServeJob, DrafterJob} <= set(JOBS)
    assert all(get_args(job.model_fields["job"].annotation) for job in JOBS)


def test_every_kind_says_how_it_is_reached() -> None:
    assert set(REACHED) == set(KINDS)
    names = {job.__name__ for job in JOBS}
    assert {(kind, how) for kind, how in REACHED.items() if how in names} == {
        (kind, job.__name__) for kind, _, job in CHOSEN
    }
    assert set(CAUSES) == {kind for kind, _, job in CHOSEN if job is TrainJob}


@pytest.mark.parametrize(("kind", "name"), CHOSEN_PARTS, ids=lambda value: str(value))
def test_every_part_is_reached_from_a_job(kind: str, name: str) -> None:
    chosen: Any = plan_of(kind, name).job
    for key in FIELD_OF[kind].split("."):
        chosen = getattr(chosen, key)
    if kind in SEVERAL:
        (chosen,) = chosen
    assert isinstance(chosen, Choice)
    assert chosen.name == name


@pytest.mark.parametrize(("kind", "name"), TRAINED_PARTS, ids=lambda value: str(value))
@pytest.mark.parametrize("planner", list(table("planner")))
def test_every_part_changes_a_plan(
    kind: str, name: str, planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the part a thousand seconds slower, the plan would be slower."""
    before = train_plan_of(kind, name, planner).estimate
    cls = table(kind).load(name)
    honest = cls.estimate

    def slower(self: Any, work: Work, machine: Machine) -> Estimate:
        estimate: Estimate = honest(self, work, machine)
        cause = CAUSES[kind]
        return estimate.model_copy(
            update={
                "step_s": Interval.around(estimate.step_s.value + 1000.0, 0.1),
                "terms_s": {**estimate.terms_s, cause: estimate.terms_s.get(cause, 0.0) + 1000.0},
            }
        )

    monkeypatch.setattr(cls, "estimate", slower)
    after = plan(small_job(**stated(kind, name)), planner).estimate
    assert before is not None
    assert after is not None
    if kind == "save_mode":  # what holds up a run and none of its steps
        assert before.total_s is not None
        assert after.total_s is not None
        assert after.total_s.value > before.total_s.value + 100.0
        return
    # Some of it may be shared out over ranks or hidden behind the backward pass.
    assert after.step_s.value > before.step_s.value + 100.0


@pytest.mark.parametrize("kind", sorted(FIELD_OF))
def test_two_choices_give_two_plans(kind: str) -> None:
    plans = [plan_of(kind, name) for name in table(kind)]
    if kind == "offload":  # it competes with leaving everything where it is
        plans.append(plan(small_job(parallel={"dp": 2})))
    if kind == "privacy":  # it competes with promising nothing
        plans.append(first_plan(REACHED[kind]))
    assert len(plans) >= 2, f"only one part of kind {kind} competes"
    for place, one in enumerate(plans):
        assert all(one != other for other in plans[:place])


@pytest.mark.parametrize("kind", SIMULATED)
def test_two_choices_give_two_predictions(kind: str) -> None:
    """Not only the name in the plan differs: the simulated serving does."""
    results = [plan_of(kind, name) for name in table(kind)]
    fields = {tuple(sorted((q, i.value) for q, i in made.predicted.items())) for made in results}
    assert len(fields) == len(results)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.__name__)
def test_every_job_has_competing_planners(job: type[Value]) -> None:
    assert choices_of(job), "the job chooses no part"
    if job is ServeJob:
        # Its decisions are made every step: by schedulers over bookkeepers of the cache.
        assert len(table("scheduler")) >= 2
        assert len(table("kv")) >= 2
        assert serve_plan(small_serve_job()).predicted
        return
    if job is DrafterJob:
        # What is trained is chosen, and each says what it would cost.
        assert len(table("drafter")) >= 2
        assert drafter_plan().estimate is not None
        return
    if job is not TrainJob:
        # What competes are the parts that it chooses; the best of them is planned and predicted.
        assert max(len(table(kind)) for kind in choices_of(job).values()) >= 2
        assert predictions(first_plan(job.__name__))
        return
    assert len(table("planner")) >= 2
    result = {planner: plan(small_job(), planner) for planner in table("planner")}
    assert {planner: made.planner for planner, made in result.items()} == {p: p for p in result}
    assert all(made.estimate is not None for made in result.values())
