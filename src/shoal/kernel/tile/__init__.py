"""tile: a small machine for kernels on tiles of any type of 1 to 8 bits.

A program says what one block of threads does with tensors in global, shared and
register memory (:mod:`~shoal.kernel.tile.build`); layouts say which thread holds what
(:mod:`~shoal.kernel.tile.layout`); two generators make it fast, C++ for AVX-512
(:mod:`~shoal.kernel.tile.host`) and CUDA C++ (:mod:`~shoal.kernel.tile.cuda`).
"""

from shoal.kernel.tile.build import Builder, TileKernel, kernel
from shoal.kernel.tile.compile import compile_kernel
from shoal.kernel.tile.layout import (
    TileLayout,
    column_local,
    column_spatial,
    local,
    reduce,
    replicate,
    show,
    spatial,
)
from shoal.kernel.tile.types import TileType, tile_type

__all__ = [
    "Builder",
    "TileKernel",
    "TileLayout",
    "TileType",
    "column_local",
    "column_spatial",
    "compile_kernel",
    "kernel",
    "local",
    "reduce",
    "replicate",
    "show",
    "spatial",
    "tile_type",
]
