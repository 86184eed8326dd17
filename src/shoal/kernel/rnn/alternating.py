"""One batched product a step, then one pointwise kernel: for heads too large to keep close.

Source: Pöppel et al., FlashRNN: Optimizing Traditional RNNs on Modern Hardware, 2024 (the
alternating kernel).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.rnn.base import Gradients, RecurrenceKernel, Trace
from shoal.kernel.rnn.call import Recurrence

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Alternating"]


@part
class Alternating(RecurrenceKernel):
    """PyTorch's batched product and C++ for the rest, at any size of a head."""

    backend: ClassVar[str] = "alternating"
    compiled: ClassVar[bool] = True
    memory_share: ClassVar[float] = 0.3
    compute_share: ClassVar[float] = 0.3
    step_s: ClassVar[float] = 3e-5

    def forward(
        self,
        call: Recurrence,
        wx: Tensor,
        R: Tensor,
        bias: Tensor,
        states: Tensor,
        *,
        keep: bool = False,
        out: Tensor | None = None,
    ) -> Trace:
        """See :class:`~shoal.kernel.rnn.base.RecurrenceKernel`."""
        from shoal.kernel.rnn.alternation import forward

        return forward(call, wx, R, bias, states, keep=keep, out=out)

    def backward(
        self,
        call: Recurrence,
        wx: Tensor,
        R: Tensor,
        bias: Tensor,
        states: Tensor,
        trace: Trace,
        dh: Tensor | None,
        drest: Tensor | None,
        dlast: Tensor | None,
        clip: float,
    ) -> Gradients:
        """See :class:`~shoal.kernel.rnn.base.RecurrenceKernel`."""
        from shoal.kernel.rnn.alternation import backward

        return backward(call, wx, R, states, trace, dh, drest, dlast, clip)
