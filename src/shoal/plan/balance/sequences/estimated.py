"""What an assigner adds to a step of a training job, before its documents are known."""

from __future__ import annotations

from shoal.cost.training.sequences import SequenceCost
from shoal.ir import Estimate, Interval, Machine, Work
from shoal.plan.balance.sequences.assignment import SequenceAssigner
from shoal.plan.balance.sequences.predicted import predict


def assigned_estimate(part: SequenceAssigner, work: Work, machine: Machine) -> Estimate:
    """Bytes one rank sends for shared sequences, and seconds beyond an even share of the work.

    Assumes that every row of the batch is one document; shorter documents need less communication.
    """
    job = work.job
    ranks = job.parallel.world
    cost = SequenceCost.on(work.shape, machine, job.parallel, precision=job.precision)
    plan = part.assign([job.seq_len] * job.global_batch, ranks, cost)
    result = predict(plan, cost)
    one = cost.quadratic_s * job.seq_len**2 + cost.linear_s * job.seq_len
    seconds = max(0.0, result.step_s - one * job.global_batch / ranks)
    scope = "loopback" if machine.device.kind == "cpu" and machine.nodes == 1 else "node"
    return Estimate(
        step_s=Interval.around(seconds, 0.5),
        terms_s={"collective": seconds},
        wire_bytes={scope: result.exchange_bytes / ranks} if result.exchange_bytes else {},
    )
