"""Round to nearest: each weight by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.kernel.formats.base import BaseFormat
    from shoal.kernel.protocols import PackedMatrix
    from shoal.model.quantize.inputs import Inputs


@part
class RoundToNearest:
    """Round each weight to its nearest code; needs no calibration text.

    Args:
        clip_search: clip each group at the share, 0.8 to 1, of its largest weight with the smallest
            squared error.
    """

    calibrated: ClassVar[bool] = False

    clip_search: bool = False

    def rescale(self, weight_NK: Tensor, fmt: BaseFormat, inputs: Inputs) -> Tensor | None:
        """None: inputs stay as they are."""
        return None

    def quantize(
        self, weight_NK: Tensor, fmt: BaseFormat, inputs: Inputs | None = None
    ) -> PackedMatrix:
        """The nearest codes.

        Raises:
            KernelError: the format refuses the matrix.
        """
        from shoal.model.quantize.rounding import rounded

        return rounded(fmt, weight_NK, search=self.clip_search)
