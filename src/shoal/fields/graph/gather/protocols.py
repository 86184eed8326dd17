"""What sources of features promise, and values that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, runtime_checkable

from shoal.core.config import Value
from shoal.core.errors import ConfigError
from shoal.ir import Estimate, Interval, Machine

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from shoal.fields.graph.gather.table import FeatureTable
    from shoal.memory.tiers.mover import Ticket

LINE_BYTES = 128
"""What a request of a warp asks memory for, B."""

LANES = 32
"""Threads of a warp."""


class GatherError(ConfigError, ValueError):
    """Tables, rows or buffers that cannot be gathered."""


class Moved(NamedTuple):
    """What a gather moved.

    Args:
        read: bytes.
        written: bytes.
        requests: of lines of 128 bytes.
        iterations: of warps.
    """

    read: int
    written: int
    requests: int
    iterations: int


class GatherCounters(Value):
    """What has been gathered from a table so far.

    Args:
        gathers: calls.
        rows: in all of them.
        host_read: bytes that were read from the memory that holds the table.
        host_written: bytes that were written there.
        device_read: bytes of rows kept on the device that were read.
        device_written: bytes that were written on the device.
        requests: for 128-byte lines of host memory, by threads of the device.
        iterations: of warps.
        stalls: times that somebody waited for rows.
        stall_s: seconds of these.
    """

    gathers: int = 0
    rows: int = 0
    host_read: int = 0
    host_written: int = 0
    device_read: int = 0
    device_written: int = 0
    requests: int = 0
    iterations: int = 0
    stalls: int = 0
    stall_s: float = 0.0

    @property
    def host_bytes(self) -> int:
        """Bytes that the memory of the table moved, both ways."""
        return self.host_read + self.host_written


class GatherRates(Value):
    """What gathering takes on a machine.

    Args:
        pack_s: seconds for a byte of a row that a core of the host packs.
        copy_s: for a byte of a block that is copied from host to device.
        direct_s: for a byte of a line that the device reads from host memory.
        device_s: for a byte of a row that the device copies in its own memory.
        call_s: for a gather, whatever its size.
        sample_s: for a neighbour that is drawn and numbered.
        spread: of what follows from them.
    """

    pack_s: float
    copy_s: float
    direct_s: float
    device_s: float
    call_s: float
    sample_s: float
    spread: float


class GatherWork(Value):
    """What a batch gathers.

    Args:
        rows: of the table.
        width: floats of a row.
        hot: share of the rows that are among the hottest so many, by share of the table in
            hundredths: ``hot[25]`` of the hottest quarter; 101 numbers.
        line_bytes: of whole lines that the rows of a batch overlap.
        table_rows: rows of the table.
        rates: of the machine.
        host_bytes_per_s: to which all traffic of the table's memory is held; None for none.
    """

    rows: float
    width: int
    hot: tuple[float, ...]
    line_bytes: float
    table_rows: int
    rates: GatherRates
    host_bytes_per_s: float | None = None

    @property
    def nbytes(self) -> float:
        """Bytes of the rows of a batch."""
        return 4.0 * self.width * self.rows

    def estimate(self, *, moves: tuple[tuple[float, float], ...], device: float) -> Estimate:
        """Seconds of a batch, moves one after the other.

        Args:
            moves: host bytes, read and written, and seconds of each where nothing holds it back.
            device: bytes kept on the device.
        """
        host = self.host_bytes_per_s
        seconds = sum(max(s, nbytes / host if host else 0.0) for nbytes, s in moves)
        terms = {"memory": seconds, "overhead": self.rates.call_s}
        return Estimate(
            step_s=Interval.around(sum(terms.values()), self.rates.spread),
            terms_s=terms,
            memory_bytes={"device": device, "host": 4.0 * self.width * self.table_rows},
            wire_bytes={"host": sum(nbytes for nbytes, _ in moves)},
            bound="memory",
        )


Fetch = Callable[["Tensor", "Tensor"], "Ticket"]
"""Begins to move rows, int64 [n] on the host, to a buffer [n, F] on the device."""


@runtime_checkable
class FeaturePlacement(Protocol):
    """Where features lie and how rows of them come to the device: kind ``feature_source``.

    Attributes:
        reads_host: threads of the device read memory of the host, which must be page-locked.
    """

    reads_host: ClassVar[bool]

    def estimate(self, work: GatherWork, machine: Machine) -> Estimate:
        """Seconds (``step_s``) of gathering one batch, and bytes; allocates nothing.

        Bytes of host memory that a batch reads and writes are ``wire_bytes["host"]``.
        """

    def device_rows(self, num_rows: int) -> int:
        """Rows of a table that are kept on the device."""

    def heat(self, degrees: np.ndarray, accesses: Callable[[], np.ndarray]) -> np.ndarray | None:
        """How hot each row is; None where it does not matter.

        Args:
            degrees: int [N], of the nodes.
            accesses: int [N], how often an epoch asks for each row; counted when called.
        """

    def place(self, table: FeatureTable) -> Fetch:
        """Prepare a table; what moves rows of it from then on."""
