"""Model FLOPs utilisation: useful FLOP/s as a share of the ranks' peak.

Source: Chowdhery et al., PaLM, 2022, appendix B: 6 N plus attention, recompute not counted.
"""

from __future__ import annotations

from shoal.cost.arithmetic import flops_per_token
from shoal.ir import TrainPlan


def step_flops(plan: TrainPlan) -> float:
    """FLOPs of one training step of all ranks."""
    job = plan.job
    return flops_per_token(plan.shape, job.seq_len) * job.global_batch * job.seq_len


def peak_flops(plan: TrainPlan, threads: int) -> float:
    """FLOP/s that the plan's ranks could do at the job's precision.

    A CPU's peak is shared by its cores; a rank has ``threads`` of them.
    """
    job, device = plan.job, plan.machine.device
    for rates in (device.peak_flops, device.matmul_flops):
        rate = rates.get(job.precision) or rates.get("fp32")
        if rate:
            break
    else:
        return float("inf")
    if device.kind == "gpu":
        return rate * job.parallel.world
    cores = device.num_cores or 1
    return (
        rate
        * min(1.0, threads * job.parallel.world / (cores * plan.machine.nodes))
        * (plan.machine.nodes)
    )
