"""The meaning of ``matmul_planes``: planes to odd integers, and their product in 64 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.calls import MatmulPlanesCall
from shoal.kernel.planes.base import PlanesKernel, checked
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor


@part
class ReferencePlanes(PlanesKernel):
    """``W.long() @ X.long().T`` on the decoded integers; slow."""

    backend: ClassVar[str] = "reference"
    devices: ClassVar[tuple[str, ...]] = ("cpu",)
    memory_share: ClassVar[float] = 0.1
    compute_share: ClassVar[float] = 0.01

    def _prepare(self, call: MatmulPlanesCall, planes_NwW: Tensor) -> Ready:
        import torch

        from shoal.kernel.planes.engines import bound
        from shoal.kernel.planes.layout import unpack

        w = unpack(checked("w", planes_NwW, call.n, call.w, call.k), call.k)
        dtype = torch.int32 if call.k < bound(call.w, call.a) else torch.int64

        def run(planes_MaW: Tensor) -> Tensor:
            x = unpack(checked("x", planes_MaW, None, call.a, call.k), call.k)
            return (x @ w.T).to(dtype)

        return run
