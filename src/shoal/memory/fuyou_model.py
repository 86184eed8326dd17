"""A model whose optimizer works while the backward pass goes on, as engine and loop see it.

Parameters stream as in :mod:`shoal.memory.stream`. A gradient of the last micro-batch goes into
memory that the optimizer's process has too, and is consumed there; whoever reads the parameter
next waits until it is written. Step 0 keeps of every unit its input alone and shows which
operators it has, step 1 sends all of their results away and is measured, and from step 2 on as
much is sent as makes a step shortest.

Source: Liao et al., Fuyou, 2024, section 4.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, ModelError, TierFullError
from shoal.core.sizes import human_bytes
from shoal.machine.host import memory_total
from shoal.memory.activation import in_backward
from shoal.memory.build import Wanted, check_device, move
from shoal.memory.consumer import Consumer, held_bytes
from shoal.memory.disk import SECTOR, staging
from shoal.memory.fuyou_needs import PROBED, staged_bytes
from shoal.memory.home import Cut, Home
from shoal.memory.needs import BOUNCE, BOUNCED, INCOMING, OUTGOING, Staging
from shoal.memory.offloaded import OffloadedModel
from shoal.memory.optimizer_process import Place
from shoal.memory.readahead import ReadAhead, UpdatedRow
from shoal.memory.replay import Replay, units_of
from shoal.memory.stream import Stream
from shoal.memory.subgroups import SubGroups, elementwise
from shoal.memory.swapping import LEAST, Swapping
from shoal.memory.tiers import DiskRow, Ring, Tiers
from shoal.plan.swap import Iteration, Swappable, Times, choose
from shoal.plan.swap import Tensor as Swapped

if TYPE_CHECKING:
    from shoal.ir.comm import Comm
    from shoal.memory.mover import EmulatedLink, Mover, Ticket
    from shoal.memory.subgroups import Elementwise

__all__ = ["FuyouModel", "WantedSwap", "fuyou_model"]

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class WantedSwap:
    """Where everything should be.

    Args:
        device_bytes: budget of the device.
        host_bytes: budget of the host; None for three quarters of it.
        sub_group_numel: most elements updated at once.
        prefetch_numel: elements of parameters fetched ahead.
        swap: bytes of a micro-batch that are sent away; auto for what makes a step shortest.
        swap_bytes: of the disk, for what is sent away.
        path: directory of the disk's file.
        disk_links: hold reading and writing of the disk to a rate.
        strict: operators may only use what lies on the device.
    """

    device_bytes: int
    host_bytes: int | None
    sub_group_numel: int
    prefetch_numel: int
    swap: Literal["auto", "all", "none"] | int
    swap_bytes: int
    path: Path
    disk_links: tuple[EmulatedLink | None, EmulatedLink | None] = (None, None)
    strict: bool = True


class _Stream(Stream):
    """Gives the gradients of a step to the optimizer, and takes the time of its passes.

    Attributes:
        consumer: of gradients.
        swapping: of what passes save.
        replay: of blocks.
        factor: of the learning rate of this step; None while none is known.
        seconds: that the device computed in the passes.
        fetched: bytes of parameters that were read for them.
        throttled_s: seconds for which gradients waited to leave.
    """

    consumer: Consumer
    swapping: Swapping
    replay: Replay

    def prepare(
        self, consumer: Consumer, swapping: Swapping, replay: Replay, early: ReadAhead
    ) -> None:
        """Give it what it works with."""
        self.consumer, self.swapping, self.replay = consumer, swapping, replay
        self.early = early
        self._waiting = swapping
        self.factor: float | None = None
        self.pending: dict[str, list[Ticket]] = {home.name: [] for home in self.homes}
        self._numbers = {home.name: at for at, home in enumerate(self.homes)}
        self.throttled_s = 0.0
        self._phase: Phase | None = None
        self._since = self._waits = 0.0
        self.restart()

    # Times.

    def restart(self) -> None:
        """Forget what was counted."""
        self.seconds: dict[Phase, float] = {"forward": 0.0, "backward": 0.0}
        self.fetched: dict[Phase, int] = {"forward": 0, "backward": 0}

    def switch(self, phase: Phase | None) -> None:
        """From now on it is another pass."""
        if phase == self._phase:
            return
        now = time.perf_counter()
        waits = self.waited_s + self.swapping.waited_s + self.throttled_s
        if self._phase is not None:
            self.seconds[self._phase] += now - self._since - (waits - self._waits)
        self._phase, self._since, self._waits = phase, now, waits
        if phase == "forward" and self.replay.active:
            self.replay.begin()

    @contextlib.contextmanager
    def passes(self, name: str, *inputs: Tensor | None) -> Iterator[None]:
        """See :class:`Stream`; those of a step are timed, and their blocks computed again."""
        with super().passes(name, *inputs):
            self.replay.active = name == "train"
            try:
                self.switch("forward")
                yield
            finally:
                self.replay.active = False
                self.switch(None)

    def _enter(self, homes: list[Home], module: nn.Module, args: Any) -> None:
        if self.replay.active and not in_backward():
            self.switch("forward")
        with self.replay.aside():
            super()._enter(homes, module, args)

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        with self.replay.aside():
            super()._leave(module, args, out)

    def _touched(self, parameter: Tensor) -> None:
        with self.replay.aside():
            super()._touched(parameter)

    def _unpack(self, packed: Any) -> Tensor:
        if self.replay.active:
            self.switch("backward")
        return super()._unpack(packed)

    def _start(self, home: Home) -> None:
        if self._phase is not None:
            self.fetched[self._phase] += home.weight_bytes
        super()._start(home)
        self.early.taken(home)

    def _ahead(self) -> None:
        super()._ahead()
        assert self._trace is not None
        self.early.want(self._trace.upcoming())

    def drop_all(self) -> None:
        """Leave nothing on the device, and nothing that was read ahead."""
        super().drop_all()
        self.early.drop()

    def _spare(self) -> int:
        return super()._spare() - self.swapping.reserve

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the memory of a parameter."""
        return tensor.untyped_storage()._cdata in self._by_storage

    # Gradients.

    def _received(self, home: Home, parameter: Tensor) -> None:
        begin, before = time.perf_counter(), self.waited_s
        super()._received(home, parameter)
        self.throttled_s += time.perf_counter() - begin - (self.waited_s - before)

    def _copy_down(self, home: Home, part: Tensor, first: int, fresh: bool) -> Ticket:
        if not self.last:
            return super()._copy_down(home, part, first, fresh)
        count, found = part.numel(), list[int]()

        def down() -> None:
            slot = self.consumer.slot()
            self.consumer.gradient(slot, count, part.dtype).copy_(part)
            if fresh:
                self._consume(home, first, count, slot)
            else:
                found.append(slot)

        leaving = self.tiers.down.submit(down, part.nbytes)
        if not fresh:

            def add() -> None:
                leaving.wait()
                slot = found.pop()
                second = self._scratch.get()
                try:
                    values = self.consumer.gradient(slot, count, home.dtype)
                    assert home.gradient is not None
                    values.add_(home.gradient.take(first, count, second))
                finally:
                    self._scratch.put(second)
                self._consume(home, first, count, slot)

            self._writing.append(self.tiers.write.submit(add, part.nbytes))
        return leaving

    def _consume(self, home: Home, first: int, count: int, slot: int) -> None:
        """In the thread of a mover: a piece of a gradient is whole, and is used at once."""
        home.measure(first, self.consumer.gradient(slot, count, home.dtype))
        self.order(home, first, count, slot)

    def order(self, home: Home, first: int, count: int, slot: int) -> None:
        """Have a piece updated; -1 is a gradient of zeros."""
        assert self.factor is not None
        pending = self.pending[home.name]
        if not first:
            pending.clear()  # what was there is over: the parameter has been read since
        number = self._numbers[home.name]
        pending.append(
            self.consumer.update(number, first, count, slot, step=home.steps, factor=self.factor)
        )


