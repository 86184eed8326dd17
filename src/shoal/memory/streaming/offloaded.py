"""A model in training whose state lies in tiers: what the engine shards and the loop updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from shoal.ir.comm import LocalParameter

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.ir.comm import Comm
    from shoal.memory.streaming.stream import ParameterStream
    from shoal.memory.streaming.subgroups import SubGroups
    from shoal.memory.streaming.tiling import Tile
    from shoal.memory.tiers.offloaded_parameter import OffloadedParameter
    from shoal.memory.tiers.places import Tiers


class OffloadedModel:
    """See :class:`~shoal.memory.protocols.TieredModel`.

    Args:
        model: model whose parameters are stored in ``homes``.
        homes: of every parameter, in the model's order.
        tiers: places and ways.
        stream: brings parameters and takes gradients.
        update: the optimizer.
        tiles: parameters that are boxes of others.
    """

    overlap = True

    def __init__(
        self,
        model: nn.Module,
        homes: Sequence[OffloadedParameter],
        tiers: Tiers,
        stream: ParameterStream,
        update: SubGroups,
        comm: Comm,
        tiles: Mapping[str, Tile] | None = None,
    ) -> None:
        self.tiles = tiles or {}
        self.model, self.tiers, self.stream = model, tiers, stream
        self._homes = {home.name: home for home in homes if home.gradient is not None}
        self._update = update
        self._comm = comm

    def passes(self, name: str, *inputs: Tensor | None) -> AbstractContextManager[None]:
        """Around all passes of a step, or of one that scores; ``inputs`` come from outside."""
        return self.stream.passes(name, *inputs)

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch."""
        self.stream.last = last
        yield

    def finish(self) -> None:
        """Nothing: gradients have arrived when the passes are over."""

    def owned(self) -> dict[str, Tensor]:
        """This rank's rows of every parameter that has some here."""
        return {name: held.tensor for name, held in self.held().items()}

    def held(self) -> dict[str, LocalParameter]:
        """Slices along the first dimension; what lies on disk is read as it is looked at."""
        parameters: dict[str, LocalParameter] = {}
        for name, home in self._homes.items():
            if home.cut.numel:
                part = home.cut.held(home.weight.shown())
                if name in self.tiles:
                    box = self.tiles[name]
                    offset = tuple(a + b for a, b in zip(part.offset, box.offset, strict=True))
                    part = LocalParameter(part.tensor, offset, box.shape)
                parameters[name] = part
        return parameters

    def lend(self, names: Collection[str]) -> dict[str, Tensor]:
        """Parameters of these names, empty, with their gradients on the device."""
        device = self.tiers.device.device
        lent: dict[str, Tensor] = {}
        for name in names:
            home = self._homes[name]
            if home.cut.numel and home.gradient is not None and not home.fresh:
                gradient = home.cut.held(home.gradient.shown()).tensor.clone().to(device)
                lent[name] = gradient.new_empty(1).expand(gradient.shape)
                lent[name].grad = gradient
        return lent

    def take_back(self, lent: Mapping[str, Tensor]) -> None:
        """Keep the gradients of what was lent."""
        for name, parameter in lent.items():
            home = self._homes[name]
            assert home.gradient is not None
            assert parameter.grad is not None
            gradient = parameter.grad.reshape(-1).cpu()
            home.gradient.shown().copy_(gradient)
            home.measure(0, gradient)
        if self.tiers.disk is not None and lent:
            self.tiers.disk.flush()

    def squares(self, name: str) -> Tensor:
        """Sum of the squares of this rank's elements of a gradient, fp64."""
        return self._homes[name].squares

    def squared_norm(self, counts: Callable[[str], bool]) -> Tensor:
        """Sum of the squares of the gradients of chosen parameters, over the ranks."""
        total = torch.zeros((), dtype=torch.float64)
        # In the order of the replicated model's buckets, for the same bits.
        for name, home in reversed(self._homes.items()):
            if counts(name):
                total += home.squares
        total = total.to(self.tiers.device.device)
        if self._comm.world > 1:
            self._comm.all_reduce(total, tag="norm").wait()
        return total

    def scale_gradients(self, factor: Tensor) -> None:
        """Have every gradient multiplied by a scalar when it is used."""
        self._update.scales.append(factor.detach().cpu())

    def publish(self) -> None:
        """Nothing: what is fetched from now on is new."""

    def writes(self, name: str) -> bool:
        """Every rank writes its slices, once."""
        return True

    def step(self, factor: float) -> None:
        """Update every parameter from its gradient; ``factor`` scales the learning rate."""
        self._update.step(factor)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name -> state name -> tensor; what lies on disk is read as it is looked at."""
        return self._update.state()

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over a state with the same names and shapes; weights were written where held."""
        self._update.load(state)

    def close(self) -> None:
        """End the movers and give the disk back."""
        self.tiers.close()
