"""Layers of few bits for the claim bipolar_int: recovered inside, or written plane by plane.

Shapes: M rows, N outputs, K inputs, w and a bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.ir import Machine
from shoal.kernel.native import function
from shoal.kernel.operators import tensors_in
from shoal.kernel.planes.engines import PlanesEngine, chosen
from shoal.kernel.planes.layout import join, pack
from shoal.kernel.planes.native import PlanesWeights, product, result, weights

__all__ = ["AllocatedBytes", "fused", "odd", "packed", "spilled"]


def odd(rows: int, k: int, bits: int, seed: int) -> Tensor:
    """Bipolar integers, int64 [rows, k]."""
    codes = torch.randint(0, 2**bits, (rows, k), generator=torch.Generator().manual_seed(seed))
    return codes.mul_(2).sub_(2**bits - 1)


def fused(
    planes_NwW: Tensor, m: int, k: int, a: int, machine: Machine
) -> Callable[[Tensor], Tensor]:
    """Exact integers by the engine that is chosen, recovered where they are computed."""
    n, w = planes_NwW.shape[:2]
    engine = chosen(m, n, k, w, a, k, machine)
    assert engine is not None
    held = weights(join(planes_NwW, k), w, a, tiles=engine.tiles)

    def run(planes_MaW: Tensor) -> Tensor:
        out = result(held, planes_MaW.shape[0])
        product(engine, held, planes_MaW, out)
        return out

    run.scratch = _scratch(engine, k, w)  # type: ignore[attr-defined]
    return run


def spilled(
    planes_NwW: Tensor, m: int, k: int, a: int, machine: Machine
) -> Callable[[Tensor], Tensor]:
    """What it is compared with: every product of two planes is written, then all are added.

    Each product is of one bit, by the engine that is fastest for it.
    """
    n, w = planes_NwW.shape[:2]
    engine = chosen(m, n, k, 1, 1, k, machine)
    assert engine is not None
    held: list[PlanesWeights] = [
        weights(join(planes_NwW[:, i : i + 1].contiguous(), k), 1, 1, tiles=engine.tiles)
        for i in range(w)
    ]

    def run(planes_MaW: Tensor) -> Tensor:
        rows = planes_MaW.shape[0]
        parts = torch.empty(w, a, rows, n, dtype=torch.int32)
        for j in range(a):
            plane = planes_MaW[:, j : j + 1].contiguous()
            for i in range(w):
                product(engine, held[i], plane, parts[i, j])
        out = torch.zeros(rows, n, dtype=torch.int32)
        for i, j in itertools.product(range(w), range(a)):
            out.add_(parts[i, j], alpha=2 ** (i + j))
        return out

    run.scratch = _scratch(engine, k, 1)  # type: ignore[attr-defined]
    return run


def _scratch(engine: PlanesEngine, k: int, w: int) -> int:
    """Bytes that the threads of an engine hold besides tensors."""
    if engine.block < 8:
        return 0
    return int(function("planes", "planes_scratch", "ll", "l")(k, w)) * torch.get_num_threads()


class AllocatedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While open, counts the bytes of all tensors that are made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes = 0
        self._kept: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Remember every new storage, so that none is counted twice."""
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_in(made):
            storage = tensor.untyped_storage()
            at = storage.data_ptr()
            if at not in given and at not in self._kept:
                self._kept[at] = storage
                self.nbytes += storage.nbytes()
        return made


def packed(rows: int, k: int, bits: int, seed: int) -> Tensor:
    """Planes of random integers."""
    return pack(odd(rows, k, bits, seed), bits)