class _Consumed(SubGroups):
    """The state of what is consumed elsewhere; see :class:`SubGroups`."""

    stream: _Stream

    def step(self, factor: float) -> None:
        """The end of a step: what had no gradient is updated by zeros."""
        stream = self.stream
        if factor != stream.factor:
            raise ModelError(
                f"offload: fuyou updates in the backward pass, with the factor {stream.factor} "
                f"that begin told it, and the step ends with {factor}; tell it before"
            )
        for home in self.homes:
            if home.fresh:
                for ticket in stream.pending[home.name]:
                    ticket.wait()
                for first, count in self.pieces_of(home):
                    stream.order(home, first, count, -1)
            home.steps += 1
            home.fresh = True
        stream.factor = None


class FuyouModel(OffloadedModel):
    """See :class:`~shoal.memory.protocols.Offloaded`; the factor of a step is told before it.

    Attributes:
        iteration: what was measured; None until step 1 is over.
        ordered: what can be swapped, in order of what it is worth.
        chosen: what the steps since are expected to take.
    """

    stream: _Stream

    def __init__(
        self,
        model: nn.Module,
        homes: Sequence[Home],
        tiers: Tiers,
        stream: _Stream,
        update: _Consumed,
        comm: Comm,
        swap: Literal["auto", "all", "none"] | int,
        rates: Mapping[str, float],
    ) -> None:
        super().__init__(model, homes, tiers, stream, update, comm)
        self._swap, self._rates = swap, rates
        self._trained = 0
        self._always = 0
        self._free_host = tiers.host.capacity - tiers.host.stats.used
        self.iteration: Iteration | None = None
        self.ordered: Swappable | None = None
        self.chosen: Times | None = None

    def begin(self, factor: float) -> None:
        """A step begins, whose update has this factor of the learning rate."""
        self.stream.factor = factor

    @contextlib.contextmanager
    def passes(self, name: str, *inputs: Tensor | None) -> Iterator[None]:
        """Around all passes of a step, or of one that scores; ``inputs`` come from outside."""
        stream = self.stream
        stream.consumer.check()
        if name != "train":
            with stream.passes(name, *inputs):
                yield
            return
        if stream.factor is None:
            raise ModelError(
                "offload: fuyou updates in the backward pass; call begin(factor) before it"
            )
        stream.restart()
        replay = stream.replay
        replay.measuring, replay.rounds = self._trained == 1, 0
        with stream.passes(name, *inputs):
            yield
        if self._trained == 0:
            self._always = stream.swapping.sent
            self._send_all()
        elif self._trained == 1:
            self._choose()
        self._trained += 1

    @contextlib.contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one backward pass."""
        self.stream.last = last
        yield
        self.stream.switch(None)

    def _movable(self) -> list[tuple[int, int]]:
        """(unit, operator) of all whose results can be sent away."""
        return [
            (unit, number)
            for unit, operators in enumerate(self.stream.replay.operators)
            for number, one in enumerate(operators)
            if one.movable and one.again and one.nbytes >= LEAST
        ]

    def _send(self, chosen: Sequence[tuple[int, int]], to_disk: float) -> None:
        replay = self.stream.replay
        for unit in range(len(replay.operators)):
            replay.chosen[unit] = frozenset(n for at, n in chosen if at == unit)
        self.stream.swapping.to_disk = to_disk
        self.stream.swapping.restart()

    def _send_all(self) -> None:
        """The step that is measured sends all away, and as far as it goes."""
        self._send(self._movable(), float("inf"))

    def _choose(self) -> None:
        """From now on as much is sent away as makes a step shortest, or as was asked for."""
        movable, replay = self._movable(), self.stream.replay
        seconds = replay.seconds()
        tensors = [
            Swapped(nbytes=replay.operators[unit][n].nbytes, again_s=seconds[unit][n])
            for unit, n in movable
        ]
        self.iteration, self.ordered = self._measured(), Swappable(tensors)
        if self._swap == "auto":
            count, _ = choose(self.iteration, self.ordered)
            self.use(self.ordered.nbytes[count])
        else:
            asked = {"all": self.ordered.nbytes[-1], "none": 0}
            self.use(asked[self._swap] if isinstance(self._swap, str) else self._swap)

    def use(self, nbytes: float) -> Times:
        """Send so many bytes away from the next step on; what it is expected to take.

        Raises:
            ModelError: no step has been measured yet.
        """
        if self.iteration is None or self.ordered is None:
            raise ModelError("offload: fuyou knows what to send away after two steps")
        count, movable = self.ordered.first(nbytes), self._movable()
        times = self.iteration.times(self.ordered.nbytes[count], self.ordered.again_s[count])
        self._send([movable[n] for n in self.ordered.order[:count]], times.spilled)
        self.chosen = times
        return times

    def _measured(self) -> Iteration:
        """What step 1 has shown."""
        stream = self.stream
        consumer = stream.consumer
        trained = [home for home in stream.homes if home.gradient is not None]
        gradients = sum(home.weight_bytes for home in trained)
        numel = sum(home.cut.numel for home in trained)
        words = 1 + max((len(home.states) for home in trained), default=0)
        rounds = max(1, stream.replay.rounds)
        return Iteration(
            forward_s=max(0.0, stream.seconds["forward"]) / rounds,
            backward_s=max(0.0, stream.seconds["backward"]) / rounds,
            forward_fetched=stream.fetched["forward"] / rounds,
            backward_fetched=stream.fetched["backward"] / rounds,
            gradients=gradients,
            optimizer_read=gradients * words,
            optimizer_written=gradients * words,
            update_s=numel * consumer.update_s / max(1, consumer.updated),
            always=self._always,
            free_host=self._free_host,
            **self._rates,
            before=rounds - 1,
        )

    def scale_gradients(self, factor: Tensor) -> None:
        """Refused: gradients have been used.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "offload: fuyou has used a gradient before the norm of all is known; use grad_clip: 0"
        )

    def close(self) -> None:
        """End the optimizer's process and the movers, and give the disk back."""
        self.stream.consumer.close()
        self.tiers.close()


