"""Models in training of which every data-parallel rank has all parameters."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from shoal.ir.comm import LocalParameter

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.ir.comm import Comm
    from shoal.memory.streaming.tiling import Tile
    from shoal.memory.tiers.places import Tiers


class WholeModel(ABC):
    """What such models share of :class:`~shoal.memory.protocols.TieredModel`."""

    def __init__(self, model: nn.Module, tiers: Tiers, comm: Comm) -> None:
        self.model, self.tiers = model, tiers
        self.tiles: Mapping[str, Tile] = {}
        self._comm = comm
        self._names = {name: p for name, p in model.named_parameters() if p.requires_grad}

    @contextlib.contextmanager
    def passes(self, name: str, *inputs: Tensor | None) -> Iterator[None]:
        """Around all passes of a step, or of one that scores; ``inputs`` come from outside."""
        with self.tiers.scope as scope:
            for tensor in inputs:
                if tensor is not None:
                    scope.adopt(tensor)
            yield

    def owned(self) -> dict[str, Tensor]:
        """All parameters."""
        return dict(self._names)

    def held(self) -> dict[str, LocalParameter]:
        """Every parameter, whole."""
        return {
            name: LocalParameter(p.detach(), (0,) * p.dim(), tuple(p.shape))
            for name, p in self._names.items()
        }

    def publish(self) -> None:  # noqa: B027 - what updates alike has nothing to send
        """Nothing: every rank made the same update."""

    def writes(self, name: str) -> bool:
        """Ranks share the saving: parameter i is written by rank i mod N."""
        return list(self._names).index(name) % self._comm.world == self._comm.rank

    @abstractmethod
    def squares(self, name: str) -> Tensor:
        """Sum of the squares of a parameter's gradient, which is whole here; a scalar, fp64."""

    def squared_norm(self, counts: Callable[[str], bool]) -> Tensor:
        """Sum of squares of chosen parameters, in the order of the replicated model's buckets."""
        total = torch.zeros((), dtype=torch.float64, device=self.tiers.device.device)
        for name in reversed(self._names):
            if counts(name):
                total += self.squares(name)
        return total

    def _reduce(self, parameter: Tensor) -> Tensor:
        """A parameter's gradient, summed over the ranks; zeros where no pass made one."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if self._comm.world > 1:
            self._comm.all_reduce(parameter.grad, tag="gradients").wait()
        return parameter.grad


def replace_parameter(model: nn.Module, name: str, values: Tensor, *, requires_grad: bool) -> None:
    """Put a parameter with these values everywhere where one of no memory was."""
    old = model.get_parameter(name)
    fresh = torch.nn.Parameter(values, requires_grad=requires_grad)
    for module in model.modules():
        for leaf, result in module._parameters.items():
            if result is old:
                module._parameters[leaf] = fresh
