"""PyTorch's operators in few passes over memory: what training computes where nothing is fused."""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.base import BaseKernel
from shoal.kernel.calls import PointwiseCall
from shoal.kernel.fused.trains import TrainableKernel


class _Library(TrainableKernel, BaseKernel):
    backend: ClassVar[str] = "torch"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16", "fp16")
    memory_share: ClassVar[float] = 0.25
    compute_share: ClassVar[float] = 0.1
    call_s: ClassVar[float] = 6e-5

    def _refuses(self, call: PointwiseCall) -> str | None:
        return None if call.gradient else "is for training alone"


@part
class LibraryRmsNorm(_Library):
    """Statistics in fp32; the backward pass uses layer norm's operator with a mean of zero."""

    op: ClassVar[str] = "rms_norm"


@part
class LibraryRope(_Library):
    """Rotation and split into one buffer in each pass; norms are separate operators."""

    op: ClassVar[str] = "rope"


@part
class LibrarySwiglu(_Library):
    """Two operators in each pass, with autograd."""

    op: ClassVar[str] = "swiglu"
