"""Four bits at the quantiles of a normal distribution: ``nf4-g64``.

A code is the place of one of 16 numbers in [-1, 1], of which one is 0; a weight is the number of
its code times the largest magnitude of its group. Where weights are normal, as trained ones nearly
are, all codes are used equally often.

Source: Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, 2023, section 3 and
appendix E, where the 16 numbers are.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from shoal.core.errors import KernelError
from shoal.core.parts import part
from shoal.kernel.formats.base import BaseFormat, Grid, half_scale

if TYPE_CHECKING:
    import torch
    from torch import Tensor

CODEBOOK = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@functools.cache
def numbers(device: torch.device) -> tuple[Tensor, Tensor]:
    """The 16 numbers, and what lies half way between neighbours."""
    import torch

    with torch.inference_mode(False):
        table = torch.tensor(CODEBOOK, dtype=torch.float32, device=device)
        return table, (table[1:] + table[:-1]) / 2


def nearest_codes(x: Tensor) -> Tensor:
    """Codes of the nearest numbers, uint8; beyond 1 the code of 1."""
    import torch

    _, between = numbers(x.device)
    return torch.bucketize(x.contiguous(), between).to(torch.uint8)


@part
class Nf(BaseFormat):
    """The 16 values of NF4, and an fp16 scale per group.

    Args:
        width: bits of a code; only the published NF4 is supported.
        group: weights along K that share a scale; None for all of a row.
    """

    width: Literal[4] = 4
    group: Annotated[int, Field(ge=1)] | None = 64

    @classmethod
    def read(cls, digits: str, text: str) -> dict[str, object]:
        """Options from the 4 of nf4.

        Raises:
            KernelError: other widths have no numbers.
        """
        if digits != "4":
            raise KernelError(
                f"weight format {text!r}: {digits or 'nothing'!r} is not a width; expected nf4"
            )
        return {"width": 4}

    def grid(self, weight_NGg: Tensor, clip: Tensor | float = 1.0) -> dict[str, Tensor]:
        return {"scales": half_scale(weight_NGg.abs().amax(-1) * clip, self)}

    def encode(self, weight: Tensor, grid: Grid) -> Tensor:
        """Nearest codes; of a group of zeros, the code of zero."""
        import torch

        scale = grid["scales"].float()
        return nearest_codes(weight / torch.where(scale > 0, scale, 1.0))

    def decode(self, codes: Tensor, grid: Grid) -> Tensor:
        table, _ = numbers(codes.device)
        return table[codes.long()] * grid["scales"].float()
