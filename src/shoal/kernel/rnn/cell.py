"""One step of an LSTM for a few rows, when its products are made: no gradients, no sequence.

The kernels of ``recurrence`` keep a matrix near the arithmetic over many steps. A net that makes
one or two steps and then does something else has its products made as any layer's are; this is
the rest of the step, and can be written down on a tape.

Shapes: B rows, D units. Gates lie side by side: in, forget, out, cell.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from shoal.core.native import cpu_flags
from shoal.kernel.native import function

Cell = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""``cell(into [B, 4 D], onto [B, 4 D], before [B, D], after [B, D], h [B, D], out [B, D])``: what
comes from the input, from the output before, and the cell before; the last three are written.
Rows of ``into`` and ``out`` may lie apart; cells are in fp32 or wider."""

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def lstm_cell(dtype: torch.dtype, device: torch.device) -> Cell:
    """The step for tensors of this type on this device.

    Args:
        dtype: of all but the cells.
        device: where they are.
    """
    if native(dtype, device):
        return _native(_NAMES[dtype])
    return reference


def native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the step is one call of C++, which a tape can hold."""
    return dtype in _NAMES and device.type == "cpu" and "avx512bw" in cpu_flags()


def reference(
    into: Tensor, onto: Tensor, before: Tensor, after: Tensor, h: Tensor, out: Tensor
) -> None:
    """The step by operators of PyTorch; see :data:`Cell`."""
    start, keep, give, new = (into.to(before.dtype) + onto.to(before.dtype)).chunk(4, -1)
    after.copy_(keep.sigmoid() * before + start.sigmoid() * new.tanh())
    h.copy_(give.sigmoid() * after.tanh())
    out.copy_(h)


@functools.cache
def _native(name: str) -> Cell:
    run = function("lstm", f"lstm_cell_{name}", "plppppplpll")

    def cell(
        into: Tensor, onto: Tensor, before: Tensor, after: Tensor, h: Tensor, out: Tensor
    ) -> None:
        rows, width = h.shape
        run(
            into.data_ptr(), into.stride(0), onto.data_ptr(), before.data_ptr(), after.data_ptr(),
            h.data_ptr(), out.data_ptr(), out.stride(0), 0, rows, width,
        )  # fmt: skip

    return cell


def side_by_side(rows: Tensor) -> Tensor:
    """Gates in our order, by rows of PyTorch's, which has in, forget, cell, out."""
    start, keep, new, give = rows.chunk(4)
    return torch.cat((start, keep, give, new))


def copied(source: Tensor, target: Tensor) -> None:
    """Copy numbers that lie side by side, in a way that a tape can hold."""
    function("lstm", "lstm_copy", "ppl")(
        source.data_ptr(), target.data_ptr(), source.numel() * source.element_size()
    )
