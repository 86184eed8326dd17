"""Tensors placed with shares drawn at random, so that a share is never the whole by luck."""

from __future__ import annotations

import torch

from shoal.claims.lab.placed.placement import GlobalTensor, RankMesh, from_local
from shoal.ir.placement import Partial, Placement, coordinates, local_box


def shares(x: torch.Tensor, placement: Placement, mesh: RankMesh, seed: int) -> GlobalTensor:
    """``x`` on a mesh: parts of it, or shares whose sum or maximum it is."""
    partial = [a for a, axis in enumerate(placement) if isinstance(axis, Partial)]
    local = x
    if partial:
        keys = sorted({tuple(c[a] for a in partial) for c in coordinates(mesh.sizes)})
        own = keys.index(tuple(mesh.coord[a] for a in partial))
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand((len(keys), *x.shape), generator=generator, dtype=torch.float64)
        first = placement[partial[0]]
        assert isinstance(first, Partial)
        if first.op == "sum":
            noise[-1] = x - noise[:-1].sum(0)
            local = noise[own].to(x.dtype)
        else:
            owner = torch.randint(0, len(keys), x.shape, generator=generator)
            local = torch.where(owner == own, x, x - noise[own].to(x.dtype))
    box = local_box(x.shape, placement, mesh.sizes, mesh.coord)
    index = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
    return from_local(local[index].contiguous(), mesh, placement, x.shape)
