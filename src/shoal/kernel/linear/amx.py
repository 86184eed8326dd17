"""The product of any number of rows with a matrix, by the matrix tiles of a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import LinearCall
from shoal.kernel.native.tiles import TILES, has_tiles
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AmxLinear"]


@part
class AmxLinear(BaseKernel):
    """Tiles of 16 x 32 bf16 numbers, the weights packed once in the order in which they are read.

    They lie in large pages, so that few rows go at the speed of the memory, and many at a third
    to half of what the tiles can do. Sums are taken in one order, whatever the number of rows.
    """

    op: ClassVar[str] = "linear"
    backend: ClassVar[str] = "amx"
    invariant: ClassVar[bool] = True
    gates: ClassVar[bool] = True
    packs: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)
    needs: ClassVar[frozenset[str]] = TILES | {"avx512f", "avx512bw", "avx512_bf16"}
    compiled: ClassVar[bool] = True
    memory_share: ClassVar[float] = 0.95
    compute_share: ClassVar[float] = 0.4

    def refuses(self, call: LinearCall) -> str | None:
        """Why it cannot compute that here, or None if it can."""
        reason = super().refuses(call)
        if reason is None and not has_tiles():
            return "needs matrix tiles, which the operating system does not grant"
        return reason

    def unpack(self, call: LinearCall, ready: Ready) -> Tensor:
        """The weight [N, K] that was packed, bit for bit.

        Args:
            call: what was prepared, without gates.
            ready: what :meth:`prepare` gave.
        """
        import torch

        steps = -(-call.k // 32)
        packed: Tensor = ready.constants[0]  # type: ignore[attr-defined]
        # A panel of 32 outputs, in it 32 inputs: two halves of 16 rows of 16 outputs' pairs.
        tiles = packed.view(torch.bfloat16).view(-1, steps, 2, 16, 16, 2)
        return tiles.permute(0, 2, 4, 1, 3, 5).reshape(-1, steps * 32)[: call.n, : call.k]

    def _prepare(self, call: LinearCall, weight_NK: Tensor, bias_N: Tensor | None = None) -> Ready:
        import torch
        import torch.nn.functional as F

        from shoal.kernel.native import function
        from shoal.kernel.pages import room
        from shoal.kernel.tensors import constant

        n, k, gated = call.n, call.k, int(call.gated)
        weight = constant("weight", weight_NK, (n, k), torch.bfloat16)
        bias = None if bias_N is None else constant("bias", bias_N.float(), (n,), torch.float32)
        short = -k % 32
        outputs, panel = (n // 2, 16) if gated else (n, 32)
        packed = room(-(-outputs // panel) * 32 * (k + short) * 2)
        function("linear_amx", "linear_amx_pack", "pplll")(
            weight.data_ptr(), packed.data_ptr(), n, k, gated
        )
        run = function("linear_amx", "linear_amx", "ppppllll")
        at, bias_at = packed.data_ptr(), 0 if bias is None else bias.data_ptr()

        def product(x: Tensor) -> Tensor:
            rows = x.numel() // k
            x = F.pad(x, (0, short)) if short else x.contiguous()
            out = x.new_empty(*x.shape[:-1], outputs)
            run(x.data_ptr(), at, bias_at, out.data_ptr(), rows, n, k + short, gated)
            return out

        # The memory that the addresses are of lives as long as the function.
        product.constants = (packed, bias)  # type: ignore[attr-defined]
        return product
