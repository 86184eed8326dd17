"""A model on the device whose state lies on the host, as the engine and the loop see it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from shoal.kernel.squares import sum_of_squares
from shoal.machine import host
from shoal.memory.offload.interleaved import InterleavedUpdater
from shoal.memory.streaming.whole import WholeModel, replace_parameter
from shoal.memory.tiers.places import Tiers

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.ir.comm import Comm
    from shoal.memory.streaming.subgroups import ElementwiseOptimizer
    from shoal.plan.memory.stride import UpdatePattern


class InterleavedModel(WholeModel):
    """See :class:`~shoal.memory.protocols.TieredModel`.

    Args:
        model: on the device.
        tiers: tiers whose bytes are counted.
    """

    overlap = True

    def __init__(
        self, model: nn.Module, tiers: Tiers, update: InterleavedUpdater, comm: Comm
    ) -> None:
        super().__init__(model, tiers, comm)
        self.update = update
        self._squares: dict[str, Tensor] = {}
        self._last = False
        # What is on its way from the device is no reason for an operator to fail.
        tiers.scope.make_room = self._make_room
        for name, parameter in self._names.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                functools.partial(self._received, name)
            )

    def _make_room(self, need: int) -> None:
        scope = self.tiers.scope
        self.update.wait_for_gradients(lambda: scope.room >= need)

    def _received(self, name: str, _: Tensor) -> None:
        """A gradient is whole on this rank; where no other has a part of it, it leaves at once."""
        if self._last and self.overlap and self._comm.world == 1:
            with self.tiers.scope.outside():
                self._leave(name)

    def _leave(self, name: str) -> None:
        gradient = self._names[name].grad
        assert gradient is not None
        self._squares[name] = sum_of_squares(gradient)
        self.update.on_gradient(name)

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch."""
        self._last = last
        yield
        self._last = False

    @torch.no_grad()
    def finish(self) -> None:
        """Sum the gradients over the ranks, and send what has not left yet."""
        for name, parameter in reversed(self._names.items()):
            if name not in self._squares:
                self._reduce(parameter)
                self._leave(name)

    def lend(self, names: Collection[str]) -> dict[str, Tensor]:
        """Parameters of these names, with their gradients, for code that must change these."""
        result = {name: p for name, p in self._names.items() if name in names}
        for name, parameter in result.items():
            parameter.grad = self.update.gradient_of(name)
        return dict(result)

    def take_back(self, lent: Mapping[str, Tensor]) -> None:
        """Keep the gradients of what was lent."""
        for name in lent:
            self._leave(name)

    def squares(self, name: str) -> Tensor:
        """Sum of the squares of a parameter's gradient, as it left the device."""
        return self._squares[name]

    def scale_gradients(self, factor: Tensor) -> None:
        """Have every gradient multiplied by a scalar when it is used."""
        self.update.scales.append(factor.detach().cpu())

    def step(self, factor: float) -> None:
        """Update every parameter from its gradient; ``factor`` scales the learning rate."""
        self.update.step(factor)
        self._squares.clear()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name -> state name -> tensor."""
        return self.update.state()

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over a state with the same names and shapes; weights were written where held."""
        self.update.load(state)

    def close(self) -> None:
        """End the threads that move."""
        self.update.close()
        self.tiers.close()


def interleaved_model(
    model: nn.Module,
    comm: Comm,
    rule: ElementwiseOptimizer,
    *,
    pattern: Callable[[Sequence[int]], UpdatePattern],
    sub_group: int,
    device: torch.device | str,
    device_bytes: int | None,
    host_bytes: int | None,
    values: Callable[[str], Tensor] | None,
) -> InterleavedModel:
    """Give a model's parameters their place on the device, and their state its place on the host.

    Raises:
        TierFullError: a budget is too small; says what it needs.
    """
    tiers = Tiers(
        device=device,
        device_bytes=device_bytes or _all_of(device),
        host_bytes=host_bytes or host.memory_total(),
    )
    try:
        for name, parameter in model.named_parameters():
            whole = values(name) if parameter.is_meta and values is not None else parameter.detach()
            block = tiers.device.alloc(parameter.numel() * parameter.element_size(), name)
            here = tiers.device.view(block, parameter.dtype, parameter.shape)
            here.copy_(whole)
            if parameter.is_meta:
                replace_parameter(model, name, here, requires_grad=parameter.requires_grad)
            else:
                parameter.data = here
        for buffer in model.buffers():
            buffer.data = tiers.scope.adopt(buffer.data.to(tiers.device.device), "buffer")
        update = InterleavedUpdater(
            {name: p for name, p in model.named_parameters() if p.requires_grad},
            rule,
            sub_group=sub_group,
            pattern=pattern,
            device=tiers.device,
            host=tiers.host,
        )
    except BaseException:
        tiers.close()
        raise
    return InterleavedModel(model, tiers, update, comm)


def _all_of(device: torch.device | str) -> int:
    """Bytes of a device's memory; what is not touched is not taken."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host.memory_total()
