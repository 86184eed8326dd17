"""The fused recurrence on GPUs: heads of up to 128 units, whose matrices stay on chip.

Source: Pöppel et al., FlashRNN: Optimizing Traditional RNNs on Modern Hardware, 2024 (the Triton
kernel).
"""

from __future__ import annotations

from typing import Any, ClassVar

from shoal.core.parts import part
from shoal.kernel.base import TritonKernel
from shoal.kernel.rnn.base import RecurrenceKernel

# Units of a head in fp32 and in types of 16 bits: four matrices must stay on chip.
_MOST = {"fp32": 64, "bf16": 128}


@part
class TritonRecurrence(TritonKernel, RecurrenceKernel):
    """One program per head and 16 rows of the batch, for all steps."""

    dtypes: ClassVar[tuple[str, ...]] = ("fp32", "bf16")
    memory_share: ClassVar[float] = 0.4
    compute_share: ClassVar[float] = 0.1
    step_s: ClassVar[float] = 2e-6
    calls: ClassVar[str] = "shoal.kernel.rnn.triton_calls"

    def _refuses(self, call: Any) -> str | None:
        reason = super()._refuses(call)
        if reason is not None:
            return reason
        if call.units > _MOST[call.dtype]:
            return (
                f"stores the matrices of a head on chip: at most {_MOST[call.dtype]} units in "
                f"{call.dtype}, not {call.units}; use more heads"
            )
        return None
