"""Parameters that stream, and gradients that another process uses as they come.

A gradient of the last micro-batch goes into memory that the optimizer's process has too, and is
consumed there; the parameter's next reader waits until it is written. Beside that, the passes
are timed.

Source: Liao et al., Fuyou, 2024, section 4.3 (active gradient offloading).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from shoal.core.errors import ModelError
from shoal.memory.activations.protocol import in_backward
from shoal.memory.streaming.stream import ParameterStream
from shoal.memory.streaming.subgroups import SubGroups

if TYPE_CHECKING:
    from torch import nn

    from shoal.memory.activations.replay import ActivationReplay
    from shoal.memory.activations.swapping import ActivationSwapping
    from shoal.memory.fuyou.consumer import Consumer
    from shoal.memory.tiers.mover import Ticket
    from shoal.memory.tiers.offloaded_parameter import OffloadedParameter
    from shoal.memory.tiers.readahead import DiskReadAhead

Phase = Literal["forward", "backward"]


class ConsumedStream(ParameterStream):
    """Passes the gradients of a step to the optimizer, and times its passes.

    Attributes:
        consumer: of gradients.
        swapping: of what passes save.
        replay: of blocks.
        factor: of the learning rate of this step; None while none is known.
        ready: returns when parameters may change; None where they always may.
        seconds: that the device computed in the passes.
        fetched: bytes of parameters that were read for them.
        throttled_s: seconds for which gradients waited to leave.
    """

    consumer: Consumer
    swapping: ActivationSwapping
    replay: ActivationReplay

    def prepare(
        self,
        consumer: Consumer,
        swapping: ActivationSwapping,
        replay: ActivationReplay,
        early: DiskReadAhead,
    ) -> None:
        """Give it what it works with."""
        self.consumer, self.swapping, self.replay = consumer, swapping, replay
        self.early = early
        self._waiting = swapping
        self.factor: float | None = None
        self.ready: Callable[[], None] | None = None
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
        """See :class:`ParameterStream`; steps are timed, and their blocks computed again."""
        with super().passes(name, *inputs):
            self.replay.active = name == "train"
            try:
                self.switch("forward")
                yield
            finally:
                self.replay.active = False
                self.switch(None)

    def _enter(self, homes: list[OffloadedParameter], module: nn.Module, args: Any) -> None:
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

    def _start(self, home: OffloadedParameter) -> None:
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

    def _received(self, home: OffloadedParameter, parameter: Tensor) -> None:
        begin, before = time.perf_counter(), self.waited_s
        super()._received(home, parameter)
        self.throttled_s += time.perf_counter() - begin - (self.waited_s - before)

    def _copy_down(self, home: OffloadedParameter, part: Tensor, first: int, fresh: bool) -> Ticket:
        if not self.last:
            return super()._copy_down(home, part, first, fresh)
        if self.ready is not None:
            self.ready()  # what is still being saved lies where the update writes
        count, result = part.numel(), list[int]()

        def down() -> None:
            slot = self.consumer.slot()
            self.consumer.gradient(slot, count, part.dtype).copy_(part)
            if fresh:
                self._consume(home, first, count, slot)
            else:
                result.append(slot)

        leaving = self.tiers.down.submit(down, part.nbytes)
        if not fresh:

            def add() -> None:
                leaving.wait()
                slot = result.pop()
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

    def _consume(self, home: OffloadedParameter, first: int, count: int, slot: int) -> None:
        """In the thread of a mover: a piece of a gradient is whole, and is used at once."""
        home.measure(first, self.consumer.gradient(slot, count, home.dtype))
        self.order(home, first, count, slot)

    def order(self, home: OffloadedParameter, first: int, count: int, slot: int) -> None:
        """Have a piece updated; -1 is a gradient of zeros."""
        assert self.factor is not None
        pending = self.pending[home.name]
        if not first:
            pending.clear()  # what was there is over: the parameter has been read since
        number = self._numbers[home.name]
        pending.append(
            self.consumer.update(number, first, count, slot, step=home.steps, factor=self.factor)
        )

    def updated(self) -> None:
        """Return when everything that was given to the optimizer is written."""
        for tickets in self.pending.values():
            for ticket in tickets:
                ticket.wait()


class ConsumedGroups(SubGroups):
    """The state of what is consumed elsewhere; see :class:`SubGroups`."""

    stream: ConsumedStream

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
