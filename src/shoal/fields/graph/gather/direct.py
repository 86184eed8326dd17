"""The part ``direct``: threads of the device read rows where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.fields.graph.gather.protocols import Fetch, GatherWork, Moved
from shoal.ir import Estimate, Machine

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.fields.graph.gather.table import FeatureTable
    from shoal.memory.tiers.mover import Ticket


@part
class DirectFeatures:
    """A warp for each row reads it from page-locked memory of the host; nothing is packed.

    The memory of the host reads every byte once. Lanes are shifted by where in a line of 128 bytes
    a row begins, so that a warp asks for each line once.

    Source: Min et al., Large Graph Convolutional Network Training with GPU-Oriented Data
    Communication Architecture, 2021.
    """

    reads_host: ClassVar = True

    def estimate(self, work: GatherWork, machine: Machine) -> Estimate:
        """Whole lines, read once."""
        seconds = work.line_bytes * work.rates.direct_s
        return work.estimate(moves=((work.nbytes, seconds),), device=0.0)

    def device_rows(self, num_rows: int) -> int:
        return 0

    def heat(self, degrees: np.ndarray, accesses: Callable[[], np.ndarray]) -> np.ndarray | None:
        return None

    def place(self, table: FeatureTable) -> Fetch:
        """Nothing lies elsewhere."""

        def fetch(rows: Tensor, out: Tensor) -> Ticket:
            def work() -> None:
                table.read_by_device(read_rows(table.values, rows, out))

            return table.moving.submit(work, out.nbytes)

        return fetch


def read_rows(values: Tensor, rows: Tensor, out: Tensor, places: Tensor | None = None) -> Moved:
    """Read rows of a table in host memory from the device that ``out`` lies on.

    Args:
        values: float32 [N, F] in host memory; page-locked if ``out`` is on a GPU.
        rows: int64 [n] in host memory.
        out: float32, contiguous.
        places: int64 [n], rows of ``out``; None for the order of ``rows``.
    """
    from shoal.fields.graph.gather.native import gather_rows, requests_of

    if out.device.type == "cpu":
        return gather_rows(
            values.numpy(), rows.numpy(), out.numpy(),
            None if places is None else places.numpy(),
        )  # fmt: skip
    from shoal.fields.graph.gather.triton import gather

    gather(values, rows, out, places)
    # The program asks for lines as the compiled one does, which counts them.
    counts = requests_of(values.data_ptr(), values.shape[1], np.asarray(rows))
    return Moved(4 * len(rows) * values.shape[1], 4 * len(rows) * values.shape[1], *counts)
