"""Placed tensors as torch's DTensor, and back: S, B and P are Shard, Replicate and Partial.

Both split a dimension into ceil-sized chunks and let the outer axis of the mesh split first,
so the local tensors are the same and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import Partial as TorchPartial

from shoal.claims.lab.placed.placement import GlobalTensor, RankMesh, from_local
from shoal.core.errors import PlanError, require
from shoal.ir.placement import Axis, Broadcast, Partial, Placement, Split


def to_torch(placement: Placement) -> list[Any]:
    """Torch's placements, one for each axis of the mesh."""
    results: list[Any] = []
    for axis in placement:
        if isinstance(axis, Split):
            results.append(Shard(axis.dim))
        else:
            results.append(TorchPartial(axis.op) if isinstance(axis, Partial) else Replicate())
    return results


def from_torch(placements: Sequence[Any]) -> Placement:
    """Torch's placements, read.

    Raises:
        PlanError: one that has no counterpart, such as an average or a strided shard.
    """
    axes: list[Axis] = []
    for axis in placements:
        if type(axis) is Shard:
            axes.append(Split(axis.dim))
        elif isinstance(axis, Replicate):
            axes.append(Broadcast())
        else:
            op = getattr(axis, "reduce_op", None)
            require(
                type(axis) is TorchPartial and op in ("sum", "max"),
                "placement",
                axis,
                expected="Shard, Replicate, Partial('sum') or Partial('max')",
                hint="redistribute it first",
                error=PlanError,
            )
            axes.append(Partial("max" if op == "max" else "sum"))
    return tuple(axes)


def to_dtensor(x: GlobalTensor, mesh: DeviceMesh) -> DTensor:
    """The same parts as a DTensor.

    Args:
        x: the tensor.
        mesh: torch's mesh of the same ranks and sizes.

    Raises:
        PlanError: a mesh of other sizes.
    """
    _same(x.mesh, mesh)
    size = torch.Size(x.shape)
    stride = torch.empty(size, device="meta").stride()
    dtensor: DTensor = DTensor.from_local(
        x.local,
        mesh,
        to_torch(x.placement),
        run_check=False,
        shape=torch.Size(x.shape),
        stride=stride,
    )
    return dtensor


def from_dtensor(x: DTensor, mesh: RankMesh) -> GlobalTensor:
    """The same parts as a placed tensor.

    Raises:
        PlanError: a mesh of other sizes, or a placement that has no counterpart.
    """
    _same(mesh, x.device_mesh)
    return from_local(x.to_local(), mesh, from_torch(x.placements), tuple(x.shape))


def _same(mesh: RankMesh, torchs: DeviceMesh) -> None:
    sizes = tuple(torchs.shape)
    require(sizes == mesh.sizes, "mesh", sizes, expected=f"{mesh.sizes}, as here", error=PlanError)
