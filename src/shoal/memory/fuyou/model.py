"""A model whose optimizer works while the backward pass goes on, as engine and loop see it.

Step 0 keeps of every unit its input alone and shows which operators it has. Step 1 probes the links
while nothing else uses them, sends all results away and is measured. From step 2 on as much is sent
as makes a step shortest.

Source: Liao et al., Fuyou, 2024, section 4.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from shoal.core.errors import ConfigError, ModelError
from shoal.memory.activations.offloaded import LEAST
from shoal.memory.streaming.offloaded import OffloadedModel
from shoal.memory.tiers.links import rates_of
from shoal.plan.memory.swap import SwapIteration, Swappable, Times, choose, curve
from shoal.plan.memory.swap import SwapTensor as Swapped

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.ir.comm import Comm
    from shoal.memory.fuyou.stream import ConsumedGroups, ConsumedStream
    from shoal.memory.tiers.offloaded_parameter import OffloadedParameter
    from shoal.memory.tiers.places import Tiers


class FuyouModel(OffloadedModel):
    """See :class:`~shoal.memory.protocols.TieredModel`; the factor of a step is given before it.

    Attributes:
        iteration: the measured times; None before the end of step 1.
        ordered: what can be swapped, in order of what it is worth.
        chosen: what the steps since are expected to take.
    """

    stream: ConsumedStream

    def __init__(
        self,
        model: nn.Module,
        homes: Sequence[OffloadedParameter],
        tiers: Tiers,
        stream: ConsumedStream,
        update: ConsumedGroups,
        comm: Comm,
        swap: Literal["auto", "all", "none"] | int,
    ) -> None:
        super().__init__(model, homes, tiers, stream, update, comm)
        self._swap = swap
        self._rates: dict[str, float] = {}
        self._trained = 0
        self._always = 0
        self._free_host = tiers.host.capacity - tiers.host.stats.used
        self.iteration: SwapIteration | None = None
        self.ordered: Swappable | None = None
        self.chosen: Times | None = None
        self._told = False

    def begin(self, factor: float, ready: Callable[[], None] | None = None) -> None:
        """A step begins; see :class:`~shoal.memory.protocols.EarlyUpdater`."""
        self.stream.factor, self.stream.ready = factor, ready

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
        if self._trained == 1:
            stream.updated()
            self._rates = rates_of(self.tiers)
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
            requests = {"all": self.ordered.nbytes[-1], "none": 0}
            self.use(requests[self._swap] if isinstance(self._swap, str) else self._swap)

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

    def choice(self) -> dict[str, object] | None:
        """What is sent away from now on, and what other amounts would come to; said once."""
        if self._told or self.chosen is None or self.iteration is None or self.ordered is None:
            return None
        self._told = True
        chosen = self.chosen
        points = curve(self.iteration, self.ordered)
        return {
            "swapped_bytes": chosen.swapped,
            "spilled_bytes": chosen.spilled,
            "again_s": chosen.again_s,
            "predicted_s": chosen.seconds,
            "binds": list(chosen.binds),
            "bytes_per_s": dict(self._rates),
            "curve": [[one.swapped, one.seconds] for one in points],
        }

    def _measured(self) -> SwapIteration:
        """What step 1 has shown."""
        stream = self.stream
        consumer = stream.consumer
        trained = [home for home in stream.homes if home.gradient is not None]
        gradients = sum(home.weight_bytes for home in trained)
        numel = sum(home.cut.numel for home in trained)
        words = 1 + max((len(home.states) for home in trained), default=0)
        rounds = max(1, stream.replay.rounds)
        return SwapIteration(
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
