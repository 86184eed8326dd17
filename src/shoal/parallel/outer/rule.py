"""What an outer update promises, and where the parameters lie in the flat tensors it works on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Comm

TAG = "outer"
"""The tag of all that workers send each other."""


class Rule(Protocol):
    """An outer update: ``x = x - lr * direction(mean)``.

    Attributes:
        lr: its step.
    """

    lr: float

    def direction(self, mean: Tensor) -> Tensor:
        """Where to go [P], from the mean change of the workers [P], which is spoilt."""

    def state(self) -> dict[str, Tensor]:
        """What it keeps between rounds, by name; filled where it lies when a run goes on."""


class Segments:
    """The parameters in a flat tensor, or in this worker's chunk of it.

    Args:
        sizes: elements of each parameter.
        start: first element of the chunk.
        stop: behind its last one.
        comm: the workers, where each has a chunk; None where each has everything.
    """

    def __init__(self, sizes: Sequence[int], start: int, stop: int, comm: Comm | None) -> None:
        self.number = len(sizes)
        self._comm = comm
        self._bounds: list[tuple[int, int, int]] = []
        at = 0
        for number, size in enumerate(sizes):
            first, last = max(at, start), min(at + size, stop)
            if first < last:
                self._bounds.append((number, first - start, last - start))
            at += size

    def norms(self, *flats: Tensor) -> Tensor:
        """L2 norm of every parameter's part of some tensors [P]: [len(flats), number]."""
        import torch

        norms = flats[0].new_zeros(len(flats), self.number)
        for row, flat in zip(norms, flats, strict=True):
            for number, first, last in self._bounds:
                row[number] = torch.linalg.vector_norm(flat[first:last])
        if self._comm is None or self._comm.world == 1:
            return norms
        norms.square_()
        self._comm.all_reduce(norms, tag=TAG).wait()
        return norms.sqrt_()

    def divide(self, flat: Tensor, by: Tensor) -> None:
        """Divide every parameter's part [P] by its own number [number], in place."""
        for number, first, last in self._bounds:
            flat[first:last].div_(by[number])
