"""The meaning of ``recurrence``: a loop over time, which PyTorch differentiates."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part
from shoal.kernel.rnn.base import RecurrenceKernel, RecurrenceTrace
from shoal.kernel.rnn.call import Recurrence

if TYPE_CHECKING:
    from torch import Tensor


@part
class ReferenceRecurrence(RecurrenceKernel):
    """Plain torch in fp32 (fp64 for fp64): a batched product and the cell function per step."""

    backend: ClassVar[str] = "reference"
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    dtypes: ClassVar[tuple[str, ...]] = ("fp64", "fp32", "bf16", "fp16")
    memory_share: ClassVar[float] = 0.1
    compute_share: ClassVar[float] = 0.1
    step_s: ClassVar[float] = 1.5e-4
    traced: ClassVar[bool] = True

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
    ) -> RecurrenceTrace:
        from shoal.kernel.rnn.loop import loop

        result = loop(call.function, wx, R, bias, states)
        return RecurrenceTrace(result[0], result[1:])
