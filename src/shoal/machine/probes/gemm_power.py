"""The draw of a CPU: from its own counters where they can be read, else from its description.

Sources: Intel Software Developer's Manual, volume 3, "Platform Specific Power Management
Support" (RAPL, through the powercap files of Linux); Fan, Weber and Barroso, Power
Provisioning for a Warehouse-sized Computer, 2007 (draw over utilisation).
"""

from __future__ import annotations

import time
from pathlib import Path

from shoal.core.errors import require

_RAPL = Path("/sys/class/powercap")
# Counters are updated every millisecond; over less than this a difference means little.
_SHORTEST_S = 0.02
# Share of the draw under load that an idle server takes (Fan et al., figure 3).
IDLE = 0.5


class Sensor:
    """Joules of all packages of this host between :meth:`start` and :meth:`stop`."""

    def __init__(self, root: Path = _RAPL) -> None:
        self._files = [path / "energy_uj" for path in sorted(root.glob("intel-rapl:[0-9]"))]
        self._begin: tuple[float, list[float]] | None = None

    @property
    def source(self) -> str:
        """``rapl`` where the counters can be read, else the empty text."""
        return "rapl" if self._read() is not None else ""

    def _read(self) -> list[float] | None:
        try:
            results = [1e-6 * float(path.read_text()) for path in self._files]
        except (OSError, ValueError):  # counters that only root, or no guest, may read
            return None
        return results or None

    def start(self) -> None:
        """Take the counters."""
        seen = self._read()
        self._begin = None if seen is None else (time.perf_counter(), seen)

    def stop(self) -> float | None:
        """Mean watts since :meth:`start`, or None.

        There is no number without counters, after less than 20 ms, and when one wrapped around.
        """
        seen = self._read()
        if self._begin is None or seen is None:
            return None
        taken = time.perf_counter() - self._begin[0]
        spent = [new - old for new, old in zip(seen, self._begin[1], strict=True)]
        if taken < _SHORTEST_S or min(spent) < 0:
            return None
        return sum(spent) / taken or None


def draw(load_watts: float, share: float) -> float:
    """Watts of a host of which ``share`` of the cores is busy.

    P = idle + (load - idle) (2u - u^1.4), with u the share.

    Args:
        load_watts: draw under full load.
        share: busy cores over all, 0 to 1.

    Raises:
        ConfigError: a draw that is not positive, or a share outside of 0 to 1.
    """
    require(load_watts > 0, "gemm.watts", load_watts, expected="watts above 0")
    require(0 <= share <= 1, "gemm.share", share, expected="a share of the cores, 0 to 1")
    idle = IDLE * load_watts
    return idle + (load_watts - idle) * float(2 * share - share**1.4)
