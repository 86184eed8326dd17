"""How fast the ways between the places of a run are."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shoal.memory.streaming.needs import BOUNCE, PROBED
from shoal.memory.tiers.disk import staging

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.memory.tiers.mover import Mover
    from shoal.memory.tiers.places import Tiers


def rates_of(tiers: Tiers) -> dict[str, float]:
    """Bytes per second of the four ways of :class:`Tiers`, each by itself while the others rest.

    Needs so many bytes of the disk, and one buffer of host and device each, uncounted.
    """
    disk, device = tiers.disk, tiers.device.device
    assert disk is not None
    block = disk.alloc(PROBED * BOUNCE, "probe")
    here, there = staging(BOUNCE).fill_(1), torch.ones(BOUNCE, dtype=torch.uint8, device=device)
    rates = {}

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
        rates[name] = PROBED * BOUNCE / (time.perf_counter() - begin)
    disk.free(block)
    return rates
