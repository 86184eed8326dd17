"""What the kernels of ``matmul_planes`` have in common.

Constants: the planes of the weights, int64 [N, w, W] (:mod:`shoal.kernel.planes.layout`).
``ready(planes int64 [M, a, W]) -> [M, N]``, int32, or int64 where a sum may exceed it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.errors import KernelError
from shoal.ir import Estimate, Interval, Machine
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import MatmulPlanesCall
from shoal.kernel.planes.engines import ENGINES
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor


class PlanesKernel(BaseKernel):
    """Base of all of them."""

    op: ClassVar[str] = "matmul_planes"
    invariant: ClassVar[bool] = True

    def _refuses(self, call: MatmulPlanesCall) -> str | None:
        if not (1 <= call.w <= 8 and 1 <= call.a <= 8):
            near = f"w = {min(max(call.w, 1), 8)} and a = {min(max(call.a, 1), 8)}"
            return f"takes 1 to 8 planes of each; nearest {near}"
        if min(call.m, call.n, call.k) < 1:
            return "takes sizes of at least 1"
        return None


def checked(what: str, planes: Tensor, rows: int | None, bits: int, k: int) -> Tensor:
    """Planes as a kernel wants them, contiguous.

    Raises:
        KernelError: they have another shape or type.
    """
    import torch

    shape = tuple(planes.shape)
    count = -(-k // 64)
    if (
        planes.dtype != torch.int64
        or shape[1:] != (bits, count)
        or (rows is not None and shape[0] != rows)
    ):
        raise KernelError(
            f"kernel.matmul_planes: planes of {what}: {planes.dtype} {list(shape)}: expected "
            f"torch.int64 [{'M' if rows is None else rows}, {bits}, {count}] for rows of K = {k}"
        )
    return planes.detach().contiguous()


class NativePlanes(PlanesKernel):
    """Base of those in C++.

    Attributes:
        engine: name of the engine.
    """

    engine: ClassVar[str]
    compiled: ClassVar[bool] = True

    def _refuses(self, call: Any) -> str | None:
        return super()._refuses(call) or ENGINES[self.engine].refuses()

    def estimate(self, call: Any, machine: Machine) -> Estimate:
        """By what the probe ``units`` saw of the instructions that it consists of."""
        engine = ENGINES[self.engine]
        seconds = engine.seconds(call.m, call.n, call.k, call.w, call.a, machine) + self.call_s
        return Estimate(
            step_s=Interval.around(seconds, 0.3),
            terms_s={"memory": seconds},
            flops=call.flops,
            bound="memory" if call.flops < 16 * call.moved_bytes else "compute",
        )

    def _prepare(self, call: MatmulPlanesCall, planes_NwW: Tensor) -> Ready:
        from shoal.kernel.planes.layout import join
        from shoal.kernel.planes.native import product, result, weights

        engine, a, k = ENGINES[self.engine], call.a, call.k
        planes = checked("w", planes_NwW, call.n, call.w, k)
        held = weights(join(planes, k), call.w, a, tiles=engine.tiles)

        def run(planes_MaW: Tensor) -> Tensor:
            planes = checked("x", planes_MaW, None, a, k)
            out = result(held, planes.shape[0])
            product(engine, held, planes, out)
            return out

        run.weights = held  # type: ignore[attr-defined]
        return run
