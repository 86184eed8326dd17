"""How often a job saves, and what saving and failures cost it.

Failures come without memory, one every M seconds of the whole job. With a stall of s seconds every
t seconds of work and R seconds from a failure until the run goes on, a job that would work for T
seconds takes M exp(R/M) (exp((t+s)/M) - 1) T/t (Daly, equation 20). The interval of least loss is
Young's sqrt(2 s M), or Daly's correction of it where s is not small beside M.

Source: Young, A First Order Approximation to the Optimum Checkpoint Interval, 1974; Daly, A Higher
Order Estimate of the Optimum Checkpoint Interval, 2006, equations 20 and 37.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from shoal.core.errors import require
from shoal.ir import Device, TrainJob

# 419 unexpected interruptions of 16,384 H100 in 54 days (Grattafiori et al., The Llama 3 Herd of
# Models, 2024, table 5): a device with its share of the node fails once in some 50,700 hours.
_DEVICE_MTBF_H = 16_384 * 54 * 24 / 419
# From a failure until steps are taken again: minutes where nodes are checked and replaced first
# (Jiang et al., MegaScale, NSDI 2024: less than ten), a start where there is one node.
_RESTART_S, _RESTART_NODES_S = 60.0, 600.0
# Longest time between saves: failures are not all that ends a run.
_LONGEST_S = 3600.0
# Even a save that is written behind training stops it so long: ranks agree, tensors are listed. On
# several devices seconds (6.3 s of a 7B model on 16 GPUs: PyTorch, Reducing Model Checkpointing
# Times by over 10x with Distributed Asynchronous Checkpointing, 2024).
_LEAST_STALL_S, _LEAST_STALL_DEVICES_S = 1e-3, 1.0
# exp() of more is beyond any job.
_MOST = 50.0


class Saving(NamedTuple):
    """How a job saves.

    Args:
        every: steps between two saves; 0 for one at the end.
        stall_s: that a save holds training up.
        mtbf_s: mean seconds between failures of the job.
        restart_s: from a failure until the run goes on.
    """

    every: int
    stall_s: float
    mtbf_s: float
    restart_s: float


def mtbf_of(device: Device, count: int) -> float:
    """Mean seconds between failures of any of so many devices."""
    return 3600.0 * (device.mtbf_hours or _DEVICE_MTBF_H) / count


def saving_of(
    job: TrainJob, device: Device, *, devices: int, nodes: int, step_s: float, stall_s: float
) -> Saving:
    """How a job saves on so many devices of so many nodes.

    Args:
        job: its ``checkpoint.every`` counts; auto takes the interval of Daly, an hour at most.
        device: with the mean time between its failures.
        devices: that the job occupies.
        nodes: that they lie on.
        step_s: seconds of a step.
        stall_s: that a save holds training up.
    """
    mtbf_s = mtbf_of(device, devices)
    stall_s = max(stall_s, _LEAST_STALL_S if device.kind == "cpu" else _LEAST_STALL_DEVICES_S)
    restart_s = _RESTART_S if nodes == 1 else _RESTART_NODES_S
    stated = job.checkpoint.every
    if stated == "auto":
        best_s = min(_LONGEST_S, daly(stall_s, mtbf_s))
        return Saving(max(1, round(best_s / step_s)), stall_s, mtbf_s, restart_s)
    return Saving(stated, stall_s, mtbf_s, restart_s)


def failures_s(saving: Saving, work_s: float, step_s: float) -> float:
    """Seconds that failures are expected to cost a job: work done again, and restarts.

    Args:
        saving: how it saves.
        work_s: seconds of the job without failures, its saves included.
        step_s: seconds of a step.
    """
    between = saving.every * step_s + saving.stall_s if saving.every else work_s
    share = min(_MOST, min(between, work_s) / saving.mtbf_s)
    if not share:
        return 0.0
    restarts = math.exp(min(_MOST, saving.restart_s / saving.mtbf_s))
    return work_s * (restarts * math.expm1(share) / share - 1.0)


def young(stall_s: float, mtbf_s: float) -> float:
    """Seconds between saves that stall a job for ``stall_s`` each, to first order: sqrt(2 s M).

    Raises:
        ConfigError: a number that is not above 0.
    """
    require(stall_s > 0, "stall_s", stall_s, expected="seconds above 0")
    require(mtbf_s > 0, "mtbf_s", mtbf_s, expected="seconds above 0")
    return math.sqrt(2 * stall_s * mtbf_s)


def daly(stall_s: float, mtbf_s: float) -> float:
    """The same, to higher order; the mean time itself where a save costs twice that and more.

    Raises:
        ConfigError: a number that is not above 0.
    """
    first = young(stall_s, mtbf_s)
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s
