"""Rows of host memory, read by a Triton program.

Source: Min et al., Large Graph Convolutional Network Training with GPU-Oriented Data Communication
Architecture, 2021, section 4.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.fields.graph.gather.protocols import LANES, LINE_BYTES

if TYPE_CHECKING:
    from torch import Tensor


def gather(
    values: Tensor, rows: Tensor, out: Tensor, places: Tensor | None = None, *, aligned: bool = True
) -> None:
    """Gather rows with one warp for each.

    Args:
        values: float32 [N, F], page-locked; in Triton's interpreter any memory of the host.
        rows: int64 [n].
        out: float32, contiguous, on the device.
        places: int64 [n]; None for the order of ``rows``.
        aligned: lanes are shifted.
    """
    from shoal.fields.graph.gather.triton_code import gather_rows

    if not len(rows) or not values.shape[1]:
        return
    width = values.shape[1]
    at = rows.to(out.device)
    to = at if places is None else places.to(out.device)
    gather_rows[(len(rows),)](
        values, at, to, out, width, values.data_ptr() % LINE_BYTES // 4,
        WARPS=-(-width // LANES), PLACES=places is not None, ALIGNED=aligned, num_warps=1,
    )  # fmt: skip
