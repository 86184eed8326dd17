"""What real ranks run: our transitions beside DTensor's."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from placed_dtensor import from_dtensor, from_torch, to_dtensor, to_torch
from torch.distributed.device_mesh import init_device_mesh

from shoal.claims.lab.placed.placement import RankMesh, to_global
from shoal.ir.placement import Partial, every_placement, show_placement

if TYPE_CHECKING:
    from shoal.parallel.comm.collectives import TorchComm


def redistribute(comm: TorchComm, sizes: list[int], shape: list[int]) -> list[str]:
    """Names of the transitions whose local tensors differ; all others are equal."""
    mesh = RankMesh(comm, tuple(sizes))
    theirs = init_device_mesh("cpu", tuple(sizes))
    # Sums of a few small integers are exact in any order.
    whole = torch.arange(1.0, 1.0 + torch.Size(shape).numel()).view(shape)
    wrong: list[str] = []
    placements = every_placement(len(shape), len(sizes))
    for source, target in itertools.product(placements, repeat=2):
        if from_torch(to_torch(source)) != source:
            wrong.append(f"{source} is not read back")
        if any(isinstance(axis, Partial) for axis in target):
            continue  # torch makes nothing partial by redistribution
        ours = to_global(whole, mesh, source)
        given = to_dtensor(ours, theirs)
        made = ours.to(target)
        torchs = given.redistribute(placements=to_torch(target))
        back = from_dtensor(torchs, mesh)
        if not torch.equal(made.local, torchs.to_local()) or not torch.equal(back.whole(), whole):
            wrong.append(f"{show_placement(source)} -> {show_placement(target)}")
    return wrong
