"""The state of a drafter's training: what it has learned, and the optimizer's moments."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from shoal.core.errors import CheckpointError
from shoal.core.files import write_atomic


def save_state(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write what a run needs to go on with ``step``, whole or not at all.

    Raises:
        CheckpointError: it cannot be written.
    """
    tensors = {f"net.{name}": p.detach() for name, p in net.named_parameters()}
    for number, kept in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{key}": value for key, value in kept.items()}
    data = save({key: value.contiguous() for key, value in tensors.items()}, {"step": str(step)})
    write_atomic(path, data, error=CheckpointError)


def load_state(path: Path, net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Take over a saved state; the step to go on with.

    Raises:
        CheckpointError: it is damaged, or of another net.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            result = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            step = int((opened.metadata() or {})["step"])
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(result.pop(f"net.{name}"))
    except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as cause:
        raise CheckpointError(
            f"{path}: no state of this run ({cause}); remove the run and begin again"
        ) from cause
    kept: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in result.items():
        _, number, leaf = key.split(".", 2)
        kept.setdefault(int(number), {})[leaf] = value
    state = optimizer.state_dict()
    state["state"] = kept
    optimizer.load_state_dict(state)
    return step
