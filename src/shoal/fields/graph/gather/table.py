"""A table of features, of which rows are gathered to a device, with every byte counted."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from shoal.core.errors import DataError, require
from shoal.core.parts import Choice, table
from shoal.fields.graph.gather.protocols import FeaturePlacement, GatherCounters, GatherError, Moved
from shoal.memory.tiers.mover import EmulatedLink, Mover, Ticket
from shoal.memory.tiers.tier import BudgetedTier

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUFFERS = 2
"""Buffers on the device: one is trained on while the other is filled."""


class PendingRows:
    """Rows under way.

    Args:
        values: where they arrive, [n, F].
        ticket: of the move.
        table: that they come from.
    """

    def __init__(self, values: Tensor, ticket: Ticket, table: FeatureTable) -> None:
        self._values, self._ticket, self._table = values, ticket, table

    def done(self) -> bool:
        """Whether they are there, or something went wrong."""
        return self._ticket.done()

    def wait(self) -> Tensor:
        """The rows, once they are there.

        Raises:
            ShoalError: what went wrong.
        """
        late = not self._ticket.done()
        waited = self._ticket.wait()
        if late:
            self._table.add(stalls=1, stall_s=waited)
        return self._values


class FeatureTable:
    """Rows of features in host memory, or in a file that is mapped, gathered to a device.

    On a GPU the memory of the host is page-locked, for as long as the table is open or a gather
    is under way. On a CPU both tiers are memory of the host, and a link may hold back the one that
    holds the table.

    Args:
        values: float32 [N, F], contiguous; an array or a tensor on the CPU.
        placement: a part of kind ``feature_source``, perhaps with options.
        batch_rows: rows of the largest batch, for which buffers are reserved; 0 for none.
        device: ``cpu`` or a GPU.
        host_bytes_per_s: holds all traffic of the memory that holds the table, reads and writes
            together, to a rate; None for none.
        heat: [N], how hot each row is; None where it does not matter.

    Attributes:
        dim: F.
        num_rows: N.
        values: the table, float32 [N, F], as a tensor.
        placed: the placement that is used, a part: ``staged`` where pages cannot be locked.
        note: why it is another than wanted; empty if it is not.
        buffers: two of them on the device, float32 [batch_rows, F].

    Raises:
        GatherError: the table has another form.
    """

    def __init__(
        self,
        values: Any,
        placement: str | Choice | FeaturePlacement = "direct",
        *,
        batch_rows: int = 0,
        device: str = "cpu",
        host_bytes_per_s: float | None = None,
        heat: np.ndarray | None = None,
    ) -> None:
        import torch

        self.values = _checked(values)
        self.num_rows, self.dim = self.values.shape
        self.device, self.heat, self.batch_rows = torch.device(device), heat, batch_rows
        if self.device.type != "cpu" and not torch.cuda.is_available():
            raise GatherError(f"device = {device}: there is no GPU here; expected cpu")
        if heat is not None and np.shape(heat) != (self.num_rows,):
            raise GatherError(f"heat: {list(np.shape(heat))}; expected [{self.num_rows}]")
        self.placed = part = self._locked(placed(placement))
        self._lock, self._counts = threading.Lock(), GatherCounters().model_dump()
        self._closed = False
        link = None if host_bytes_per_s is None else EmulatedLink(host_bytes_per_s)
        row = 4 * self.dim
        size = BUFFERS * (row * batch_rows + 256)
        # Both movers share the link, which limits all traffic of the host's memory.
        self.host = BudgetedTier("host", max(size, 256), pinned=self.device.type != "cpu")
        kept = row * part.device_rows(self.num_rows) + 256
        self.on_device = BudgetedTier("device", size + kept, self.device)
        self.buffers = self.reserved(self.on_device) if batch_rows else []
        self._fetch = part.place(self)
        self.packing = Mover("pack features", link=link)
        self.moving = Mover("gather features", link=link, device=str(self.device))

    @classmethod
    def open(
        cls, path: str | Path, placement: str | Choice | FeaturePlacement = "direct", **options: Any
    ) -> Self:
        """Map a file of NumPy.

        Args:
            path: a ``.npy`` of float32 [N, F].
            placement: as of the class.
            options: as of the class.

        Raises:
            DataError: the file cannot be read.
            GatherError: the table has another form.
        """
        return cls(mapped_table(Path(path)), placement, **options)

    def reserved(self, tier: BudgetedTier) -> list[Tensor]:
        """Two buffers of a tier, each for the largest batch."""
        import torch

        shape = (self.batch_rows, self.dim)
        nbytes = 4 * self.batch_rows * self.dim
        blocks = [tier.alloc(nbytes, "rows of a batch") for _ in range(BUFFERS)]
        return [tier.view(block, torch.float32, shape) for block in blocks]

    def gather(self, rows: Any, *, out: Tensor | None = None) -> PendingRows:
        """Begin to gather rows, on a thread of the table.

        Args:
            rows: int64 [n], in any order, a row as often as wanted; array or tensor on the CPU.
            out: float32 [n, F] on the device, contiguous; None for a new one.

        Returns:
            :class:`PendingRows`; its ``wait()`` gives [n, F], equal to ``table[rows]`` bit by bit.

        Raises:
            GatherError: a row that does not exist, another buffer, or a table that is closed.
        """
        import torch

        if self._closed:
            raise GatherError("gather: the table is closed; open it again")
        at = torch.as_tensor(rows)
        if at.dim() != 1 or (at.numel() and at.dtype != torch.int64):
            raise GatherError(f"rows: {at.dtype} {list(at.shape)}; expected int64 [n]")
        at = at.to(torch.int64).contiguous()
        if len(at):
            low, high = (int(one) for one in torch.aminmax(at))
            if low < 0 or high >= self.num_rows:
                raise GatherError(
                    f"rows: {low if low < 0 else high}; expected 0 to {self.num_rows - 1}"
                )
        if out is None:
            out = torch.empty(len(at), self.dim, device=self.device)
        fits = out.shape == (len(at), self.dim) and out.dtype == torch.float32
        if not (fits and out.is_contiguous() and out.device.type == self.device.type):
            raise GatherError(
                f"out: {out.dtype} {list(out.shape)} on {out.device}; expected contiguous float32 "
                f"[{len(at)}, {self.dim}] on {self.device}"
            )
        self.add(gathers=1, rows=len(at))
        return PendingRows(out, self._fetch(at, out), self)

    def counters(self) -> GatherCounters:
        """What has been gathered so far; of gathers under way what has arrived."""
        host, device = self.host.stats, self.on_device.stats
        with self._lock:
            tiers = {
                "host_read": host.bytes_out, "host_written": host.bytes_in,
                "device_read": device.bytes_out, "device_written": device.bytes_in,
            }  # fmt: skip
            return GatherCounters.model_validate(self._counts | tiers)

    def add(self, **counts: float) -> None:
        """Count."""
        with self._lock:
            for name, number in counts.items():
                self._counts[name] += number

    def moved(
        self, *, host_read: int = 0, host_written: int = 0, device_read: int = 0,
        device_written: int = 0,
    ) -> None:  # fmt: skip
        """Count bytes of the tiers; called by what has moved them."""
        host, device = self.host.stats, self.on_device.stats
        with self._lock:
            host.bytes_out += host_read
            host.bytes_in += host_written
            device.bytes_out += device_read
            device.bytes_in += device_written

    def read_by_device(self, moved: Moved) -> None:
        """Count what threads of the device have read from the host."""
        self.moved(host_read=moved.read, device_written=moved.written)
        self.add(requests=moved.requests, iterations=moved.iterations)

    def close(self) -> None:
        """Finish what is under way, then let go of the memory."""
        if not self._closed:
            self._closed = True
            self.packing.close()
            self.moving.close()
            self._fetch, self.buffers = _closed, []

    def __enter__(self) -> Self:
        """The table itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def _locked(self, part: FeaturePlacement) -> FeaturePlacement:
        """The part, or ``staged`` where a GPU cannot read the memory of the host by itself."""
        self.note = ""
        if self.device.type == "cpu" or not part.reads_host:
            return part
        try:
            self.values = self.values.pin_memory()
        except RuntimeError as cause:
            import logging

            said = str(cause).splitlines()[0]
            self.note = f"pages of the table cannot be locked ({said}); rows are staged"
            logging.getLogger(__name__).warning(self.note)
            return placed("staged")
        return part


