"""The plan that a training run follows: the best one whose every choice can be executed.

Nothing here needs torch: a plan can be made, shown and launched elsewhere without it.
"""

from __future__ import annotations

from shoal.core.errors import PlanError
from shoal.core.parts import table
from shoal.ir import Machine, TrainJob, TrainPlan, Work
from shoal.kernel.fused.choice import OPERATORS, choose
from shoal.parallel.legal import check_split
from shoal.train.device import computes_on
from shoal.train.peft.job import check_base


def plan_job(job: TrainJob, machine: Machine, *, planner: str = "search") -> TrainPlan:
    """The best plan that keeps every choice the job has made, and that can run.

    Raises:
        PlanError: there is none.
    """
    from shoal.plan import strategy

    plans: list[TrainPlan] = strategy.PLANNERS.build(planner).plan(job, machine)
    refusal: PlanError | None = None
    for plan in plans:
        try:
            check_split(plan.job, plan.shape)
            check_base(plan.job)
        except PlanError as cause:
            refusal = refusal or cause
        else:
            return with_rounds(with_kernels(plan))
    raise refusal or PlanError(f"{job.model} on {machine.name}: no plan exists")


def _device(machine: Machine) -> str:
    """Where ranks on the machine compute; empty for GPUs that this host does not have."""
    if machine.device.kind != "gpu":
        return "cpu"
    return "cuda" if computes_on(machine) == "gpu" else ""


def with_kernels(plan: TrainPlan) -> TrainPlan:
    """The plan with a kernel named for every operator that training has kernels for.

    What dispatch takes may be another tomorrow, or elsewhere; a run that goes on, on however many
    ranks, takes what its plan says.

    Raises:
        KernelError: a kernel that the job names does not exist, or refuses.
    """
    job = plan.job
    wanted, device = job.kernel, _device(plan.machine)
    if device == "":  # it runs elsewhere, or here on the CPU after all: what does both
        wanted = dict.fromkeys(OPERATORS, "torch") | wanted
    taken = choose(
        wanted,
        plan.shape,
        job.precision,
        rows=job.seq_len * (job.microbatch or 1),
        device="cpu" if device == "cpu" else "cuda",
        compiled=job.compile,
        machine=plan.machine,
    )
    return plan.model_copy(update={"job": job.model_copy(update={"kernel": taken})})


def with_rounds(plan: TrainPlan) -> TrainPlan:
    """The plan with a number where the job leaves the steps of a round to it."""
    job = plan.job
    part = table("sync").build(job.sync, where="sync")
    if getattr(part, "tau", None) != "auto":
        return plan
    steps = part.steps(Work(shape=plan.shape, job=job), plan.machine)
    sync = job.sync.model_copy(update={"options": {**job.sync.options, "tau": steps}})
    return plan.model_copy(update={"job": job.model_copy(update={"sync": sync})})
