"""The job of ``shoal demo`` leaves to the planner what it does not say."""

from __future__ import annotations

import pytest

from shoal.app.demo import demo_job
from shoal.core.config import resolve
from shoal.ir import Device, Machine, MemoryTier, TrainJob
from shoal.plan.strategy import PLANNERS


@pytest.mark.parametrize(("bf16", "precision"), [(2e10, "fp32"), (1e12, "bf16")])
def test_its_precision_is_the_faster_one_of_the_machine(bf16: float, precision: str) -> None:
    machine = Machine(
        name="host",
        device=Device(
            name="cpu",
            kind="cpu",
            num_cores=2,
            matmul_flops={"fp32": 2e11, "bf16": bf16},
            memory=(MemoryTier(name="dram", capacity_bytes=16 * 10**9, read_bandwidth=2e10),),
        ),
    )
    job = resolve(TrainJob, base=demo_job(3.0, 2), environment={}).value
    first = PLANNERS.build("search").plan(job, machine)[0]
    assert (first.job.precision, first.job.parallel.dp) == (precision, 2)
