"""The part ``staged``: the host packs rows into a buffer, which is copied."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.fields.graph.gather.protocols import Fetch, GatherWork
from shoal.ir import Estimate, Machine

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from shoal.fields.graph.gather.table import FeatureTable
    from shoal.memory.tiers.mover import Ticket


@part
class StagedFeatures:
    """The CPU selects rows into a page-locked buffer, which is copied to the device as a whole.

    The memory of the host reads every byte, writes it, and reads it again.
    """

    reads_host: ClassVar = False

    def estimate(self, work: GatherWork, machine: Machine) -> Estimate:
        """Packed, then copied."""
        size, rates = work.nbytes, work.rates
        moves = ((2 * size, size * rates.pack_s), (size, size * rates.copy_s))
        return work.estimate(moves=moves, device=0.0)

    def device_rows(self, num_rows: int) -> int:
        return 0

    def heat(self, degrees: np.ndarray, accesses: Callable[[], np.ndarray]) -> np.ndarray | None:
        return None

    def place(self, table: FeatureTable) -> Fetch:
        """Two buffers are used in turn."""
        import torch

        free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        pinned = table.device.type != "cpu"
        for buffer in table.reserved(table.host) if table.batch_rows else [None, None]:
            free.put(torch.empty(0, table.dim) if buffer is None else buffer)

        def fetch(rows: Tensor, out: Tensor) -> Ticket:
            buffer = free.get()
            if len(buffer) < len(rows):
                buffer = torch.empty(len(rows), table.dim, pin_memory=pinned)
            packed = buffer[: len(rows)]

            def pack() -> None:
                try:
                    torch.index_select(table.values, 0, rows, out=packed)
                except BaseException:
                    free.put(buffer)  # nothing will be copied
                    raise
                table.moved(host_read=packed.nbytes, host_written=packed.nbytes)

            def copy() -> None:
                try:
                    out.copy_(packed, non_blocking=True)
                    if pinned:
                        torch.cuda.current_stream(table.device).synchronize()
                    table.moved(host_read=packed.nbytes, device_written=packed.nbytes)
                finally:
                    free.put(buffer)

            return table.moving.submit(
                copy, out.nbytes, after=table.packing.submit(pack, 2 * out.nbytes)
            )

        return fetch
