"""Where the weights of the layers lie: beside the processor, or some of them with a neighbour.

A layer whose weights lie elsewhere is computed in an arena of a few layers' size. While the layers
before it are computed, a thread of its own copies its weights there. The layers elsewhere are
spread evenly, so that each copy has as many resident layers to hide behind as there can be; it is
hidden if it takes no longer than these.

On a CPU there is one memory. What belongs to the neighbour is then a copy of its own in the host's
memory, and the link to it is emulated: a copy is over when a link of the given speed would have
moved it. That shows whether copies hide, and frees no memory of this machine.

Source: Du et al., EnergonAI, 2022, section 4.4 (peer memory pooling).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from annotated_types import Ge, Gt

from shoal.core.errors import require
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.linear import DispatchedLinear
    from shoal.model.transformer import Transformer, TransformerBlock


class MemoryPart(Protocol):
    """A part of kind ``memory``."""

    def apply(self, model: Transformer) -> object | None:
        """Bring weights of a model for inference to where they are to lie; None if they stay.

        Raises:
            ConfigError: the model has weights that cannot lie there.
        """


@part
class Resident:
    """All weights are in the memory of the device that computes with them."""

    traits: ClassVar[frozenset[str]] = frozenset({"weights_stay"})

    def apply(self, model: Transformer) -> None:
        """See :class:`MemoryPart`; nothing moves."""


@part
class PeerMemory:
    """Some layers are in the memory of another device and are copied before they are needed.

    Args:
        fraction: share of the layers that are there.
        slots: number of layers in the buffer.
        prefetch: copy a layer during the computation of others; otherwise copy it when it is needed
            (the baseline of prefetching).
        bytes_per_s: byte/s of an emulated link; None to copy at the speed of the machine.
    """

    fraction: float = 0.3
    slots: Annotated[int, Ge(1)] = 2
    prefetch: bool = True
    bytes_per_s: Annotated[float, Gt(0)] | None = None

    def __post_init__(self) -> None:
        where = "memory.peer"
        require(
            0 < self.fraction <= 0.5,
            f"{where}.fraction",
            self.fraction,
            expected="a fraction in (0, 0.5], so that every copy overlaps with a resident layer",
        )

    def apply(self, model: Transformer) -> PeerPool | None:
        """See :class:`MemoryPart`.

        Raises:
            ConfigError: packed weights, another device than a CPU, or an arena that holds all.
        """
        layers = elsewhere(len(model.blocks), self.fraction)
        if not layers:
            return None
        return PeerPool(
            model,
            layers,
            slots=self.slots,
            prefetch=self.prefetch,
            bytes_per_s=self.bytes_per_s,
        )


def elsewhere(num_layers: int, fraction: float) -> tuple[int, ...]:
    """Numbers of the layers that lie elsewhere: evenly spread, each behind some that stay."""
    count = int(fraction * num_layers + 1e-9)
    return tuple((place + 1) * num_layers // count - 1 for place in range(count))


def least_resident(num_layers: int, copy_s: float, layer_s: float) -> int:
    """Fewest layers that must stay so that every copy is hidden: ``T_copy <= gap * T_layer``.

    Args:
        num_layers: all layers.
        copy_s: s that the copy of one layer takes.
        layer_s: s that computing one takes.
    """
    gap = max(1, math.ceil(copy_s / layer_s))
    return num_layers - num_layers // (gap + 1)


class PeerPool:
    """Layers whose weights come when they are needed.

    Args:
        model: for inference; its blocks are changed in place.
        layers: numbers of those that lie elsewhere, rising.
        slots: number of layers in the buffer.
        prefetch: copy before they are needed.
        bytes_per_s: of an emulated link.
        sleep: waits so many s.

    Raises:
        ConfigError: packed weights, another device than a CPU, or an arena that holds all.
    """

    def __init__(
        self,
        model: Transformer,
        layers: tuple[int, ...],
        *,
        slots: int = 2,
        prefetch: bool = True,
        bytes_per_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        import torch

        require(
            slots < len(layers),
            "memory.peer.slots",
            slots,
            expected=f"fewer than the {len(layers)} layers that lie elsewhere",
            hint="otherwise no memory is saved; keep the layers resident",
        )
        self.layers, self._slots, self._prefetch = layers, slots, prefetch
        self._bytes_per_s, self._clock, self._sleep = bytes_per_s, clock, sleep
        blocks = [model.blocks[layer] for layer in layers]
        every = [_linears(block) for block in blocks]  # type: ignore[arg-type]
        # What lies elsewhere, one piece a layer; and the arena, of so many pieces.
        self._elsewhere = [
            torch.cat([_flat(linear.kept()) for linear in linears]) for linears in every
        ]
        with torch.inference_mode(False):
            self._arena = torch.empty(
                slots, len(self._elsewhere[0]), dtype=self._elsewhere[0].dtype
            )
        self._holds: list[int | None] = [None] * slots
        self._coming: dict[int, Future[None]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="shoal-peer")
        self.copies = 0
        for place, (block, linears) in enumerate(zip(blocks, every, strict=True)):
            self._redirect(linears, place % slots)
            self._wrap(block, place)  # type: ignore[arg-type]
        for place in range(slots if prefetch else 0):
            self._start(place)

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena."""
        return self._arena.nbytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that lie elsewhere, less those of the arena."""
        return sum(one.nbytes for one in self._elsewhere) - self.arena_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one copy."""
        return self._elsewhere[0].nbytes

    def close(self) -> None:
        """Finish what is under way and end the thread."""
        self._pool.shutdown(wait=True)

    def _redirect(self, linears: list[DispatchedLinear], slot: int) -> None:
        """Let layers compute with what lies in a slot of the arena."""
        import torch

        start = 0
        for linear in linears:
            weight = linear.kept()
            rows, columns = weight.shape
            part = self._arena[slot, start : start + rows * columns]
            start += rows * columns
            # By rows or by columns, as it was.
            by_rows = weight.is_contiguous()
            view = part.view(rows, columns) if by_rows else part.view(columns, rows).t()
            linear.replace(torch.nn.Parameter(view, requires_grad=False))

    def _wrap(self, block: TransformerBlock, place: int) -> None:
        inner = block.flat

        def flat(*arguments: Any) -> tuple[Tensor, Tensor]:
            self._await(place)
            out = inner(*arguments)
            if self._prefetch:
                self._start(self._next(place))
            return out

        block.flat = flat  # type: ignore[assignment,method-assign]

    def _next(self, place: int) -> int:
        """Who uses the slot of this layer after it."""
        after = place + self._slots
        return after if after < len(self.layers) else place % self._slots

    def _start(self, place: int) -> None:
        self._holds[place % self._slots] = place
        self._coming[place] = self._pool.submit(self._copy, place)

    def _await(self, place: int) -> None:
        if place not in self._coming:
            self._start(place)
        self._coming.pop(place).result()
        assert self._holds[place % self._slots] == place

    def _copy(self, place: int) -> None:
        import torch

        began = self._clock()
        with torch.inference_mode():
            self._arena[place % self._slots].copy_(self._elsewhere[place])
        self.copies += 1
        if self._bytes_per_s is not None:
            left = began + self.layer_bytes / self._bytes_per_s - self._clock()
            if left > 0:
                self._sleep(left)


def _linears(block: TransformerBlock) -> list[DispatchedLinear]:
    """The matrices of a block, which are nearly all of it.

    Raises:
        ConfigError: they are packed, of experts, or not in the memory of the host.
    """
    from shoal.model.feedforward import SwiGLU
    from shoal.model.linear import DispatchedLinear

    linears = [module for module in block.modules() if isinstance(module, DispatchedLinear)]
    whole = isinstance(block.mlp, SwiGLU) and len(linears) == 4
    require(
        whole and not linears[0].kept().is_cuda,
        "memory.peer",
        type(block.mlp).__name__,
        expected="a dense model with plain weights, on a CPU",
        hint="memory = resident keeps all layers where they are computed",
    )
    return linears


def _flat(weight: Tensor) -> Tensor:
    """A matrix as it lies in memory, a copy."""
    whole = weight if weight.is_contiguous() else weight.t()
    return whole.detach().clone().view(-1)
