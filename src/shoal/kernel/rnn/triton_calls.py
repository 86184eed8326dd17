"""The Triton recurrences, called with tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernel.rnn import triton_code
from shoal.kernel.rnn.base import RecurrenceGradients, RecurrenceTrace
from shoal.kernel.rnn.call import Recurrence
from shoal.kernel.rnn.functions import function
from shoal.kernel.rnn.native_calls import buffers, matrix_gradient, ready

_NUMBER = {"lstm": 0, "gru": 1, "elman": 2, "slstm": 3}
# The least that a product of tiles takes.
_ROWS = 16


def _cut(call: Recurrence, wx: Tensor) -> tuple[tuple[int, int], dict[str, int]]:
    width = 16
    while width < call.units:
        width *= 2
    grid = (call.heads, -(-wx.shape[0] // _ROWS))
    # Triton's interpreter, on a CPU, does not multiply bf16.
    return grid, {
        "FN": _NUMBER[call.function],
        "WIDEN": not wx.is_cuda,
        "BB": _ROWS,
        "DP": width,
    }


def forward(
    call: Recurrence,
    wx: Tensor,
    R: Tensor,
    bias: Tensor,
    states: Tensor,
    *,
    keep: bool,
    out: Tensor | None = None,
) -> RecurrenceTrace:
    """See :meth:`shoal.kernel.rnn.base.RecurrenceKernel.forward`."""
    trace = buffers(call, wx, torch.float32, keep, out)
    grid, cut = _cut(call, wx)
    gates = trace.gates if trace.gates is not None else trace.h
    triton_code.forward[grid](
        wx.detach().contiguous(),
        R.detach().contiguous(),
        ready(bias, torch.float32),
        ready(states, torch.float32),
        trace.h,
        trace.rest,
        gates,
        *wx.shape[:2],
        call.heads,
        call.units,
        KEEP=trace.gates is not None and gates.numel() > 0,
        **cut,
    )
    return trace


def backward(
    call: Recurrence,
    wx: Tensor,
    R: Tensor,
    states: Tensor,
    trace: RecurrenceTrace,
    dh: Tensor | None,
    drest: Tensor | None,
    dlast: Tensor | None,
    clip: float,
) -> RecurrenceGradients:
    """See :meth:`shoal.kernel.rnn.base.RecurrenceKernel.backward`."""
    what, dtype = function(call.function), torch.float32
    begin = ready(states, dtype)
    given = [
        torch.zeros_like(like) if one is None else ready(one, dtype)
        for one, like in ((dh, trace.h), (drest, trace.rest), (dlast, begin))
    ]
    dwx = torch.empty(wx.shape, dtype=dtype, device=wx.device)
    extra = len(what.gates) - len(what.inputs)
    dextra = dwx.new_empty(*wx.shape[:2], extra, *wx.shape[3:])
    dstates = torch.empty_like(begin)
    grid, cut = _cut(call, wx)
    gates = trace.gates
    assert gates is not None
    triton_code.backward[grid](
        R.detach().contiguous(),
        begin,
        trace.h,
        trace.rest,
        gates,
        *given,
        dwx,
        dextra,
        dstates,
        float(clip),
        *wx.shape[:2],
        call.heads,
        call.units,
        # Beside the matrices there is no room for loads ahead.
        num_stages=1,
        **cut,
    )
    bias = torch.cat([dextra.sum((0, 1)), dwx.sum((0, 1))])
    return RecurrenceGradients(
        dwx, matrix_gradient(what, dwx, dextra, trace.h, begin[0]), bias, dstates
    )
