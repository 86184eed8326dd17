"""PyTorch's own product: the peer, and the fastest for many rows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import LinearCall
from shoal.kernel.protocols import Ready

if TYPE_CHECKING:
    from torch import Tensor


@part
class LibraryLinear(BaseKernel):
    """``torch.nn.functional.linear``, oneDNN or MKL on a CPU, cuBLAS on a GPU."""

    op: ClassVar[str] = "linear"
    backend: ClassVar[str] = "torch"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16", "fp16")
    memory_share: ClassVar[float] = 0.2
    compute_share: ClassVar[float] = 0.95

    def _prepare(self, call: LinearCall, weight_NK: Tensor, bias_N: Tensor | None = None) -> Ready:
        import torch.nn.functional as F

        return functools.partial(F.linear, weight=weight_NK, bias=bias_N)
