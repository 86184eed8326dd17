"""Sequences behind each other in buffers of a fixed size."""

from __future__ import annotations

import bisect
from collections.abc import Sequence


def best_fit(order: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Numbers of sequences, buffer by buffer, each in the fullest one that has room.

    In falling order of length no more than 11/9 of the fewest buffers, and some, are used.

    Args:
        order: numbers of the sequences, none longer than a buffer.
        lengths: by number.
        capacity: tokens of a buffer.

    Source: Johnson, Near-optimal Bin Packing Algorithms, 1973.
    """
    buffers: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, buffer), rising
    for one in order:
        length = int(lengths[one])
        at = bisect.bisect_left(room, (length, -1))
        if at < len(room):
            left, buffer = room.pop(at)
            buffers[buffer].append(one)
        else:
            left, buffer = capacity, len(buffers)
            buffers.append([one])
        if left > length:
            bisect.insort(room, (left - length, buffer))
    return buffers
