"""What the processes of ``test_gpipe`` do."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.claims.lab.gpipe import Save, Use, gpipe
from shoal.parallel.protocols import Comm


def layers() -> list[nn.Module]:
    """Ragged shapes, dropout and a skip over a cut."""
    torch.manual_seed(0)
    return [
        nn.Linear(4, 6),
        Save("a"),
        nn.Tanh(),
        nn.Linear(6, 6),
        nn.Dropout(0.4),
        Use("a"),
        nn.Linear(6, 3),
    ]


def step(comm: Comm, m: int) -> dict[str, Any]:
    """Loss and gradients of one step."""
    pipeline = gpipe(layers(), comm.world, m, comm=comm, seed=5)
    x = torch.arange(28.0).view(7, 4).sin()
    loss = pipeline.step(x, torch.arange(7) % 3)
    out = pipeline.eval()(x)
    return {
        "loss": float(loss),
        "out": None if out is None else out.tolist(),
        "gradients": {n: p.grad.tolist() for n, p in pipeline.named_parameters()},
    }
