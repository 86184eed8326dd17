"""An update whose state lies on the host, and whose sub-groups the host and the device share.

All parameters are one flat row of numbers, cut into sub-groups. Their fp32 values and both moments
lie on the host. In an update the host takes its sub-groups one after another and pushes the new
values to the device; meanwhile the others travel to one of two slots on the device, are updated
there, and travel back. Gradients go where their sub-group is updated, as soon as backward has them.

Two threads compute, and one moves each way; on a GPU the device's half is its own streams.

Source: Maurya et al., Deep Optimizer States, 2024.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shoal.core.errors import ConfigError, TierFullError, require
from shoal.core.sizes import human_bytes
from shoal.memory.tiers.mover import EmulatedLink, Mover, Ticket
from shoal.memory.tiers.tier import ALIGNMENT, BudgetedTier, TierBlock
from shoal.plan.memory.stride import SLOTS, UpdatePattern, UpdateRates

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.memory.streaming.subgroups import ElementwiseOptimizer


@dataclass(frozen=True, kw_only=True)
class Workers:
    """How a machine is stood in for; everything is as it is if nothing is given.

    Args:
        cores: the host's core and the device's, to which their threads are pinned.
        link: one worker per direction between host and device.
        host_rate: parameters that the host updates in a second, at most.
    """

    cores: tuple[int, int] | None = None
    link: EmulatedLink | None = None
    host_rate: float | None = None


@dataclass(frozen=True)
class _Group:
    """Numbers ``start`` to ``stop`` of the flat row, who updates them and with which decay."""

    start: int
    stop: int
    device: bool
    resident: bool

    @property
    def size(self) -> int:
        return self.stop - self.start


class InterleavedUpdater:
    """See the module; an updater as of :class:`~shoal.train.protocols.Updater`.

    Args:
        parameters: name -> tensor on the device, of any floating dtype; they are read now.
        rule: an optimizer that updates every number by itself.
        sub_group: numbers of a sub-group.
        pattern: sub-groups -> who updates them.
        device: where slots, residents and the device's gradients are counted.
        host: where the state lies.
        workers: simulated workers of the machine.

    Raises:
        ConfigError: nothing to update, or a sub-group of nothing.
        TierFullError: a tier is too small; the message has the required size.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        rule: ElementwiseOptimizer,
        *,
        sub_group: int,
        pattern: Callable[[Sequence[int]], UpdatePattern],
        device: BudgetedTier,
        host: BudgetedTier,
        workers: Workers = Workers(),
    ) -> None:
        require(sub_group >= 1, "sub_group_numel", sub_group, expected="at least 1")
        if not parameters:
            raise ConfigError("optimizer: there is no parameter to update")
        self._rule = rule
        self._words = ("value", *rule.states)
        self.steps = 0
        self.scales: list[Tensor] = []
        """What gradients are multiplied by in the next step."""
        self._parameters = dict(parameters)
        self._device, self._host, self._workers = device, host, workers
        self._dtype = _wide(next(iter(parameters.values())).dtype)
        total = sum(p.numel() for p in parameters.values())
        cuts = [(at, min(at + sub_group, total)) for at in range(0, total, sub_group)]
        self.pattern = pattern([b - a for a, b in cuts])
        owners = self.pattern.on_device()
        moving = self.pattern.groups - self.pattern.residents
        self._groups = [
            _Group(a, b, owner, number >= moving)
            for number, ((a, b), owner) in enumerate(zip(cuts, owners, strict=True))
        ]
        self._places = _places(self._parameters)
        self._slots = self._make_slots(sub_group)
        # On the host: values and moments of all but residents, gradients of the host's own.
        self._state = [self._room(g, g.resident, self._words) for g in self._groups]
        self._gradient = [self._room(g, g.device, ("gradient",))[0] for g in self._groups]
        for group, state in zip(self._groups, self._state, strict=True):
            self._gathered(group, state[0])
            for word in state[1:]:
                word.zero_()
        kind = "cpu" if device.device.type == "cpu" else str(device.device)
        rate = workers.link
        second = None if rate is None else EmulatedLink(rate.bytes_per_s, rate.latency_s)
        self._in = Mover("host-device", link=rate, depth=4 * len(self._groups) + 8, device=kind)
        self._out = Mover("device-host", link=second, depth=4 * len(self._groups) + 8, device=kind)
        self._arrived: list[list[Ticket]] = [[] for _ in self._groups]
        # The last copy of a sub-group's state back to the host, and of a slot's last guest.
        self._flushed: list[Ticket | None] = [None] * len(self._groups)
        self._left: list[Ticket | None] = [None] * SLOTS
        self.updated = [0] * len(self._groups)

    def _make_slots(self, sub_group: int) -> list[list[Tensor]]:
        """Room on the device for the sub-groups that pass through."""
        passing = [g for g in self._groups if g.device and not g.resident]
        size = max((g.size for g in passing), default=0)
        slots = []
        for number in range(min(SLOTS, len(passing))):
            try:
                blocks = [
                    self._device.alloc(self._dtype.itemsize * size, f"slot {number}")
                    for _ in self._words
                ]
            except TierFullError as cause:
                need = SLOTS * len(self._words) * self._dtype.itemsize * sub_group
                raise TierFullError(
                    f"sub_group_numel = {sub_group}: two sub-groups need {human_bytes(need)} of "
                    f"the device ({cause}); make sub-groups smaller or the device larger"
                ) from cause
            slots.append([self._device.view(one, self._dtype, (size,)) for one in blocks])
        return slots

    def _room(self, group: _Group, device: bool, words: Sequence[str]) -> list[Tensor]:
        tier = self._device if device else self._host
        blocks: list[TierBlock] = [
            tier.alloc(self._dtype.itemsize * group.size, f"{word} {group.start}-{group.stop}")
            for word in words
        ]
        return [tier.view(one, self._dtype, (group.size,)) for one in blocks]

    def take_gradients(self) -> None:
        """Move every gradient to where its sub-group is updated, and forget it here.

        Called once after a backward pass; :meth:`on_gradient` does the same for one parameter,
        while backward goes on.
        """
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                self.on_gradient(name)

    def on_gradient(self, name: str) -> None:
        """The gradient of a parameter is whole: it goes where it is needed."""
        parameter = self._parameters[name]
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        flat = gradient.reshape(-1)
        for number, group, here, there in self._overlaps(name):
            target = self._gradient[number][there]
            if group.device:
                target.copy_(flat[here])
            else:
                self._arrived[number].append(self._out.copy(flat[here], target))

    def wait_for_gradients(self, enough: Callable[[], bool]) -> None:
        """Wait for gradients on their way to the host, until what they leave is enough.

        Those of the last sub-groups come first.
        """
        for tickets in reversed(self._arrived):
            for ticket in tickets:
                if enough():
                    return
                ticket.wait()

    def gradient_of(self, name: str) -> Tensor:
        """A gradient that has left, once more on the device."""
        parameter = self._parameters[name]
        array = torch.empty(parameter.numel(), dtype=self._dtype, device=parameter.device)
        for number, _, here, there in self._overlaps(name):
            for ticket in self._arrived[number]:
                ticket.wait()
            array[here].copy_(self._gradient[number][there])
        return array.view(parameter.shape).to(parameter.dtype)

    def zero_gradients(self) -> None:
        """Make every gradient zero where it is needed."""
        for gradient in self._gradient:
            gradient.zero_()

    def step(self, factor: float = 1.0) -> None:
        """Update every sub-group once; the parameters on the device are new when it returns.

        Raises:
            ShoalError: what went wrong on the way or on the host.
        """
        self.steps += 1
        failures: list[BaseException] = []
        pushed: list[Ticket] = []
        host = threading.Thread(
            target=self._host_side, args=(factor, pushed, failures), name="host update"
        )
        host.start()
        try:
            self._device_side(factor)
        finally:
            host.join()
        for ticket in pushed:
            ticket.wait()
        self.scales.clear()
        if failures:
            raise failures[0]

    @torch.no_grad()
    def _host_side(
        self, factor: float, pushed: list[Ticket], failures: list[BaseException]
    ) -> None:
        try:
            cores = self._workers.cores
            if cores is not None:
                os.sched_setaffinity(0, {cores[0]})
                torch.set_num_threads(1)
            for number, group in enumerate(self._groups):
                if group.device:
                    continue
                for ticket in self._arrived[number]:
                    ticket.wait()
                self._arrived[number].clear()
                begin = time.perf_counter()
                self._update(number, self._state[number], self._gradient[number], factor)
                if self._workers.host_rate is not None:
                    late = begin + group.size / self._workers.host_rate - time.perf_counter()
                    time.sleep(max(0.0, late))
                pushed.append(self._push(group, self._state[number][0]))
        except BaseException as cause:  # raised by step
            failures.append(cause)

    @torch.no_grad()
    def _device_side(self, factor: float) -> None:
        numbers = [n for n, g in enumerate(self._groups) if g.device and not g.resident]
        fetched: dict[int, list[Ticket]] = {}

        def fetch(place: int) -> None:
            number = numbers[place]
            # The slot's last group has left it, and the state is back from the step before.
            for before in (self._left[place % SLOTS], self._flushed[number]):
                if before is not None:
                    before.wait()
            slot = self._slots[place % SLOTS]
            size = self._groups[number].size
            fetched[place] = [
                self._in.copy(source, word[:size])
                for source, word in zip(self._state[number], slot, strict=True)
            ]

        cores = self._workers.cores
        mask = os.sched_getaffinity(0)
        threads = torch.get_num_threads()
        try:
            if cores is not None:
                os.sched_setaffinity(0, {cores[1]})
                torch.set_num_threads(1)
            for place in range(min(SLOTS, len(numbers))):
                fetch(place)
            for number, group in enumerate(self._groups):
                if group.resident:
                    self._update(number, self._state[number], self._gradient[number], factor)
                    self._scattered(group, self._state[number][0])
            for place, number in enumerate(numbers):
                group = self._groups[number]
                for ticket in fetched.pop(place):
                    ticket.wait()
                slot = [word[: group.size] for word in self._slots[place % SLOTS]]
                self._update(number, slot, self._gradient[number], factor)
                self._scattered(group, slot[0])
                for word, target in zip(slot, self._state[number], strict=True):
                    self._flushed[number] = self._out.copy(word, target)
                self._left[place % SLOTS] = self._flushed[number]
                if place + SLOTS < len(numbers):
                    fetch(place + SLOTS)
        finally:
            if cores is not None:
                os.sched_setaffinity(0, mask)
                torch.set_num_threads(threads)

    def _update(
        self, number: int, state: Sequence[Tensor], gradient: Tensor, factor: float
    ) -> None:
        """One sub-group, parameter by parameter."""
        group = self._groups[number]
        for scale in self.scales:
            gradient.mul_(scale)
        for start, parameter in self._places.values():
            there = _inside(group, start, parameter.numel())
            if there is None:
                continue
            words = [word[there] for word in state]
            self._rule.update(
                words[0],
                gradient[there],
                dict(zip(self._rule.states, words[1:], strict=True)),
                step=self.steps - 1,
                factor=factor,
                matrix=parameter.dim() >= 2,
            )
        self.updated[number] += 1

    def _push(self, group: _Group, values: Tensor) -> Ticket:
        """Send new values of the host to the device, in the device's own width."""
        dtype = next(iter(self._parameters.values())).dtype
        narrow = values.to(dtype) if dtype != values.dtype else values
        return self._in.submit(lambda: self._scattered(group, narrow), narrow.nbytes)

    def _overlaps(self, name: str) -> list[tuple[int, _Group, slice, slice]]:
        """(number, sub-group, part of the parameter, part of the sub-group) of each it lies in."""
        start, parameter = self._places[name]
        overlaps = []
        for number, group in enumerate(self._groups):
            there = _inside(group, start, parameter.numel())
            if there is not None:
                first = group.start + there.start - start
                here = slice(first, first + there.stop - there.start)
                overlaps.append((number, group, here, there))
        return overlaps

    @torch.no_grad()
    def _scattered(self, group: _Group, values: Tensor) -> None:
        """Write values of a sub-group into the parameters."""
        for start, parameter in self._places.values():
            there = _inside(group, start, parameter.numel())
            if there is not None:
                first = group.start + there.start - start
                flat = parameter.detach().view(-1)
                flat[first : first + there.stop - there.start].copy_(values[there])

    @torch.no_grad()
    def _gathered(self, group: _Group, values: Tensor) -> None:
        """Read a sub-group from the parameters."""
        for start, parameter in self._places.values():
            there = _inside(group, start, parameter.numel())
            if there is not None:
                first = group.start + there.start - start
                flat = parameter.detach().reshape(-1)
                values[there].copy_(flat[first : first + there.stop - there.start])

    def settle(self) -> None:
        """Return when all state is where it belongs."""
        for ticket in self._flushed:
            if ticket is not None:
                ticket.wait()

    @torch.no_grad()
    def state(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name -> state name -> tensor on the host; ``step`` counts updates."""
        self.settle()
        state: dict[str, dict[str, Tensor]] = {}
        for name, (_, parameter) in self._places.items():
            entries = {
                key: torch.empty(parameter.numel(), dtype=self._dtype) for key in self._rule.states
            }
            for number, _, here, there in self._overlaps(name):
                for word, key in enumerate(self._rule.states, 1):
                    entries[key][here].copy_(self._state[number][word][there])
            shaped = {key: value.view(parameter.shape) for key, value in entries.items()}
            state[name] = {**shaped, "step": torch.tensor(float(self.steps))}
        return state

    @torch.no_grad()
    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over moments and the number of steps; values are those of the parameters."""
        self.settle()
        for name, entries in state.items():
            self.steps = int(entries["step"])
            for number, _, here, there in self._overlaps(name):
                for word, key in enumerate(self._rule.states, 1):
                    self._state[number][word][there].copy_(entries[key].reshape(-1)[here])
        for group, kept in zip(self._groups, self._state, strict=True):
            self._gathered(group, kept[0])

    def close(self) -> None:
        """End the threads that move."""
        self.settle()
        self._in.close()
        self._out.close()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What state is kept in: fp32, or fp64 where the parameters are."""
    return torch.promote_types(dtype, torch.float32)


def _places(parameters: Mapping[str, Tensor]) -> dict[str, tuple[int, Tensor]]:
    places, start = {}, 0
    for name, parameter in parameters.items():
        places[name] = (start, parameter)
        start += parameter.numel()
    return places


def _inside(group: _Group, start: int, count: int) -> slice | None:
    """Which numbers of a sub-group belong to a parameter of so many from ``start`` on."""
    first, last = max(group.start, start), min(group.stop, start + count)
    return slice(first - group.start, last - group.start) if first < last else None


# Updates of which the shortest is taken.
_TRIES = 5
_NO_TIME = 1e18


def rates_of(
    sub_group: int,
    rule: ElementwiseOptimizer,
    workers: Workers,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> UpdateRates:
    """What host, device and link do in a second, by updates of one sub-group each.

    Args:
        sub_group: its numbers.
        rule: the optimizer.
        workers: what stands in for the machine; a link that is held to a rate has that one.
        device: where the device's half computes.
        dtype: of the parameters on the device.

    Raises:
        TierFullError: the device has no room for one sub-group.
    """
    result = {}
    wide = _wide(dtype)
    room = 16 * ALIGNMENT + 8 * wide.itemsize * sub_group
    for name, pattern in (
        ("host", UpdatePattern(groups=1)),
        ("device", UpdatePattern(groups=1, residents=1)),
    ):
        values = torch.zeros(1, sub_group, device=device, dtype=dtype)
        made = InterleavedUpdater(
            {"w": values},
            rule,
            sub_group=sub_group,
            pattern=lambda _, chosen=pattern: chosen,  # type: ignore[misc]
            device=BudgetedTier("device", room, device),
            host=BudgetedTier("host", room),
            workers=replace(workers, link=None),
        )
        made.zero_gradients()
        result[name] = sub_group / min(_seconds(made.step) for _ in range(_TRIES))
        made.close()
    source, narrow = torch.zeros(sub_group, dtype=wide), torch.zeros(sub_group, dtype=dtype)
    target = torch.zeros(sub_group, dtype=wide, device=device)
    convert = sub_group / min(_seconds(lambda: narrow.copy_(source)) for _ in range(_TRIES))
    words = sub_group / min(_seconds(lambda: target.copy_(source)) for _ in range(_TRIES))
    if workers.link is not None:
        words = min(words, workers.link.bytes_per_s / wide.itemsize)
    if dtype == source.dtype:
        convert = _NO_TIME  # nothing is converted
    return UpdateRates(
        host=result["host"],
        device=result["device"],
        convert=convert,
        link=words,
        push=dtype.itemsize / wide.itemsize,
    )


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
