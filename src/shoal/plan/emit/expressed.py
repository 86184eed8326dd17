"""What of a job its own engine cannot run."""

from __future__ import annotations

from shoal.core.parts import table
from shoal.cost.gpu.engines import ENGINES
from shoal.ir import Machine, ModelShape, ServeJob, ServePlan, TrainJob, TrainPlan


def refuses(job: TrainJob | ServeJob, shape: ModelShape, machine: Machine) -> tuple[str, ...]:
    """What the engine of a job has no words for; empty for Shoal's own runtime."""
    plan: TrainPlan | ServePlan
    if isinstance(job, ServeJob):
        # Launch files of a server are called as the server.
        words: str = job.engine
        plan = ServePlan.model_construct(job=job, shape=shape, machine=machine)
    else:
        words = ENGINES[job.engine].launched_as
        plan = TrainPlan.model_construct(job=job, shape=shape, machine=machine)
    emitters = table("emitter")
    refused: tuple[str, ...] = emitters.build(words).refuses(plan) if words in emitters else ()
    return refused
