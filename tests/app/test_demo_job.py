"""The job of ``shoal demo`` leaves to the planner what it does not say."""

from __future__ import annotations

import pytest

from shoal.app.demo import _fatal_step, _tell_plan, demo_job
from shoal.core.config import resolve
from shoal.ir import Device, Machine, MemoryTier, TrainJob
from shoal.plan.strategy import PLANNERS
from shoal.plan.table import spell


def host_of(bf16: float) -> Machine:
    return Machine(
        name="host",
        device=Device(
            name="cpu",
            kind="cpu",
            num_cores=2,
            matmul_flops={"fp32": 2e11, "bf16": bf16},
            memory=(MemoryTier(name="dram", capacity_bytes=16 * 10**9, read_bandwidth=2e10),),
        ),
    )


@pytest.fixture
def host() -> Machine:
    return host_of(1e12)


@pytest.mark.parametrize(("bf16", "precision"), [(2e10, "fp32"), (1e12, "bf16")])
def test_its_precision_is_the_faster_one_of_the_machine(bf16: float, precision: str) -> None:
    job = resolve(TrainJob, base=demo_job(3.0, 2), environment={}).value
    first = PLANNERS.build("search").plan(job, host_of(bf16))[0]
    assert (first.job.precision, first.job.parallel.dp) == (precision, 2)


def test_other_plans_differ_from_the_best_in_what_is_printed(host: Machine) -> None:
    job = resolve(TrainJob, base=demo_job(3.0, 2), environment={}).value
    ranked = PLANNERS.build("search").plan(job, host)
    best = ranked[0]
    # Another number of steps is no other plan to a reader.
    same = best.model_copy(update={"job": best.job.model_copy(update={"steps": 7})})
    said: list[str] = []
    _tell_plan(best, [same, *ranked, *ranked], said.append)
    others = [line.split(":")[0] for line in said if line.lstrip().startswith("not ")]
    assert 1 <= len(others) <= 3 and len({*others}) == len(others)
    assert not any(line.endswith(f"not {spell(best)}") for line in others)


@pytest.mark.parametrize(("steps", "every", "fatal"), [(20, 25, None), (300, 25, 108)])
def test_no_rank_is_killed_in_a_run_that_is_too_short(
    steps: int, every: int, fatal: int | None, host: Machine
) -> None:
    job = resolve(TrainJob, base=demo_job(3.0, 2), environment={}).value
    plan = PLANNERS.build("search").plan(job, host)[0]
    job = plan.job.model_copy(
        update={
            "steps": steps,
            "checkpoint": plan.job.checkpoint.model_copy(update={"every": every}),
        }
    )
    assert _fatal_step(plan.model_copy(update={"job": job})) == fatal
