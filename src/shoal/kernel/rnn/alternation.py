"""Products by PyTorch, a step at a time, and what lies between them in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from shoal.kernel.rnn.base import RecurrenceGradients, RecurrenceTrace
from shoal.kernel.rnn.call import Recurrence
from shoal.kernel.rnn.native_calls import NativeSteps, buffers, matrix_gradient, ready
from shoal.kernel.rnn.shapes import wide


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
    dtype = wide(wx.dtype)
    wx, R, bias, states = (ready(one, dtype) for one in (wx, R, bias, states))
    trace = buffers(call, wx, dtype, keep, out)
    gates, heads, units, _ = R.shape
    matrix_NDE = R.permute(1, 3, 0, 2).reshape(heads, units, gates * units)
    steps = NativeSteps(call, wx, bias, states, trace)
    product_NBE = wx.new_empty(heads, wx.shape[0], gates * units)
    before_BND = states[0, :, 0]
    for t in range(wx.shape[1]):
        torch.bmm(before_BND.transpose(0, 1), matrix_NDE, out=product_NBE)
        steps.forward(product_NBE, t)
        before_BND = trace.h[:, t]
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
    dtype = wide(wx.dtype)
    wx, R, states = (ready(one, dtype) for one in (wx, R, states))
    gates, heads, units, _ = R.shape
    matrix_NED = R.transpose(0, 1).reshape(heads, gates * units, units)
    steps = NativeSteps(call, wx, None, states, trace)
    dwx, dextra, dproduct = steps.begin_backward(dh, drest, dlast)
    carried_NBD = steps.carry[0, :, :, :units]
    dproduct_NBE = dproduct.view(heads, -1, gates * units)
    back_NBD = wx.new_empty(heads, wx.shape[0], units)
    for t in reversed(range(wx.shape[1])):
        steps.backward(t)
        torch.bmm(dproduct_NBE, matrix_NED, out=back_NBD)
        if clip:
            back_NBD.clamp_(-clip, clip)
        carried_NBD += back_NBD
    dstates = steps.carry[..., :units].permute(0, 2, 1, 3).unsqueeze(2).contiguous()
    dbias = steps.sums[..., :units].sum(1).transpose(0, 1).contiguous()
    dR = matrix_gradient(steps.what, dwx, dextra, trace.h, states[0])
    return RecurrenceGradients(dwx, dR, dbias, dstates)
