"""``rnn``: a recurrence over time, by whichever kernel is fastest here, with its gradients."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shoal.core.errors import KernelError, require
from shoal.kernel.dispatch import dispatch
from shoal.kernel.pages import empty
from shoal.kernel.rnn.base import RecurrenceKernel, RecurrenceTrace
from shoal.kernel.rnn.call import Recurrence
from shoal.kernel.rnn.loop import loop
from shoal.kernel.rnn.shapes import bias_of, call_of, check, states_of, wide


def rnn(
    wx: Tensor,
    R: Tensor,
    b: Tensor | None = None,
    states: Tensor | None = None,
    function: str = "lstm",
    backend: str = "auto",
    *,
    outputs: Literal["states", "hidden"] = "states",
    recompute: bool = False,
    clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """A recurrence over all steps; differentiable once.

    Args:
        wx: what comes from the input [B, T, gates with an input, N heads, D units].
        R: recurrent matrices [gates with a product, N, D outputs, D inputs].
        b: biases [gates, N, D]; zeros, if not given.
        states: before the first step [S, B, 1, N, D]; zeros, if not given.
        function: lstm, gru, elman or slstm (:mod:`shoal.kernel.rnn.functions`).
        backend: auto (the fastest), or a kernel of ``recurrence``: fused, alternating, triton,
            reference.
        outputs: all states, or the first alone, which is cheaper to differentiate.
        recompute: keep no gates for the backward pass; it computes them again.
        clip: bound of what the recurrent product sends back to a state, at every step.

    Returns:
        tuple: all states [S, B, T, N, D], or outputs [B, T, N, D]; and the last states
        [S, B, 1, N, D], which go in as ``states`` of the next chunk.

    Raises:
        KernelError: shapes or types do not fit together, or the backend refuses them.
    """
    check(function, wx, R, b, states)
    require(
        outputs in ("states", "hidden"),
        "rnn.outputs",
        outputs,
        expected="states or hidden",
        error=KernelError,
    )
    require(
        clip is None or clip > 0,
        "rnn.clip",
        clip,
        expected="a number above 0, or None",
        error=KernelError,
    )
    bias, begin = bias_of(function, R, b), states_of(function, wx, states)
    wanted = torch.is_grad_enabled() and any(one.requires_grad for one in (wx, R, bias, begin))
    call = call_of(function, wx, backward=wanted)
    kernel = dispatch(call, wanted=None if backend == "auto" else backend)
    assert isinstance(kernel, RecurrenceKernel)
    bound = clip or 0.0
    if kernel.traced:
        result = loop(function, wx, R, bias, begin, clip=bound).to(wx.dtype)
        return result if outputs == "states" else result[0], result[:, :, -1:]
    every = outputs == "states"
    main, last = _Recurrence.apply(  # type: ignore[no-untyped-call]
        wx, R, bias, begin, kernel, call, every, not recompute and wanted, bound
    )
    return main, main[:, :, -1:] if every else last


class _Recurrence(torch.autograd.Function):
    """A kernel with a backward pass of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        wx: Tensor,
        R: Tensor,
        bias: Tensor,
        states: Tensor,
        kernel: RecurrenceKernel,
        call: Recurrence,
        every: bool,
        keep: bool,
        clip: float,
    ) -> tuple[Tensor, Tensor]:
        dtype = wide(wx.dtype)
        out = None
        if every:
            shape = (states.shape[0], *wx.shape[:2], *wx.shape[3:])
            near = wx.device.type == "cpu"
            out = empty(shape, dtype) if near else wx.new_empty(shape, dtype=dtype)
        trace = kernel.forward(call, wx, R, bias, states, keep=keep, out=out)
        main = (trace.h if out is None else out).to(wx.dtype)
        last = trace.last().to(wx.dtype)
        ctx.settings = (kernel, call, every, clip)
        ctx.set_materialize_grads(False)
        if main.dtype == dtype:
            # An output is kept as it is given away, so that a change of it is noticed.
            ctx.save_for_backward(
                wx, R, bias, states, main, None if every else trace.rest, trace.gates
            )
        else:
            kept = trace.h if out is None else out
            ctx.save_for_backward(
                wx, R, bias, states, kept, None if every else trace.rest, trace.gates
            )
        if every:
            ctx.mark_non_differentiable(last)
        return main, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmain: Tensor | None, dlast: Tensor | None) -> tuple[Any, ...]:
        kernel, call, every, clip = ctx.settings
        wx, R, bias, states, main, rest, gates = ctx.saved_tensors
        trace = (
            RecurrenceTrace(main[0], main[1:], gates)
            if every
            else RecurrenceTrace(main, rest, gates)
        )
        if gates is None:
            trace = kernel.forward(call, wx, R, bias, states, keep=True)
        dh, drest = dmain, None
        if every and dmain is not None:
            dh, drest = dmain[0], dmain[1:] if dmain.shape[0] > 1 else None
        result = kernel.backward(
            call, wx, R, bias, states, trace, dh, drest, None if every else dlast, clip
        )
        gradients = (result.wx, result.R, result.bias, result.states)
        return (*(one.to(wx.dtype) for one in gradients), None, None, None, None, None)
