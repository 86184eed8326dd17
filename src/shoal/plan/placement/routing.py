"""Which copy of an expert computes which token: even loads first, then the nearest copy.

Every rank knows how many tokens of every other rank go to every expert, and computes the same
table from that.

Shapes: E experts, N devices, D devices that tokens come from.
"""

from __future__ import annotations

import numpy as np

from shoal.plan.placement.protocols import Devices, Flags, Floats, Ints

# Passes over all experts that have copies, and how little a pass may change before it is the last.
_PASSES, _STILL = 32, 1e-3


def balanced(loads_E: Floats, held_EN: Flags, before_EN: Floats | None = None) -> Floats:
    """Tokens [E, N] of every expert at every copy, such that the busiest device has least.

    The sum of the squares of what devices do is made least, expert by expert; where it is, so is
    the largest of them.

    Args:
        loads_E: tokens of each expert.
        held_EN: who has it.
        before_EN: what was found before for nearly the same, to begin with.
    """
    count_E = held_EN.sum(1)
    share_EN: Floats = (
        held_EN * (loads_E / count_E)[:, None]
        if before_EN is None
        else np.where(held_EN, before_EN, 0.0)
    )
    load_N = share_EN.sum(0)
    several = np.flatnonzero(count_E > 1)
    still = _STILL * loads_E.sum() / held_EN.shape[1]
    for _ in range(_PASSES):
        moved = 0.0
        for expert in several:
            at = np.flatnonzero(held_EN[expert])
            others = load_N[at] - share_EN[expert, at]
            new = _filled(others, loads_E[expert])
            moved = max(moved, float(np.abs(new - share_EN[expert, at]).max()))
            share_EN[expert, at] = new
            load_N[at] = others + new
        if moved <= still:
            break
    return share_EN


def _filled(levels: Floats, amount: float) -> Floats:
    """How an amount is poured over vessels that are filled so high already."""
    rising = np.sort(levels)
    below = np.cumsum(rising)
    counts = np.arange(1, len(rising) + 1)
    # The level if the lowest so many take all of it; right for the most that it still covers.
    level = (amount + below) / counts
    used = int(np.flatnonzero(level >= rising)[-1])
    poured: Floats = np.maximum(0.0, level[used] - levels)
    return poured


def routed(counts_DE: Ints, held_EN: Flags, devices: Devices) -> Ints:
    """Rows [D, E, N] that each device sends for each expert to each copy.

    Of those that go to one copy the first in the order of tokens are meant, then those to the
    next by number.

    Args:
        counts_DE: tokens of every device for every expert.
        held_EN: who has it.
        devices: all of them.
    """
    loads_E = counts_DE.sum(0)
    share_EN = balanced(loads_E.astype(np.float64), held_EN)
    table = np.zeros((*counts_DE.shape, devices.count), dtype=np.int64)
    for expert, load in enumerate(loads_E):
        at = np.flatnonzero(held_EN[expert])
        if len(at) == 1:
            table[:, expert, at[0]] = counts_DE[:, expert]
            continue
        room_N = np.zeros(devices.count, dtype=np.int64)
        room_N[at] = _whole(share_EN[expert, at], int(load))
        left_D = counts_DE[:, expert].copy()
        own = np.minimum(left_D, room_N)
        table[np.arange(len(own)), expert, np.arange(len(own))] = own
        left_D, room_N = left_D - own, room_N - own
        node_N = devices.nodes
        for group in [*(np.flatnonzero(node_N == n) for n in range(node_N[-1] + 1)), None]:
            _pour(table[:, expert], left_D, room_N, group)
    return table


def _whole(share: Floats, total: int) -> Ints:
    """Whole numbers near these, with this sum."""
    values = np.floor(share).astype(np.int64)
    rest = np.argsort(values - share, kind="stable")[: total - int(values.sum())]
    values[rest] += 1
    return values


def _pour(table_DN: Ints, left_D: Ints, room_N: Ints, among: Ints | None) -> None:
    """Send what is left, in order, to where there is room; all within ``among``."""
    sources = np.flatnonzero(left_D) if among is None else among[left_D[among] > 0]
    places = np.flatnonzero(room_N) if among is None else among[room_N[among] > 0]
    place = iter(places.tolist())
    at = next(place, None)
    for source in sources.tolist():
        while left_D[source] and at is not None:
            size = min(int(left_D[source]), int(room_N[at]))
            table_DN[source, at] += size
            left_D[source] -= size
            room_N[at] -= size
            if not room_N[at]:
                at = next(place, None)
