"""One batched product a step, then one pointwise kernel: for heads too large to keep close.

Source: Pöppel et al., FlashRNN: Optimizing Traditional RNNs on Modern Hardware, 2024 (the
alternating kernel).
"""

from __future__ import annotations

from typing import ClassVar

from shoal.core.parts import part
from shoal.kernel.rnn.base import RecurrenceKernel


@part
class AlternatingRecurrence(RecurrenceKernel):
    """PyTorch's batched product and C++ for the cell function, for any size of a head."""

    backend: ClassVar[str] = "alternating"
    compiled: ClassVar[bool] = True
    memory_share: ClassVar[float] = 0.3
    compute_share: ClassVar[float] = 0.3
    step_s: ClassVar[float] = 3e-5
    calls: ClassVar[str] = "shoal.kernel.rnn.alternation"