def mapped_table(path: Path) -> np.ndarray:
    """A ``.npy`` of float32 [N, F], mapped.

    Raises:
        DataError: it cannot be read, or has another form.
    """
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, EOFError, ValueError) as cause:
        raise DataError(f"{path}: cannot be read: {cause}") from cause
    if not isinstance(values, np.ndarray):
        raise DataError(f"{path}: an archive of several arrays; expected a .npy of float32 [N, F]")
    try:
        _checked(values)
    except GatherError as cause:
        raise DataError(f"{path}: {cause}") from cause
    return values


def placed(placement: str | Choice | FeaturePlacement) -> FeaturePlacement:
    """The part of a choice; a part as it is."""
    if isinstance(placement, FeaturePlacement):
        return placement
    part: FeaturePlacement = table("feature_source").build(placement, where="placement")
    return part


def _closed(rows: Tensor, out: Tensor) -> Ticket:
    raise GatherError("gather: the table is closed; open it again")


def _checked(values: Any) -> torch.Tensor:
    """The table as a tensor on the same memory."""
    import warnings

    import torch

    array = isinstance(values, np.ndarray)
    require(array or isinstance(values, torch.Tensor), "table", type(values).__name__,
            expected="an array or a tensor", error=GatherError)  # fmt: skip
    wanted = np.float32 if array else torch.float32
    if values.dtype != wanted or values.ndim != 2 or not values.shape[1]:
        raise GatherError(f"table: {values.dtype} {list(values.shape)}; expected float32 [N, F]")
    if not array and values.device.type != "cpu":
        raise GatherError(f"table: on {values.device}; expected host memory")
    if not (values.flags.c_contiguous if array else values.is_contiguous()):
        raise GatherError("table: rows that do not lie together; expected contiguous rows")
    if not array:
        tensor: torch.Tensor = values
        return tensor
    with warnings.catch_warnings():
        # Of what is mapped for reading; it is never written.
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(values)
