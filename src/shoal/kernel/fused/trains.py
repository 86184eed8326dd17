"""What the fused operators of all backends share: functions for training beside those of inference.

Where a call says ``gradient``, what ``prepare`` gives is differentiable, and the weights, which
change from step to step, are given with every call:

============  ============  ======================================================================
operator      constants     ready
============  ============  ======================================================================
``rms_norm``  eps           ``(x[..., N], weight[N]) -> y``, in the dtype of x
``swiglu``    none          ``(x[..., 2F]) -> y[..., F]``
``rope``      H, K, eps     ``(qkv[B, T, H + 2K, d], cos[T, C], sin[T, C], q_norm[d] or None,
                            k_norm[d] or None) -> q[B, T, H, d], k, v[B, T, K, d]``
============  ============  ======================================================================
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar

from shoal.kernel.protocols import Ready


class TrainableKernel:
    """Mixed into a kernel: a call with ``gradient`` is prepared by ``BACKEND_training.py``."""

    op: ClassVar[str]
    backend: ClassVar[str]

    def prepare(self, call: Any, *constants: Any) -> Ready:
        """See :class:`~shoal.kernel.protocols.Kernel`; differentiable if the call says so."""
        if not call.gradient:
            ready: Ready = super().prepare(call, *constants)  # type: ignore[misc]
            return ready
        self._require(call)  # type: ignore[attr-defined]
        module = import_module(f"shoal.kernel.fused.{self.backend}_training")
        made: Ready = getattr(module, self.op)(*constants)
        return made
