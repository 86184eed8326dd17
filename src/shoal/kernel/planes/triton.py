"""Products of planes on a GPU: expanded to int8 in the program, multiplied by ``tl.dot``.

Every GPU of the last years multiplies int8 on its matrix units; products of one bit, which
few of them still have, are not counted on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import TritonKernel
from shoal.kernel.calls import MatmulPlanesCall
from shoal.kernel.planes.base import PlanesKernel, checked
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor

# Rows, outputs and inputs of a program's tiles.
_TILE = (32, 64, 128)
_SMALL = (16, 16, 64)


@part
class TritonPlanes(TritonKernel, PlanesKernel):
    """One launch; each program combines the planes of its tile."""

    rate: ClassVar[str | None] = "int8"
    call_s: ClassVar[float] = 2e-5

    def _prepare(self, call: MatmulPlanesCall, planes_NwW: Tensor) -> Ready:
        import torch

        from shoal.kernel.planes.engines import bound
        from shoal.kernel.planes.triton_code import planes_product

        n, k, w, a = call.n, call.k, call.w, call.a
        # Words of 32 bits: those of 64 in the order of their bits.
        weights = checked("w", planes_NwW, n, w, k).view(torch.int32)
        wide = k >= bound(w, a)
        dtype = torch.int64 if wide else torch.int32
        bm, bn, bk = _TILE if call.device == "cuda" else _SMALL
        words = weights.shape[-1]

        def run(planes_MaW: Tensor) -> Tensor:
            x = checked("x", planes_MaW, None, a, k).view(torch.int32)
            out = torch.empty(x.shape[0], n, dtype=dtype, device=x.device)
            grid = (-(-x.shape[0] // bm), -(-n // bn))
            # Loads ahead of every plane's words would not fit into the memory on chip.
            planes_product[grid](
                x, weights, out, x.shape[0], n, k, words,
                A=a, W=w, BM=bm, BN=bn, BK=bk, WIDE=wide, num_stages=1,
            )  # fmt: skip
            return out

        return run
