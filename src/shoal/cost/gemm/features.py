"""What a learned predictor of matrix products sees of one: sizes, traffic, tiles, caches.

The roofline that products are compared with comes from the sweep itself: the best rate that
any product of its kind reached, and the best traffic.

Sources: Williams et al., Roofline, 2009; Huynh-Tran et al., Understanding GEMM Performance and
Energy on NVIDIA Ada Lovelace, 2024 (features of sizes, tiles and waves).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import PositiveFloat

from shoal.core.config import Value
from shoal.core.errors import ConfigError
from shoal.machine.probes.gemm_table import DTYPE_BYTES, GemmPoint, GemmShape

FEATURES = (
    "log_M",
    "log_N",
    "log_K",
    "tile",
    "threads",
    "dtype_bytes",
    "a_transposed",
    "b_transposed",
    "log_flops",
    "log_bytes",
    "log_intensity",
    "compute_bound",
    "log_roofline_s",
    "log_tiles_m",
    "log_tiles_n",
    "log_tiles_k",
    "remainder_m",
    "remainder_n",
    "remainder_k",
    "padding",
    "log_smallest",
    "log_over_l1d",
    "log_over_l2",
    "log_over_l3",
)

# Torch's kernels choose their tiles themselves; this is a vector of fp32 and a row of AMX.
LIBRARY_TILE = 16
# Where the operating system names no caches.
USUAL_CACHES = {"l1d": 2**15, "l2": 2**20, "l3": 2**25}


class Roofs(Value):
    """The limits of a machine's products, as a sweep saw them.

    Args:
        compute: kind of product (see :meth:`kind`) -> FLOP/s.
        bandwidth: threads, as text -> byte/s.
        caches: level -> bytes.
    """

    compute: dict[str, PositiveFloat]
    bandwidth: dict[str, PositiveFloat]
    caches: dict[str, PositiveFloat]

    @staticmethod
    def kind(shape: GemmShape) -> str:
        """What products are compared with each other: tile, type and threads."""
        return f"{shape.tile}/{shape.dtype}/{shape.threads}"

    def flops(self, shape: GemmShape) -> float:
        """FLOP/s above this product.

        Threads that were not swept are scaled from the nearest that were.

        Raises:
            ConfigError: the sweep has no product of this tile and type.
        """
        exact = self.compute.get(self.kind(shape))
        if exact is not None:
            return exact
        near = {}
        for kind, rate in self.compute.items():
            tile, dtype, threads = kind.split("/")
            if (tile, dtype) == (str(shape.tile), shape.dtype):
                near[int(threads)] = rate
        if not near:
            known = sorted({"/".join(kind.split("/")[:2]) for kind in self.compute})
            raise ConfigError(
                f"gemm: no product of tile {shape.tile} and dtype {shape.dtype} was swept; "
                f"expected tile/dtype of {', '.join(known)}; run: shoal probe gemm"
            )
        nearest = min(near, key=lambda threads: abs(threads - shape.threads))
        return float(near[nearest] * min(1.0, shape.threads / nearest))

    def bytes(self, shape: GemmShape) -> float:
        """Byte/s above this product's traffic."""
        near = {int(threads): rate for threads, rate in self.bandwidth.items()}
        return near[min(near, key=lambda threads: abs(threads - shape.threads))]

    def seconds(self, shape: GemmShape) -> float:
        """The roofline's time: operations or traffic, whichever takes longer."""
        return max(shape.flops / self.flops(shape), shape.bytes / self.bytes(shape))


def roofs(points: Sequence[GemmPoint], caches: dict[str, float] | None = None) -> Roofs:
    """The limits that measured products show."""
    compute: dict[str, float] = {}
    bandwidth: dict[str, float] = {}
    for point in points:
        kind, threads = Roofs.kind(point), str(point.threads)
        compute[kind] = max(compute.get(kind, 0.0), point.flops / point.seconds)
        bandwidth[threads] = max(bandwidth.get(threads, 0.0), point.bytes / point.seconds)
    return Roofs(compute=compute, bandwidth=bandwidth, caches={**USUAL_CACHES, **(caches or {})})


def features(shapes: Sequence[GemmShape], limits: Roofs) -> np.ndarray:
    """[N, F] float32: one row a product, in the order of :data:`FEATURES`.

    Raises:
        ConfigError: a product of a kind that was not swept.
    """
    rows = np.empty((len(shapes), len(FEATURES)), dtype=np.float64)
    for row, shape in zip(rows, shapes, strict=True):
        tile = shape.tile or LIBRARY_TILE
        counts = [-(-size // tile) for size in shape.group]
        compute_s = shape.flops / limits.flops(shape)
        traffic_s = shape.bytes / limits.bytes(shape)
        M, N, K = shape.group
        row[:] = (
            np.log2(M),
            np.log2(N),
            np.log2(K),
            shape.tile,
            shape.threads,
            DTYPE_BYTES[shape.dtype],
            shape.layout[0] == "t",
            shape.layout[1] == "t",
            np.log2(shape.flops),
            np.log2(shape.bytes),
            np.log2(shape.flops / shape.bytes),
            compute_s >= traffic_s,
            np.log2(max(compute_s, traffic_s)),
            *np.log2(counts),
            *(size % tile for size in shape.group),
            counts[0] * counts[1] * tile * tile / (M * N),
            np.log2(min(shape.group)),
            *(np.log2(shape.bytes / limits.caches[name]) for name in ("l1d", "l2", "l3")),
        )
    return rows.astype(np.float32)
