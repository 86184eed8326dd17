"""The job ``sorting``: what somebody else adds to the table of jobs."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from shoal.core.errors import ConfigError, StoreError
from shoal.core.files import write_json
from shoal.core.parts import part
from shoal.cost.score import Score
from shoal.ir import Flag, Interval, Job, Plan, Quantity, Report, errors_of

_SECONDS = 1e-7


class SortingJob(Job):
    """Sort random numbers.

    Args:
        job: the kind of job.
        name: name of the run.
        numbers: how many.
    """

    job: Literal["sorting"] = "sorting"
    name: str = "sorting"
    numbers: Annotated[int, Field(ge=2)] = 1000


class SortingPlan(Plan[SortingJob]):
    """How the numbers are sorted."""


class SortingReport(Report[SortingPlan]):
    """What it took."""


@part
class Sorting:
    """Sort random numbers in this process."""

    summary: ClassVar = "sort random numbers"
    job_type: ClassVar = SortingJob
    plan_type: ClassVar = SortingPlan
    report_type: ClassVar = SortingReport
    subject: ClassVar = "name"
    example: ClassVar = {"numbers": 100}
    flags: ClassVar = (Flag(name="numbers", path="numbers", help="How many numbers."),)
    quantities: ClassVar = (
        Quantity(
            name="total_s", label="time", unit="ms", factor=1e3, better="lower", headline=True
        ),
    )

    def plan(self, job, machine):
        seconds = _SECONDS * job.numbers * math.log2(job.numbers)
        return [
            SortingPlan(
                job=job,
                machine=machine,
                predicted={"total_s": Interval.around(seconds, 3.0)},
                why="comparisons are all there is",
            )
        ]

    def run(self, plan, directory, *, resume=False, watch=None, anyway=False):
        if (directory / "plan.yaml").exists() and not resume:
            raise ConfigError(f"{directory}: already contains a run; give --resume")
        Score().register(directory, "sorting", plan.job.name)
        plan.save(directory / "plan.yaml")
        numbers = [random.random() for _ in range(plan.job.numbers)]
        begin = time.perf_counter()
        numbers.sort()
        measured = {"total_s": time.perf_counter() - begin}
        report = SortingReport(plan=plan, measured=measured, errors=errors_of(plan, measured))
        write_json(directory / "report.json", report.model_dump(mode="json"))
        Score().append(report, directory)
        return report

    def report(self, plan, directory):
        raise StoreError(f"{directory}: reports when it ends")

    def predictions(self, plan):
        return plan.predicted

    def describe(self, plan):
        return f"{plan.job.numbers} numbers"

    def results(self, report, directory: Path):
        return [f"sorted in {directory}"]


@part
class Broken:
    """What forgot most of the protocol."""

    summary: ClassVar = "do nothing"
