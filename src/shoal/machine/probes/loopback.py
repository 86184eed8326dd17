"""TCP between two processes of this host: round trip and bandwidth.

Source: McVoy and Staelin, lmbench (lat_tcp, bw_tcp), 1996.
"""

from __future__ import annotations

import ctypes
import os
from typing import Annotated

from annotated_types import Ge, Le

from shoal.core.parts import part
from shoal.ir.machine import Measurement
from shoal.machine.native import library
from shoal.machine.protocols import ProbeContext


@part
class Loopback:
    """Round trip of a small message and one-way bandwidth over 127.0.0.1.

    Args:
        message_bytes: size of the message of the round trip.
        bulk_bytes: bytes sent in one direction per sample of the bandwidth.
        repeats: samples; 0 for 7 (fast) or 25.
    """

    message_bytes: Annotated[int, Ge(1), Le(2**20)] = 64
    bulk_bytes: Annotated[int, Ge(2**20)] = 64 * 2**20
    repeats: Annotated[int, Ge(0)] = 0

    def run(self, context: ProbeContext) -> list[Measurement]:
        """Quantities ``round_trip`` (s) and ``bandwidth`` (byte/s)."""
        repeats = self.repeats or (7 if context.fast else 25)
        trips, rates = (ctypes.c_double * repeats)(), (ctypes.c_double * repeats)()
        failed = library("system").system_loopback(
            self.message_bytes, 1000, self.bulk_bytes, repeats, trips, rates
        )
        if failed:
            context.skip("loopback", f"TCP over 127.0.0.1: {os.strerror(-failed)}")
            return []
        at = float(self.message_bytes)
        fine = all(1e-7 < trip < 1 for trip in trips)
        return [
            context.measured("loopback", "round_trip", "s", list(trips), at=at, plausible=fine),
            context.measured(
                "loopback",
                "bandwidth",
                "B/s",
                list(rates),
                at=float(self.bulk_bytes),
                plausible=max(rates) < 1e12,
            ),
        ]
