"""Ranks that save and load with torch's own ways of sharing a model: DDP, FSDP2, DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from shoal import checkpoint
from shoal.checkpoint.pieces import Piece
from shoal.checkpoint.states import ModuleState, OptimizerState, pieces_of, unwrapped
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError

KINDS = ("plain", "ddp", "fsdp2", "tensor parallel", "fsdp2 and tensor parallel")


class Net(nn.Module):
    """Rows that no number of ranks divides evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tensor: torch.Tensor = self.down(torch.relu(self.up(x)))
        return tensor


def made(kind: str, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: nn.Module = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if "tensor parallel" in kind:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)  # type: ignore[arg-type]
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif "fsdp2" in kind:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return {"model": model, "optimizer": optimizer}


def step(state: dict[str, Any]) -> None:
    x = torch.arange(24.0).view(4, 6) / 24
    torch.autograd.backward(state["model"](x).square().sum())
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def held(state: dict[str, Any]) -> dict[str, list[Piece]]:
    """What this rank holds, by name."""
    names = {id(p): n for n, p in unwrapped(state["model"]).named_parameters()}
    given: Any = {
        **ModuleState(state["model"]).shards(),
        **OptimizerState(state["optimizer"], names).shards(),
    }
    return given


def every_kind(comm: Any, place: str) -> list[str]:
    """Save under each kind, load under each other; what went wrong."""
    wrong = []
    for saving in KINDS:
        one = made(saving, 0)
        step(one)
        checkpoint.save(f"{place}/{saving}", one)
        tree: dict[str, Any] = {"model": {}, "optimizer": {}}
        checkpoint.load(f"{place}/{saving}", tree)
        whole = flat(tree["model"]) | flat(tree["optimizer"])
        wrong += [f"{saving} saved {name}" for name in differing(held(one), whole)]
        for loading in KINDS:
            two = made(loading, 1)
            checkpoint.load(f"{place}/{saving}", two)
            result = held(two)
            wrong += [f"{saving} to {loading}: {name}" for name in differing(result, whole)]
            if len(result) != len(whole):
                wrong.append(f"{saving} to {loading}: {len(result)} of {len(whole)} tensors")
    mesh = init_device_mesh("cpu", (4,))
    try:
        pieces_of(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
        wrong.append("sums that are still to be made were taken for values")
    except CheckpointError as error:
        if "expected Shard or Replicate" not in str(error):
            wrong.append(str(error))
    return wrong


def differing(pieces: dict[str, list[Piece]], whole: dict[str, torch.Tensor]) -> list[str]:
    return [
        name
        for name, several in pieces.items()
        for piece in several
        if not torch.equal(
            piece.tensor, whole[name][piece.box.slices(Box.whole(tuple(whole[name].shape)))]
        )
    ]


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            tensors |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor):
            tensors[prefix + key] = value
    return tensors
