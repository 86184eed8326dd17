"""Plans and reports: how a job will run, what that costs, and what it did cost."""

from __future__ import annotations

from shoal.core.config import Value
from shoal.ir.estimate import Estimate, Interval
from shoal.ir.job import TrainJob
from shoal.ir.machine import Machine
from shoal.ir.serve_job import ServeJob
from shoal.ir.shape import ModelShape

__all__ = ["Plan", "Report", "ServePlan", "ServeReport", "Work"]


class Work(Value):
    """One step of a job as the cost model sees it, which every part's ``estimate`` reads.

    Args:
        shape: the model.
        job: the job with every choice made, its microbatch included.
    """

    shape: ModelShape
    job: TrainJob


class Plan(Value):
    """A job with every choice made, the machine it is for, and what it will cost.

    A plan can be written by hand: the estimate is optional then.

    Args:
        job: the concrete job; running the plan is running this job.
        machine: the machine the estimate holds for.
        shape: the model's shape.
        estimate: predicted cost.
        planner: name of the part that made the plan.
        fits: whether the memory of a rank is enough.
        why: why this plan, in a sentence, and what binds it.
        notes: what a reader should know, such as parts that cannot run here yet.
    """

    job: TrainJob
    machine: Machine
    shape: ModelShape
    estimate: Estimate | None = None
    planner: str = ""
    fits: bool = True
    why: str = ""
    notes: tuple[str, ...] = ()


class Report(Value):
    """Prediction beside measurement.

    Args:
        plan: what was planned.
        measured: quantity -> value, in the units of :class:`Estimate`:
            ``step_s``, ``tokens_per_s``, ``memory_bytes``, ``total_s``, ``loss``,
            ``bits_per_byte``, ``mfu`` ...; of an offloaded run the most bytes of each tier:
            ``device_bytes``, ``host_bytes``, ``disk_bytes``.
        errors: quantity -> measured / predicted - 1.
        versions: package -> version.
    """

    plan: Plan
    measured: dict[str, float]
    errors: dict[str, float] = {}
    versions: dict[str, str] = {}


class ServePlan(Value):
    """A serving job with every choice made, and what it will cost.

    Args:
        job: the concrete job, its ``kv_tokens`` included.
        machine: the machine the prediction holds for.
        shape: the model's shape.
        estimate: one full decode step: time by cause, memory by cause (``weights``,
            ``cache``, ``activations``, ``runtime``), what binds.
        predicted: quantity -> interval, over the whole workload: ``tokens_per_s`` (output),
            ``requests_per_s``, ``total_s``, and of ``ttft``, ``tpot`` and ``e2e`` the mean and
            percentiles: ``ttft_mean_s``, ``ttft_p50_s``, ``ttft_p95_s``, ``ttft_p99_s``.
        fits: whether weights and cache fit the memory.
        why: what binds, in a sentence.
        notes: what a reader should know.
    """

    job: ServeJob
    machine: Machine
    shape: ModelShape
    estimate: Estimate | None = None
    predicted: dict[str, Interval] = {}
    fits: bool = True
    why: str = ""
    notes: tuple[str, ...] = ()


class ServeReport(Value):
    """Prediction beside measurement of a served workload.

    Args:
        plan: what was planned.
        measured: quantity -> value, the keys of :class:`ServePlan`'s ``predicted`` and
            ``memory_bytes``.
        errors: quantity -> measured / predicted - 1.
        versions: package -> version.
    """

    plan: ServePlan
    measured: dict[str, float]
    errors: dict[str, float] = {}
    versions: dict[str, str] = {}
