"""AWQ: before rounding, make the inputs that are large smaller, and their weights larger.

A weight that is multiplied by s and whose input is divided by s loses a relative 1/s as much in
rounding, as long as the scale of its group stays. The factors are ``s = mean|x|^alpha`` for each
input; of 20 values of alpha the one is taken that changes the layer's outputs on the
calibration text least. The division goes into whatever makes the inputs: a norm's weight, the
rows of another matrix.

Source: Lin et al., AWQ: Activation-aware Weight Quantization for LLM Compression and
Acceleration, 2024.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from shoal.core.errors import ModelError
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.formats.base import BaseFormat
    from shoal.kernel.protocols import PackedMatrix
    from shoal.model.quantize.inputs import Inputs

# Rows over which a value of alpha is judged: their mean differs little from that of all.
_JUDGED_ROWS = 1024


@part
class AWQ:
    """Scale weights by a power of the input magnitude, then round each to its nearest code.

    Args:
        points: number of values of alpha in [0, 1) to try.
        clip_search: clip each group at the share, 0.8 to 1, of its largest weight with the smallest
            squared error, weighted by the inputs.
    """

    calibrated: ClassVar[bool] = True

    points: Annotated[int, Field(ge=1, le=1000)] = 20
    clip_search: bool = True

    def rescale(self, weight_NK: Tensor, fmt: BaseFormat, inputs: Inputs) -> Tensor | None:
        """Factors [K] for the columns of the weight, or None if none is better.

        Raises:
            KernelError: the format refuses the matrix.
        """
        from shoal.model.quantize.rounding import rounded

        stride = max(1, len(weight_NK) // _JUDGED_ROWS)
        weight = weight_NK[::stride].detach().float()
        best, least = None, float("inf")
        for point in range(self.points):
            factor = inputs.size.pow(point / self.points).clamp_(min=1e-4)
            factor = factor / (factor.max() * factor.min()).sqrt()
            packed = rounded(fmt, weight * factor)
            error = fmt.dequantize(packed) / factor - weight
            loss = float((error @ inputs.gram_KK).mul_(error).sum())
            if loss < least:
                best, least = (factor if point else None), loss
        return best

    def quantize(
        self, weight_NK: Tensor, fmt: BaseFormat, inputs: Inputs | None = None
    ) -> PackedMatrix:
        """The nearest codes.

        Raises:
            KernelError: the format refuses the matrix.
            ModelError: no inputs are given.
        """
        from shoal.model.quantize.rounding import rounded

        if inputs is None:
            raise ModelError("quantizer awq: it needs inputs of the layer; give calibration text")
        return rounded(fmt, weight_NK, importance_K=inputs.importance, search=self.clip_search)
