"""Where the ranks of a plan compute on this host."""

from __future__ import annotations

from typing import Literal

from shoal.ir import Machine

__all__ = ["computes_on"]


def computes_on(machine: Machine) -> Literal["cpu", "gpu"]:
    """Kind of device that ranks planned for ``machine`` compute on, if they run here.

    A plan for GPUs computes on the CPU of a host that has none.
    """
    if machine.device.kind != "gpu":
        return "cpu"
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"
