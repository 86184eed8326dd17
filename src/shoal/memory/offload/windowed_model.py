"""A model in training of which a window of blocks is on the device, as engine and loop see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shoal.kernel.squares import sum_of_squares
from shoal.memory.streaming.whole import WholeModel, replace_parameter

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.ir.comm import Comm
    from shoal.memory.streaming.superpipeline import SuperpipelineModel
    from shoal.memory.tiers.places import Tiers


class WindowedModel(WholeModel):
    """See :class:`~shoal.memory.protocols.TieredModel`.

    Args:
        wrapped: the model and its window.
        tiers: places; the window's device is one of them.
    """

    overlap = False

    def __init__(
        self, wrapped: SuperpipelineModel, comm: Comm, optimizer: Any, tiers: Tiers
    ) -> None:
        super().__init__(wrapped.model, tiers, comm)
        self.wrapped = wrapped
        self._updater = optimizer.build(self.owned())
        # The optimizer makes its state and autograd the gradients, on the host and uncounted.
        kept = sum(p.nbytes for p in self._names.values())
        tiers.host.reserve(kept * (1 + len(optimizer.states)), "gradients and optimizer state")
        self._fresh = True
        # What is on its way from the device is no reason for an operator or a block to fail.
        tiers.scope.make_room = wrapped.window.make_room = self._make_room

    def _make_room(self, need: int) -> None:
        scope = self.tiers.scope
        self.wrapped.window.wait_for_gradients(lambda: scope.room >= need)

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch."""
        if self._fresh:
            for parameter in self._names.values():
                parameter.grad = None
            self._fresh = False
        yield

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the gradients over the ranks, in the order of the replicated model's buckets."""
        self._fresh = True
        for parameter in reversed(self._names.values()):
            self._reduce(parameter)

    def lend(self, names: Collection[str]) -> dict[str, Tensor]:
        """The parameters of these names."""
        return {name: self._names[name] for name in names if name in self._names}

    def take_back(self, lent: Mapping[str, Tensor]) -> None:
        """Nothing: what was lent is the gradients themselves."""

    def squares(self, name: str) -> Tensor:
        """Sum of the squares of a parameter's gradient."""
        return sum_of_squares(self._gradient(name))

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar."""
        for name in self._names:
            gradient = self._gradient(name)
            gradient.mul_(factor.to(gradient.device))

    def _gradient(self, name: str) -> Tensor:
        gradient = self._names[name].grad
        assert gradient is not None
        return gradient

    def step(self, factor: float) -> None:
        """Update every parameter from its gradient, where it lies."""
        self._updater.step(factor)
        self.wrapped.refresh()  # kernels write by address

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name -> state name -> tensor."""
        state: dict[str, dict[str, Tensor]] = self._updater.state()
        return state

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over a state with the same names and shapes."""
        self._updater.load(state)

    def close(self) -> None:
        """End the movers and give the places back."""
        self.wrapped.close()
        self.tiers.close()


def fill(model: nn.Module, values: Callable[[str], Tensor]) -> None:
    """Give parameters without memory their values; those that are one stay one."""
    for name, empty in list(model.named_parameters()):
        if empty.is_meta:
            value = torch.empty(empty.shape, dtype=empty.dtype).copy_(values(name))
            replace_parameter(model, name, value, requires_grad=empty.requires_grad)
