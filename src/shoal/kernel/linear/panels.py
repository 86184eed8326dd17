"""Weights packed once, in panels of 32 outputs, in the order in which products read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import LinearCall
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor


class PanelLinear(BaseKernel):
    """Base of the products with packed weights in bf16: those of vectors and those of tiles.

    They lie in large pages. The order of summation is fixed: the bits of a row's result do not
    depend on the other rows.

    Attributes:
        source: the library, and its function.
    """

    op: ClassVar[str] = "linear"
    invariant: ClassVar[bool] = True
    gates: ClassVar[bool] = True
    packs: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)
    compiled: ClassVar[bool] = True
    source: ClassVar[str]

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
        function(self.source, "pack_panels", "pplll")(
            weight.data_ptr(), packed.data_ptr(), n, k, gated
        )
        run = function(self.source, self.source, "ppppllll")
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
