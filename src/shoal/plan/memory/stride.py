"""Which sub-groups of an optimizer's state are updated on the device, and which on the host.

The state lies on the host. While the host updates one sub-group, another can travel to the idle
device, be updated there, and travel back. Every ``stride``-th one does; or, where the device's way
is the faster one, all but every ``stride``-th. :func:`timeline` plays an update over its
resources: two processors and a link with one or two directions. :func:`choose` plays every stride
and takes the shortest.

Source: Maurya et al., Deep Optimizer States, 2024, section 4 (interleaved offloading).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from shoal.core.config import Value
from shoal.core.errors import PlanError, require

HOST_ONLY = 0
"""The stride by which no sub-group goes to the device."""

LONGEST = 32
"""The longest stride that is tried; the gain of one beyond it is below a thirtieth."""

SLOTS = 2
"""Sub-groups that the device has room for at one time."""

Resource = Literal["host", "device", "in", "out"]


class UpdateRates(Value):
    """What a machine does in a second, in parameters.

    Args:
        host: parameters that the host updates.
        device: parameters that the device updates.
        convert: parameters per second that the host converts to low precision.
        link: fp32 words that the link carries, each way.
        push: words by which a new parameter goes to the device: a half where it is bf16 there.
        duplex: both ways at one time.
    """

    host: PositiveFloat
    device: PositiveFloat
    convert: PositiveFloat
    link: PositiveFloat
    push: PositiveFloat = 0.5
    duplex: bool = True

    def host_s(self, size: int) -> float:
        """Seconds by which a sub-group on the host delays the ones behind it."""
        return size / self.host + size / self.convert + self.push * size / self.link

    def device_s(self, size: int) -> float:
        """Seconds until a sub-group is on the device and updated; and back, on one way."""
        there = 3 * size / self.link + size / self.device
        return there if self.duplex else there + 3 * size / self.link


class UpdatePattern(Value):
    """Who updates which sub-group.

    Args:
        groups: sub-groups, in order.
        stride: one in ``stride`` sub-groups is updated on the device; :data:`HOST_ONLY` for none.
        mirrored: the one is the host's and the others are the device's.
        residents: last sub-groups whose state stays on the device for ever.
    """

    groups: PositiveInt
    stride: NonNegativeInt = HOST_ONLY
    mirrored: bool = False
    residents: NonNegativeInt = 0

    def on_device(self) -> tuple[bool, ...]:
        """Of each sub-group, whether the device updates it."""
        moving = self.groups - self.residents
        chosen = [
            self.stride != HOST_ONLY and (n % self.stride == self.stride - 1) != self.mirrored
            for n in range(moving)
        ]
        return (*chosen, *[True] * (self.groups - moving))

    def describe(self) -> str:
        """In a few words."""
        if self.stride == HOST_ONLY:
            return "host only"
        where = "host" if self.mirrored else "device"
        return f"every {self.stride}. on the {where}"


class UpdateTimeline(Value):
    """An update, played.

    Args:
        seconds: until the parameters of the next forward pass are complete.
        flushed_s: until the last state is back on the host.
        busy_s: of each resource.
    """

    pattern: UpdatePattern
    seconds: float
    flushed_s: float
    busy_s: dict[str, float]


def timeline(rates: UpdateRates, sizes: Sequence[int], pattern: UpdatePattern) -> UpdateTimeline:
    """Play one update phase.

    Args:
        rates: of the machine.
        sizes: parameters of each sub-group.
        pattern: who updates what; its ``groups`` are as many.

    Returns:
        Its times. A sub-group of the host is updated, converted and pushed;
        one of the device is fetched (three words a parameter), updated, and flushed, into one of
        :data:`SLOTS` slots; a resident is updated where it lies.
    """
    require(len(sizes) == pattern.groups, "sizes", len(sizes), expected=f"{pattern.groups} sizes")
    back: Resource = "out" if rates.duplex else "in"
    # (resource, seconds, numbers of the tasks before it, counts for the next forward pass)
    tasks: list[tuple[Resource, float, list[int], bool]] = []
    flushes: list[int] = []
    for number, (size, device) in enumerate(zip(sizes, pattern.on_device(), strict=True)):
        if number >= pattern.groups - pattern.residents:
            tasks.append(("device", size / rates.device, [], True))
        elif device:
            free = [flushes[-SLOTS]] if len(flushes) >= SLOTS else []
            tasks.append(("in", 3 * size / rates.link, free, False))
            tasks.append(("device", size / rates.device, [len(tasks) - 1], True))
            tasks.append((back, 3 * size / rates.link, [len(tasks) - 1], False))
            flushes.append(len(tasks) - 1)
        else:
            tasks.append(("host", size / rates.host + size / rates.convert, [], False))
            tasks.append(("in", rates.push * size / rates.link, [len(tasks) - 1], True))
    ends = _played(tasks)
    busy: dict[str, float] = {}
    for resource, seconds, _, _ in tasks:
        busy[resource] = busy.get(resource, 0.0) + seconds
    needed = [end for end, task in zip(ends, tasks, strict=True) if task[3]]
    return UpdateTimeline(pattern=pattern, seconds=max(needed), flushed_s=max(ends), busy_s=busy)


def _played(tasks: Sequence[tuple[Resource, float, list[int], bool]]) -> list[float]:
    """When each task ends; a resource takes what has been ready longest."""
    waits = [len(before) for _, _, before, _ in tasks]
    after: list[list[int]] = [[] for _ in tasks]
    for number, (_, _, before, _) in enumerate(tasks):
        for one in before:
            after[one].append(number)
    ready: dict[Resource, list[tuple[float, int]]] = {}
    for number, (resource, _, _, _) in enumerate(tasks):
        if not waits[number]:
            heapq.heappush(ready.setdefault(resource, []), (0.0, number))
    free: dict[Resource, float] = {}
    ends = [0.0] * len(tasks)
    events: list[tuple[float, int]] = []
    now = 0.0
    while True:
        for resource, queue in ready.items():
            if queue and free.get(resource, 0.0) <= now:
                _, number = heapq.heappop(queue)
                ends[number] = free[resource] = now + tasks[number][1]
                heapq.heappush(events, (ends[number], number))
        if not events:
            return ends
        now, done = heapq.heappop(events)
        for number in after[done]:
            waits[number] -= 1
            if not waits[number]:
                heapq.heappush(ready.setdefault(tasks[number][0], []), (now, number))


def steady_stride(rates: UpdateRates, size: int) -> int:
    """The stride at which a sub-group's trip to the device is hidden behind those of the host.

    One rides along k - 1 of the host when (k - 1) t_host >= t_device, so k is
    1 + ceil(t_device / t_host).
    """
    return 1 + math.ceil(rates.device_s(size) / rates.host_s(size))


def choose(
    rates: UpdateRates, sizes: Sequence[int], *, residents: int = 0
) -> tuple[UpdateTimeline, list[UpdateTimeline]]:
    """The shortest update, and all that were played: host only, strides to 32, their mirrors.

    Args:
        rates: of the machine.
        sizes: parameters of each sub-group.
        residents: last sub-groups that stay on the device.

    Raises:
        PlanError: more residents than sub-groups.
    """
    groups = len(sizes)
    if not 0 <= residents <= groups:
        raise PlanError(
            f"static_residents = {residents}: there are {groups} sub-groups; give 0 to {groups}"
        )
    moving = groups - residents
    patterns = [UpdatePattern(groups=groups, residents=residents)]
    for mirrored in (False, True):
        patterns += [
            UpdatePattern(groups=groups, stride=stride, mirrored=mirrored, residents=residents)
            for stride in range(2, min(moving, LONGEST) + 1)
        ]
    played = [timeline(rates, sizes, pattern) for pattern in patterns]
    return min(played, key=lambda one: one.seconds), played
