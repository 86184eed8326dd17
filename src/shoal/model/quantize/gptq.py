"""GPTQ: round column by column, and let the columns to come make up for each error.

With ``H = 2 X X^T + lambda I`` over the calibration inputs X, rounding a weight of column k costs
``(w - q)^2 / [H^-1]_kk`` if the columns behind it then move by ``-(w - q) / [H^-1]_kk`` times
row k of ``H^-1``. Those rows, each after the columns before it are fixed, are the rows of the upper
Cholesky factor of ``H^-1``. Within a block of 128 columns the errors are fed forward at once, to
all others when the block is done.

Source: Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers, 2023; two of four: Frantar and Alistarh, SparseGPT, 2023.
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

_BLOCK = 128
# Times that lambda is raised tenfold before a matrix counts as no Gram matrix.
_TRIES = 6


@part
class GPTQ:
    """Compensate rounding errors in later columns through the inverse Cholesky factor.

    Args:
        damp: lambda, as a share of the mean of the diagonal of ``2 X X^T``.
        act_order: quantize the columns with the largest inputs first, with scales fixed before;
            groups remain groups of neighbours, so the stored format does not change.
        clip_search: clip each group at the share, 0.8 to 1, of its largest weight with the smallest
            squared error, weighted by the inputs.
    """

    calibrated: ClassVar[bool] = True

    damp: Annotated[float, Field(gt=0, le=1)] = 0.01
    act_order: bool = False
    clip_search: bool = True

    def rescale(self, weight_NK: Tensor, fmt: BaseFormat, inputs: Inputs) -> Tensor | None:
        """None: inputs stay as they are."""
        return None

    def quantize(
        self, weight_NK: Tensor, fmt: BaseFormat, inputs: Inputs | None = None
    ) -> PackedMatrix:
        """The codes that keep the layer's outputs on the calibration text.

        Raises:
            KernelError: the format refuses the matrix.
            ModelError: no inputs are given, they are not finite, or the options do not go together.
        """
        import torch

        if inputs is None:
            raise ModelError("quantizer gptq: it needs inputs of the layer; give calibration text")
        if self.act_order and fmt.keeps_half:
            raise ModelError(
                "quantizer.gptq.act_order = True: of every four neighbours two are kept in format "
                f"{fmt}, so columns go in order; leave act_order out"
            )
        weight = fmt.groups(weight_NK).flatten(1).clone()
        n, k = weight.shape
        group = fmt.group_of(k)
        importance = inputs.importance
        grid = fmt.grid(weight.view(n, -1, group))
        order = torch.arange(k, device=weight.device)
        if self.act_order:
            grid = self._grid(fmt, weight.view(n, -1, group), importance.view(-1, group))
            order = importance.argsort(descending=True, stable=True)
        factor = self._factor(inputs.gram_KK[order][:, order])
        weight = weight[:, order]
        codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
        keep = torch.ones(n, k, dtype=torch.bool, device=weight.device)
        columns = order.tolist()
        # Whole groups where they fit, so that a group's scale sees all errors before it.
        block = _BLOCK // group * group if group < _BLOCK else _BLOCK
        for start in range(0, k, block):
            stop = min(start + block, k)
            errors = torch.empty(n, stop - start, device=weight.device)
            for at in range(start, stop):
                column = columns[at]
                if column % group == 0 and not self.act_order:
                    ahead = weight[:, at : at + group]
                    if fmt.keeps_half:
                        ahead = ahead * fmt.halve(ahead / factor.diagonal()[at : at + group])
                    fresh = self._grid(fmt, ahead[:, None], importance[None, at : at + group])
                    for name, tensor in fresh.items():
                        grid[name][:, column // group] = tensor[:, 0]
                if fmt.keeps_half and at % 4 == 0:
                    worth = weight[:, at : at + 4] / factor.diagonal()[at : at + 4]
                    keep[:, at : at + 4] = fmt.halve(worth)
                here = {name: tensor[:, column // group] for name, tensor in grid.items()}
                codes[:, column] = fmt.encode(weight[:, at], here)
                meant = fmt.decode(codes[:, column], here) * keep[:, at]
                error = (weight[:, at] - meant) / factor[at, at]
                weight[:, at:stop].addr_(error, factor[at, at:stop], alpha=-1)
                errors[:, at - start] = error
            weight[:, stop:].addmm_(errors, factor[start:stop, stop:], alpha=-1)
        return fmt.pack(codes, grid, keep if fmt.keeps_half else None)

    def _grid(
        self, fmt: BaseFormat, weight_NGg: Tensor, importance_Gg: Tensor
    ) -> dict[str, Tensor]:
        from shoal.model.quantize.rounding import best_grid

        if self.clip_search:
            return best_grid(fmt, weight_NGg, importance_Gg)
        return fmt.grid(weight_NGg)

    def _factor(self, gram_KK: Tensor) -> Tensor:
        """The upper Cholesky factor of the inverse of H, fp32.

        Raises:
            ModelError: H is not positive, however much is added to its diagonal.
        """
        import torch

        hessian = 2 * gram_KK.double()
        mean = float(hessian.diagonal().mean())
        damp = self.damp * mean if mean > 0 else 1.0
        identity = torch.eye(len(hessian), dtype=torch.float64, device=hessian.device)
        for _ in range(_TRIES):
            root, failed = torch.linalg.cholesky_ex(hessian + damp * identity)
            if not int(failed):
                inverse = torch.cholesky_inverse(root)
                factor, failed = torch.linalg.cholesky_ex(inverse, upper=True)
                if not int(failed) and bool(factor.isfinite().all()):
                    upper: Tensor = factor.float()
                    return upper
            damp *= 10
        raise ModelError(
            f"quantizer.gptq: X X^T of {len(hessian)} inputs has no Cholesky factor, even with "
            f"{damp / 10:g} added to its diagonal; are all activations of the model finite?"
        )
