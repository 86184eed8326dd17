"""A window of blocks on the device that moves along a chain.

A block's weights lie on the host in one piece; those of the blocks in the window lie in the
device's tier too, brought there by a mover while other blocks are computed. The window knows
nothing of models: the code that runs the blocks reports where the run is.

What autograd keeps of a weight for the backward pass is not the weight but its place in its block
(:meth:`Window.place`), so a block that comes back to another address is found there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.errors import TierFullError
from shoal.memory.activations.protocol import weight_of_cast
from shoal.memory.tiers.mover import EmulatedLink, Mover, Ticket, end_of_work
from shoal.memory.tiers.tier import BudgetedTier, TierBlock

if TYPE_CHECKING:
    from shoal.memory.streaming.chain import BlockChain

_ALIGNMENT = 64  # bytes: as torch aligns tensors, so that kernels take the same path


class BlockView(NamedTuple):
    """A view of a block's weights, wherever the block lies.

    Args:
        offset: bytes from its beginning.
        dtype: of the view.
        shape: of the view.
        stride: of the view, in elements.
        cast: it is no view, but one of a copy in this dtype, as autocast makes them: of what
            lies there, the part that begins at so many elements and has this shape and stride.
    """

    block: int
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    cast: tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(slots=True)
class WindowStats:
    """What a window has done.

    Args:
        loads: blocks brought to the device.
        loaded_bytes: their bytes.
        stall_s: s for which a block that was to run was waited for.
        out_of_turn: blocks that were needed where the window was not.
        written_back: blocks that were changed on the device and copied home.
        gradient_bytes: bytes of gradients taken home.
    """

    loads: int = 0
    loaded_bytes: int = 0
    stall_s: float = 0.0
    out_of_turn: int = 0
    written_back: int = 0
    gradient_bytes: int = 0


def packed_bytes(parameters: Iterable[Tensor]) -> int:
    """Bytes of a block whose weights lie behind each other."""
    return sum(-(-p.nbytes // _ALIGNMENT) * _ALIGNMENT for p in parameters)


class HostBlock:
    """The weights of one block on the host, in one piece.

    Args:
        parameters: they lie here from now on.
        pinned: in memory that a GPU can read by itself.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], *, pinned: bool) -> None:
        self.parameters = tuple(parameters)
        self.nbytes = packed_bytes(parameters)
        whole = torch.empty(self.nbytes + _ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
        first = -whole.data_ptr() % _ALIGNMENT
        self.flat = whole[first : first + self.nbytes]
        self.offsets: list[int] = []
        self.strides: list[tuple[int, ...]] = []
        self.views: list[Tensor] = []
        place = 0
        for parameter in self.parameters:
            flat = self.flat[place : place + parameter.nbytes].view(parameter.dtype)
            stride = _dense_stride(parameter)
            view = flat.as_strided(parameter.shape, stride, flat.storage_offset())
            view.copy_(parameter.detach())
            parameter.data = view
            self.offsets.append(place)
            self.strides.append(stride)
            self.views.append(view)
            place += -(-parameter.nbytes // _ALIGNMENT) * _ALIGNMENT
        # Gradients that came home during the backward pass that runs now.
        self.gradients: list[Tensor | None] = [None] * len(self.parameters)
        self.pinned = pinned

    @property
    def version(self) -> int:
        """Changes whenever a weight is written."""
        return sum(parameter._version for parameter in self.parameters)

    def add(self, index: int, gradient: Tensor) -> None:
        """Add what the device computed to the gradient of a weight."""
        held = self.gradients[index]
        if held is None:
            held = torch.empty_like(gradient, device="cpu", pin_memory=self.pinned)
            self.gradients[index] = held.copy_(gradient)
        else:
            held.add_(gradient.to(held.device))


@dataclass(slots=True)
class _Slot:
    """A block on the device."""

    block: TierBlock
    views: list[Tensor]
    ticket: Ticket
    version: int
    users: int = 0
    waited: bool = False


class Window:
    """A limited number of consecutive blocks on the device.

    Args:
        chain: the blocks; their weights move to the host's side of the window.
        tier: the device.
        link: holds loads to a rate; gradients have a link of that rate for the other way.
        overlap: blocks come while others run; otherwise a window that moves is waited for, which
            is what overlapping is compared with.

    Attributes:
        make_room: called with the missing bytes if the device has too little memory for the next
            block.
    """

    def __init__(
        self,
        chain: BlockChain,
        tier: BudgetedTier,
        *,
        link: EmulatedLink | None = None,
        overlap: bool = True,
    ) -> None:
        self.tier, self._overlap = tier, overlap
        self.stats = WindowStats()
        with torch.inference_mode(False), torch.no_grad():
            self.homes = [
                HostBlock(each, pinned=tier.device.type == "cuda") for each in chain.streamed
            ]
        self.names = chain.names
        device = str(tier.device)
        back = None if link is None else EmulatedLink(link.bytes_per_s, link.latency_s)
        self._in = Mover("host-device", link=link, depth=2 * len(chain), device=device)
        self._out = Mover("device-host", link=back, depth=1, device=device)
        self._slots: dict[int, _Slot] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._last_use: torch.cuda.Event | None = None
        self._going: deque[Ticket] = deque()
        self.make_room: Callable[[int], None] | None = None
        self.load_s: dict[int, float] = {}

    @property
    def resident(self) -> list[int]:
        """Blocks that lie on the device or are on their way there."""
        return sorted(self._slots)

    @property
    def stale(self) -> bool:
        """Whether a block on the device is no longer as it is at home."""
        return any(slot.version != self.homes[b].version for b, slot in self._slots.items())

    def move(self, wanted: Sequence[int], *, leaving: Iterable[int] = ()) -> None:
        """Let blocks go and others come.

        Args:
            wanted: the window from now on, in the order in which it is needed.
            leaving: blocks that go even if they are wanted: they have to come again.
        """
        try:
            self._replace(wanted, set(wanted) - set(leaving))
        except TierFullError:
            # Blocks of different sizes that stayed left no hole that is large enough. With none
            # of them there the whole window finds room.
            self._replace(wanted, set())
        for number in () if self._overlap else wanted:
            self._there(number)

    def _replace(self, wanted: Sequence[int], keep: set[int]) -> None:
        for number in self.resident:
            if number not in keep and not self._slots[number].users:
                self.drop(number)
        for number in wanted:
            self.load(number)

    def load(self, number: int) -> None:
        """Start bringing a block, unless it is there as it is at home."""
        slot = self._slots.get(number)
        home = self.homes[number]
        if slot is not None:
            if slot.users or slot.version == home.version:
                return
            self.drop(number)
        if home.nbytes > self.tier.room and self.make_room is not None:
            self.make_room(home.nbytes)
        block = self.tier.alloc(home.nbytes, self.names[number])
        event = self._last_use
        target = self._bytes(block, home.nbytes)

        def work() -> None:
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
            target.copy_(home.flat)

        ticket = self._in.submit(work, home.nbytes)
        self._slots[number] = _Slot(block, self._views_of(number, block), ticket, home.version)
        self.stats.loads += 1
        self.stats.loaded_bytes += home.nbytes

    def drop(self, number: int) -> None:
        """Give a block's place on the device back."""
        slot = self._slots.pop(number)
        self._last_use = end_of_work(self.tier.device)
        self.tier.free(slot.block)

    def drop_all(self) -> None:
        """Give all places back."""
        for number in self.resident:
            self.drop(number)

    def enter(self, number: int) -> None:
        """Let a block's parameters be those on the device.

        Raises:
            ShoalError: it could not be loaded.
        """
        slot = self._there(number)
        slot.users += 1
        if slot.users == 1:
            for parameter, view in zip(self.homes[number].parameters, slot.views, strict=True):
                parameter.data = view

    def leave(self, number: int) -> None:
        """Let them be those on the host again; what was written on the device is taken home."""
        slot, home = self._slots[number], self.homes[number]
        slot.users -= 1
        if slot.users:
            return
        for parameter, view in zip(home.parameters, home.views, strict=True):
            parameter.data = view
        if home.version != slot.version:
            views = slot.views

            def work() -> None:
                for view, own in zip(views, home.views, strict=True):
                    own.copy_(view)

            self._out.submit(work, home.nbytes).wait()
            slot.version = home.version
            self.stats.written_back += 1

    def place(self, tensor: Tensor) -> BlockView | None:
        """Where in which block a tensor lies; None if it is no part of one."""
        if tensor.untyped_storage()._cdata != self.tier.storage._cdata:
            weight = weight_of_cast(tensor)
            source = None if weight is None else self.place(weight)
            if source is None:
                return None
            part = (int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
            return source._replace(cast=(tensor.dtype, *part))
        address = tensor.data_ptr()
        for number, slot in self._slots.items():
            if slot.users:
                offset = address - slot.views[0].data_ptr()
                if 0 <= offset < self.homes[number].nbytes:
                    shape, stride = tuple(tensor.shape), tensor.stride()
                    return BlockView(number, offset, tensor.dtype, shape, stride)
        return None

    def at(self, place: BlockView) -> Tensor:
        """The tensor at a place, now."""
        block = self._there(place.block).block
        with torch.inference_mode(False), torch.no_grad():
            result = _view(self.tier, block, place.offset, place.dtype, place.shape, place.stride)
            if place.cast is None:
                return result
            dtype, offset, shape, stride = place.cast
            return result.to(dtype).as_strided(shape, stride, offset)

    def set_gradients_aside(self) -> None:
        """Before a backward pass: gradients so far are on the host, those to come are not."""
        for home in self.homes:
            for index, parameter in enumerate(home.parameters):
                home.gradients[index], parameter.grad = parameter.grad, None

    def take_gradients(self, numbers: Iterable[int]) -> None:
        """Start bringing the gradients of blocks that are through home."""
        for number in numbers:
            home = self.homes[number]
            made = [(i, p.grad) for i, p in enumerate(home.parameters) if p.grad is not None]
            if not made:
                continue
            for parameter in home.parameters:
                parameter.grad = None
            nbytes = sum(gradient.nbytes for _, gradient in made)
            ready = end_of_work(self.tier.device)

            def work(
                home: HostBlock = home,
                made: list[tuple[int, Tensor]] = made,
                ready: torch.cuda.Event | None = ready,
            ) -> None:
                if ready is not None:
                    ready.synchronize()
                while made:
                    home.add(*made.pop())

            self._going.append(self._out.submit(work, nbytes))
            self.stats.gradient_bytes += nbytes

    def wait_for_gradients(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Wait for gradients on their way home, one by one, until what they leave is enough."""
        while self._going and not enough():
            self._going.popleft().wait()

    def give_gradients(self, *, failed: bool = False) -> None:
        """After a backward pass: all gradients are home and are the parameters'.

        Of a pass that failed there are none, since it is unknown which are whole.
        """
        self.take_gradients(range(len(self.homes)))
        self.wait_for_gradients()
        for home in self.homes:
            if failed:
                home.gradients = [None] * len(home.parameters)
            for index, parameter in enumerate(home.parameters):
                parameter.grad, home.gradients[index] = home.gradients[index], None

    def close(self) -> None:
        """End the movers; the weights are those on the host."""
        self.drop_all()
        self._in.close()
        self._out.close()

    def _there(self, number: int) -> _Slot:
        """A block that is on the device when this returns."""
        self.load(number)
        slot = self._slots[number]
        if not slot.waited:
            begin = time.perf_counter()
            slot.ticket.wait()
            self.stats.stall_s += time.perf_counter() - begin
            self.load_s[number] = slot.ticket.seconds
            slot.waited = True
        return slot

    def _bytes(self, block: TierBlock, nbytes: int) -> Tensor:
        with torch.inference_mode(False):
            return self.tier.view(block, torch.uint8, (nbytes,))

    def _views_of(self, number: int, block: TierBlock) -> list[Tensor]:
        """A block's weights where it comes to lie; made once for every place."""
        key = (number, block.start)
        if key not in self._views:
            home = self.homes[number]
            with torch.inference_mode(False):
                self._views[key] = [
                    _view(self.tier, block, offset, p.dtype, p.shape, stride)
                    for offset, p, stride in zip(
                        home.offsets, home.parameters, home.strides, strict=True
                    )
                ]
        return self._views[key]


def _view(
    tier: BudgetedTier,
    block: TierBlock,
    offset: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """A tensor in a block, with versions of its own."""
    whole = tier.view(TierBlock(block.start + offset, 0, block.tag), dtype, (0,))
    return whole.as_strided(shape, stride, whole.storage_offset())


def _dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """How a tensor lies in memory, if it fills it; as it would lie, if it does not."""
    filled = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda x: x[1]):
        if size > 1 and stride != filled:
            return torch.empty(tensor.shape, device="meta").stride()
        filled *= size
    return tensor.stride()


def pin(
    tensors: Iterable[tuple[str, Tensor]], tier: BudgetedTier
) -> dict[str, tuple[Tensor, TierBlock]]:
    """Bring tensors to a tier for good; what they were before, by name.

    Raises:
        TierFullError: there is no room.
    """
    result: dict[str, tuple[Tensor, TierBlock]] = {}
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in tensors:
            block = tier.alloc(tensor.nbytes, name)
            before = tensor.data
            view = _view(tier, block, 0, tensor.dtype, tensor.shape, _dense_stride(tensor))
            tensor.data = view.copy_(before)
            result[name] = (before, block)
    return result
