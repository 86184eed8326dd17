"""A process that waits at a socket for the keys of objects, and adds them to a sum in the store.

It has no state of its own: into which slot it adds is in its row of the store, so the same process
is a leaf, a middle and the top in turn. It answers each key with that key once the object is in the
sum, and ends when the other end of its socket is closed.
"""

from __future__ import annotations

import os
import socket
import sys
import time

import numpy as np

from shoal.fields.federate.aggregate.sums import add_weighted
from shoal.fields.federate.lifl.store import KEY_BYTES, NUDGE, ObjectStore


def serve(store: ObjectStore, row: np.void, channel: socket.socket) -> None:
    """Add objects until the channel is closed.

    Args:
        store: that of the host.
        row: of this worker.
        channel: over which keys come; each is a message of 16 bytes.
    """
    waiting: list[bytes] = []
    while key := channel.recv(KEY_BYTES):
        if key != NUDGE:
            row["arrived_ns"] = time.monotonic_ns()
            waiting.append(key)
        # Lazy: one pass over the sum for all objects of the task; eager waits for none.
        if not waiting or len(waiting) < row["lazy"]:
            continue
        begin = time.thread_time_ns()
        objects = [store.get(one) for one in waiting]
        count = len(objects[0][0])
        add_weighted(
            store.numbers(int(row["out"]), count),
            [numbers for numbers, _ in objects],
            [coefficient for _, coefficient in objects],
            fresh=row["folded"] == 0,
            threads=1,
        )
        row["folded"] += len(waiting)
        row["objects"] += len(waiting)
        row["bytes"] += 4 * count * len(waiting)
        row["busy_ns"] += time.thread_time_ns() - begin
        row["done_ns"] = time.monotonic_ns()
        for one in waiting:
            channel.send(one)
        waiting = []


def main() -> None:
    """``python -m ... FILE SLOTS SLOT_BYTES ROW CHANNEL``: descriptors are inherited."""
    file, slots, slot_bytes, row, channel = map(int, sys.argv[1:])
    store = ObjectStore(file, slots, slot_bytes)
    store.workers[row]["pid"] = os.getpid()
    with socket.socket(fileno=channel) as connected:
        serve(store, store.workers[row], connected)


if __name__ == "__main__":
    main()
