"""Immutable objects in memory that processes of one host share, found by 16-byte keys.

The memory is a file without a name: its owner and those who inherited it from the owner have it,
and with the last of them it is gone, however they end. Only the owner gives slots out, counts
references and takes slots back; a reader that dies therefore holds nothing.

The file begins with a record of each slot and a row of each worker (see :data:`WORKER`); the slots
follow. A key is the number of a slot, how often that was given out, and 8 random bytes: the key of
an object that is gone finds nothing.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from dataclasses import dataclass

import numpy as np

from shoal.core.errors import ShoalError

KEY_BYTES = 16
NUDGE = bytes(KEY_BYTES)
"""No key: what a worker waits for has changed in its row."""

_KEY = struct.Struct("<IIQ")
# Of a slot: how often it was given out, random bytes, where its numbers begin and how many they
# are, what they count for: a coefficient, and the weights and updates that are in them.
_SLOT = np.dtype(
    [
        ("turn", "<u4"),
        ("refs", "<i4"),
        ("nonce", "<u8"),
        ("offset", "<i8"),
        ("count", "<i8"),
        ("coefficient", "<f8"),
        ("weight", "<f8"),
        ("updates", "<i8"),
    ]
)
WORKER = np.dtype(
    [
        ("pid", "<i8"),
        ("role", "<i8"),
        ("out", "<i8"),
        ("lazy", "<i8"),
        ("folded", "<i8"),
        ("objects", "<i8"),
        ("bytes", "<i8"),
        ("busy_ns", "<i8"),
        ("arrived_ns", "<i8"),
        ("done_ns", "<i8"),
    ]
)
"""Counters of a worker, which it updates itself: ``role`` 0 is a leaf, 1 a middle, 2 the top;
``out`` the slot into which it adds; ``lazy`` how many objects it waits for first; ``folded`` those
of this task; then the objects, bytes and busy time of its life, and when an object came and was
done."""

ROWS = 64
"""Workers of a store at most."""


class ObjectStoreError(ShoalError):
    """An object that is not there, or a store in which there is no room."""


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """What is known of an object.

    Args:
        count: its numbers.
        weight: sum of the weights of the updates in it.
        updates: how many those are.
    """

    count: int
    weight: float
    updates: int


class ObjectStore:
    """A mapped file of slots.

    Args:
        file: descriptor of the file.
        slots: how many.
        slot_bytes: of each, a multiple of the page.
    """

    def __init__(self, file: int, slots: int, slot_bytes: int) -> None:
        self.file, self.slots, self.slot_bytes = file, slots, slot_bytes
        self._base = _pages(slots * _SLOT.itemsize + ROWS * WORKER.itemsize)
        self._map = mmap.mmap(file, self._base + slots * slot_bytes)
        self._records = np.frombuffer(self._map, _SLOT, slots)
        self.workers = np.frombuffer(self._map, WORKER, ROWS, slots * _SLOT.itemsize)
        self._free = list(range(slots - 1, -1, -1))

    @classmethod
    def create(cls, slots: int, num_bytes: int) -> ObjectStore:
        """A new one, whose descriptor children may inherit.

        Args:
            slots: how many objects there may be at once.
            num_bytes: of the largest object.

        Raises:
            StoreError: there is no such memory.
        """
        try:
            file = os.memfd_create("shoal-lifl")
            slot_bytes = _pages(max(num_bytes, 1))
            os.ftruncate(
                file,
                _pages(slots * _SLOT.itemsize + ROWS * WORKER.itemsize) + slots * slot_bytes,
            )
            return cls(file, slots, slot_bytes)
        except (OSError, AttributeError, ValueError) as cause:
            raise ObjectStoreError(f"store: {slots} slots of {num_bytes} B: {cause}") from cause

    def close(self) -> None:
        """Give the descriptor back; the memory goes with the last view of it."""
        os.close(self.file)

    # The owner's

    @property
    def free(self) -> int:
        """Slots in which there is nothing."""
        return len(self._free)

    def reserve(self) -> int | None:
        """A slot to write into; None if all are taken."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """A slot that was reserved and not published."""
        self._free.append(slot)

    def publish(
        self, slot: int, *, offset: int, count: int, coefficient: float, weight: float, updates: int
    ) -> bytes:
        """Make what was written an object, which is not changed again; it has one reference.

        Args:
            slot: that was reserved.
            offset: at which its float32 numbers begin.
            count: how many they are.
            coefficient: with which they go into a sum.
            weight: of all updates in it.
            updates: how many.

        Returns:
            Its key.
        """
        turn = (int(self._records[slot]["turn"]) + 1) & 0xFFFFFFFF
        nonce = secrets.randbits(64)
        self._records[slot] = (turn, 1, nonce, offset, count, coefficient, weight, updates)
        return _KEY.pack(slot, turn, nonce)

    def weigh(self, key: bytes, weight: float) -> None:
        """Say what an update counts for, before any reader has its key."""
        slot = self._slot(key)
        self._records[slot]["coefficient"] = self._records[slot]["weight"] = weight

    def release(self, key: bytes) -> None:
        """Take a reference away; the slot of an object without one is free again."""
        slot = self._slot(key)
        self._records[slot]["refs"] -= 1
        if self._records[slot]["refs"] == 0:
            self._records[slot]["nonce"] = 0
            self._free.append(slot)

    # Everybody's

    def room(self, slot: int) -> memoryview:
        """The bytes of a slot."""
        begin = self._base + slot * self.slot_bytes
        return memoryview(self._map)[begin : begin + self.slot_bytes]

    def numbers(self, slot: int, count: int, offset: int = 0) -> np.ndarray:
        """Float32 numbers of a slot, in place."""
        begin = self._base + slot * self.slot_bytes + offset
        return np.frombuffer(self._map, np.float32, count, begin)

    def get(self, key: bytes) -> tuple[np.ndarray, float]:
        """The numbers of an object, in place, and its coefficient.

        Raises:
            StoreError: it is gone.
        """
        record = self._records[self._slot(key)]
        slot = _KEY.unpack(key)[0]
        numbers = self.numbers(slot, int(record["count"]), int(record["offset"]))
        return numbers, float(record["coefficient"])

    def facts(self, key: bytes) -> StoredFacts:
        """What is known of an object."""
        record = self._records[self._slot(key)]
        return StoredFacts(int(record["count"]), float(record["weight"]), int(record["updates"]))

    def _slot(self, key: bytes) -> int:
        if len(key) == KEY_BYTES:
            slot, turn, nonce = _KEY.unpack(key)
            if slot < self.slots:
                record = self._records[slot]
                if record["turn"] == turn and record["nonce"] == nonce and nonce:
                    return int(slot)
        raise ObjectStoreError(
            f"store: no object has the key {key.hex()}; it was released, or never was"
        )


def _pages(size: int) -> int:
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
