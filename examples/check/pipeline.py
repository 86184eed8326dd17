"""Pipeline parallelism with torch.distributed.pipelining, sharded over ``dp`` on top.

A rank's stage keeps the names of the whole model, and the ranks of the last stage return the loss.
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

mesh = {"dp": 2, "pp": 2}


def model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 8), torch.randn(8, 8)


def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    index, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    mine = nn.Sequential()
    for name, block in model.named_children():
        if int(name) * stages // len(model) == index:
            mine.add_module(name, block)
    fully_shard(mine, mesh=mesh["dp"])
    stage = PipelineStage(mine, index, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    mine.schedule = Schedule1F1B(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
    return mine


def parallel_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[torch.Tensor, torch.Tensor],
    mesh: DeviceMesh,
) -> torch.Tensor | None:
    inputs, targets = batch
    index, losses = mesh["pp"].get_local_rank(), []
    if index == 0:
        model.schedule.step(inputs)
    else:
        model.schedule.step(target=targets, losses=losses)
    optimizer.step()
    return torch.stack(losses).mean() if losses else None
