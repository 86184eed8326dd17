"""Where the ranks of a plan compute on this host."""

from __future__ import annotations

import importlib.util
from typing import Literal

from shoal.ir import Machine


def computes_on(machine: Machine) -> Literal["cpu", "gpu"]:
    """Kind of device that ranks planned for ``machine`` compute on, if they run here.

    A plan for GPUs computes on the CPU of a host that has none; nothing runs without torch.
    """
    if machine.device.kind != "gpu" or importlib.util.find_spec("torch") is None:
        return "cpu"
    import torch

    return "gpu" if torch.cuda.is_available() else "cpu"