def fuyou_model(
    model: nn.Module,
    comm: Comm,
    optimizer: object,
    wanted: WantedSwap,
    *,
    device: torch.device | str,
    values: Callable[[str], Tensor] | None,
) -> FuyouModel:
    """Move a model's state to the disk, and start the process that updates it.

    Raises:
        ConfigError: the optimizer looks at several elements in its update.
        ModelError: the model has no chain of blocks.
        TierFullError: a budget is too small; says what would do.
        MachineError: the path cannot be written, or the process cannot be started.
    """
    rule = elementwise(optimizer, "offload: fuyou")
    units = units_of(model)
    named = dict(model.named_parameters())
    where = Wanted(
        device_bytes=wanted.device_bytes,
        host_bytes=wanted.host_bytes,
        param="disk",
        optim="disk",
        act="device",
        sub_group_numel=wanted.sub_group_numel,
        prefetch_numel=wanted.prefetch_numel,
        owner=False,
        path=wanted.path,
        small=0,
    )
    check_device(model, named, where, {})
    cuts = {name: Cut(tuple(p.shape), comm.rank, comm.world) for name, p in named.items()}
    itemsize = max(p.element_size() for p in named.values())
    sizes = Staging.of(max(cut.numel for cut in cuts.values()), itemsize, 0, wanted.sub_group_numel)
    piece = sizes.sub_group
    shared = held_bytes(piece, itemsize, len(rule.states))
    numels = [cut.numel for cut in cuts.values()]
    need = staged_bytes(
        numels, itemsize, len(rule.states), wanted.sub_group_numel, wanted.prefetch_numel
    )
    buffers = -(-min(wanted.prefetch_numel, sum(numels)) * itemsize // sizes.incoming)
    host_bytes = wanted.host_bytes or max(need, memory_total() * 3 // 4)
    if need > host_bytes:
        raise TierFullError(
            f"offload: staging buffers take {human_bytes(need)} and host_budget is "
            f"{human_bytes(host_bytes)}; give more, or a smaller sub_group_numel"
        )
    rows = sum(-(-p.nbytes // SECTOR) * SECTOR for p in named.values())
    tiers = Tiers(
        device=device,
        device_bytes=wanted.device_bytes,
        host_bytes=host_bytes,
        disk_bytes=rows * (2 + len(rule.states)) + wanted.swap_bytes,
        path=wanted.path,
        strict=wanted.strict,
        disk_links=wanted.disk_links,
    )
    try:
        tiers.host.reserve(shared, "gradients and state in work")
        incoming = Ring(tiers.host, INCOMING, sizes.incoming, "staged parameters")
        homes = [
            move(model, name, cut, rule, tiers, where, incoming, values)
            for name, cut in cuts.items()
        ]
        stream = _Stream(
            model,
            homes,
            tiers,
            None,
            incoming=incoming,
            outgoing=Ring(tiers.host, OUTGOING, piece * itemsize, "staged gradients"),
            scratch=Ring(tiers.host, 1, piece * itemsize, "staged gradients"),
            prefetch_numel=wanted.prefetch_numel,
        )
        swapping = Swapping(
            tiers,
            stream._spare,
            Ring(tiers.host, BOUNCED, BOUNCE, "saved, on its way to the disk"),
            Ring(tiers.host, BOUNCED, BOUNCE, "saved, on its way from the disk"),
        )
        for buffer in model.buffers():
            buffer.data = tiers.scope.adopt(buffer.data.to(tiers.device.device), "buffer")
        ahead = Ring(tiers.host, buffers, sizes.incoming, "parameters read ahead")
        rates = _rates(tiers)
        consumer = _consumer(homes, rule, tiers, piece, itemsize)
    except BaseException:
        tiers.close()
        raise
    early = ReadAhead(ahead, buffers, tiers.read)
    stream.prepare(consumer, swapping, Replay(units, swapping, stream.is_weight), early)
    for home in homes:
        pending = stream.pending[home.name]
        home.weight = UpdatedRow(home.weight, pending)
        home.states = {name: UpdatedRow(row, pending) for name, row in home.states.items()}
    update = _Consumed(homes, rule, tiers, piece, incoming)
    update.stream = stream
    return FuyouModel(model, homes, tiers, stream, update, comm, wanted.swap, rates)


def _consumer(
    homes: Sequence[Home], rule: Elementwise, tiers: Tiers, numel: int, itemsize: int
) -> Consumer:
    """Start the process that updates."""
    assert tiers.disk is not None
    places = []
    for home in homes:
        rows = {"weight": home.weight, **home.states}
        blocks = {name: row.block for name, row in rows.items() if isinstance(row, DiskRow)}
        weight = blocks.pop("weight")
        places.append(Place(weight, blocks, home.dtype, len(home.cut.shape) >= 2))
    return Consumer(
        rule,
        places,
        tiers.disk,
        numel=numel,
        itemsize=itemsize,
        # The trainer's thread has a core of its own.
        threads=max(1, (os.cpu_count() or 2) - 1),
    )


def _rates(tiers: Tiers) -> dict[str, float]:
    """Bytes per second of the four ways, each by itself."""
    disk, device = tiers.disk, tiers.device.device
    assert disk is not None
    block = disk.alloc(PROBED * BOUNCE, "probe")
    here, there = staging(BOUNCE).fill_(1), torch.ones(BOUNCE, dtype=torch.uint8, device=device)
    found = {}

    def copy(source: Tensor, target: Tensor, at: int) -> None:
        target.copy_(source)

    ways: list[tuple[str, Mover, Callable[[int], None]]] = [
        ("write", tiers.write, functools.partial(disk.write, block, here)),
        ("read", tiers.read, functools.partial(disk.read, block, here)),
        ("down", tiers.down, functools.partial(copy, there, here)),
        ("up", tiers.up, functools.partial(copy, here, there)),
    ]
    for name, mover, work in ways:
        begin = time.perf_counter()
        for number in range(PROBED):
            last = mover.submit(functools.partial(work, number * BOUNCE), BOUNCE)
        last.wait()
        found[name] = PROBED * BOUNCE / (time.perf_counter() - begin)
    disk.free(block)
    return found
