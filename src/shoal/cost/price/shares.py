"""How a training job shares its batch, its vocabulary and its gradients among ranks."""

from __future__ import annotations

from shoal.core.parts import table
from shoal.core.traits import traits
from shoal.ir import TrainJob


def microbatch_of(job: TrainJob) -> int:
    """Sequences of one forward pass on one rank; all of a rank's if the job does not say."""
    return job.microbatch or job.global_batch // job.parallel.dp


def passes_of(job: TrainJob, microbatch: int | None = None) -> int:
    """Micro-batches of a rank's step, of so many sequences each; the job's own by default."""
    return max(1, job.global_batch // job.parallel.dp // (microbatch or microbatch_of(job)))


def vocab_ranks(job: TrainJob) -> int:
    """Ranks that share embedding and output layer."""
    split = job.parallel.vocab_split
    return {"tp": job.parallel.tp, "pp": job.parallel.pp, "none": 1}[split]


def workers_of(job: TrainJob) -> int:
    """Groups of data-parallel ranks that make updates of their own; 1 where all make one."""
    if "local_updates" not in traits("sync", job.sync):
        return 1
    return table("sync").build(job.sync).workers(job.parallel.dp) or 1


def sharers(job: TrainJob) -> int:
    """Ranks that sum their gradients in every step, and share what sharding divides."""
    return job.parallel.dp // workers_of(job) * job.parallel.cp
