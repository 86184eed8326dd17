"""The C++ recurrences, called with tensors."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.kernel.native import function as native
from shoal.kernel.pages import empty
from shoal.kernel.rnn.base import RecurrenceGradients, RecurrenceTrace
from shoal.kernel.rnn.call import Recurrence
from shoal.kernel.rnn.functions import Function, function
from shoal.kernel.rnn.fused import tiles_of
from shoal.kernel.rnn.shapes import wide
from shoal.plan.constrint.tiles import Tiling


@functools.cache
def _native(what: str, kind: str, dtype: torch.dtype, arguments: str) -> Callable[..., Any]:
    name = {torch.float32: "fp32", torch.float64: "fp64"}[dtype]
    return native(f"recurrence_{name}", f"{what}_{kind}_{name}", arguments)


def _lanes(dtype: torch.dtype) -> int:
    return 8 if dtype == torch.float64 else 16


def _at(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _shape(call: Recurrence, wx: Tensor, tiles: Tiling | None) -> Any:
    names = ("slices", "team", "together", "rows")
    cut = [1 if tiles is None else tiles[name] for name in names]
    narrow = call.dtype == "bf16"
    return (ctypes.c_int64 * 9)(*wx.shape[:2], call.heads, call.units, *cut, narrow)


def ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers alone, in this type and contiguous."""
    return tensor.detach().to(dtype).contiguous()


def _optional(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else ready(tensor, dtype)


def _forward_packed(R: Tensor) -> Tensor:
    """[N, tile, input, vector of the tile, gate, lane], tiles filled up with zeros."""
    lanes = _lanes(R.dtype)
    gates, heads, units, _ = R.shape
    vectors = 4 if gates == 1 and units > 2 * lanes else 1
    tiles = math.ceil(units / (lanes * vectors))
    filled = F.pad(R, (0, 0, 0, tiles * vectors * lanes - units))
    cut = filled.view(gates, heads, tiles, vectors, lanes, units)
    return cut.permute(1, 2, 5, 3, 0, 4).contiguous()


def _backward_packed(R: Tensor) -> Tensor:
    """[N, tile of inputs, gate, output, vector of the tile, lane]."""
    lanes = _lanes(R.dtype)
    gates, heads, units, _ = R.shape
    vectors = 4 if units > 2 * lanes else 1
    tiles = math.ceil(units / (lanes * vectors))
    filled = F.pad(R, (0, tiles * vectors * lanes - units))
    cut = filled.view(gates, heads, units, tiles, vectors, lanes)
    return cut.permute(1, 3, 0, 2, 4, 5).contiguous()


def buffers(
    call: Recurrence, wx: Tensor, dtype: torch.dtype, keep: bool, out: Tensor | None
) -> RecurrenceTrace:
    """Memory for the states of every step, and for what is kept of the gates."""
    what = function(call.function)
    batch, steps = wx.shape[:2]
    shape = (batch, steps, call.heads, call.units)
    gates = None
    if keep:
        gates = empty((batch, steps, what.kept, *shape[2:]), dtype)
    if out is not None:
        return RecurrenceTrace(out[0], out[1:], gates)
    rest = empty((len(what.states) - 1, *shape), dtype)
    return RecurrenceTrace(empty(shape, dtype), rest, gates)


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
    what, dtype = function(call.function), wide(wx.dtype)
    trace = buffers(call, wx, dtype, keep, out)
    lanes = _lanes(dtype)
    padded = call.heads * wx.shape[0] * math.ceil(call.units / lanes) * lanes
    scratch = torch.empty((1 + len(what.states)) * padded, dtype=dtype)
    packed = _forward_packed(R.detach())
    held = [ready(one, dtype) for one in (wx, bias, states)]
    shape = _shape(call, wx, tiles_of(call))
    run = _native(call.function, "forward", dtype, "ppppppppp")
    run(
        held[0].data_ptr(),
        packed.data_ptr(),
        held[1].data_ptr(),
        held[2].data_ptr(),
        trace.h.data_ptr(),
        trace.rest.data_ptr(),
        _at(trace.gates),
        scratch.data_ptr(),
        ctypes.addressof(shape),
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
    what, dtype = function(call.function), wide(wx.dtype)
    lanes, batch = _lanes(dtype), wx.shape[0]
    padded = math.ceil(call.units / lanes) * lanes
    tiles = tiles_of(call)
    slices = tiles["slices"]
    size = call.heads * batch * padded * (len(what.states) + 2 * what.products)
    scratch = torch.empty(size + slices * call.heads * len(what.gates) * padded, dtype=dtype)
    packed = _backward_packed(R.detach())
    begin = ready(states, dtype)
    held = [_optional(one, dtype) for one in (dh, drest, dlast)]
    dwx = empty(tuple(wx.shape), dtype)
    extra = len(what.gates) - len(what.inputs)
    dextra = torch.empty(*wx.shape[:2], extra, *wx.shape[3:], dtype=dtype)
    dbias = torch.empty(slices, len(what.gates), call.heads, call.units, dtype=dtype)
    dstates = torch.empty(states.shape, dtype=dtype)
    shape = _shape(call, wx, tiles)
    run = _native(call.function, "backward", dtype, "ppppppppppppppd")
    run(
        packed.data_ptr(),
        begin.data_ptr(),
        trace.h.data_ptr(),
        trace.rest.data_ptr(),
        _at(trace.gates),
        *(_at(one) for one in held),
        dwx.data_ptr(),
        dextra.data_ptr(),
        dbias.data_ptr(),
        dstates.data_ptr(),
        scratch.data_ptr(),
        ctypes.addressof(shape),
        clip,
    )
    dR = matrix_gradient(what, dwx, dextra, trace.h, begin[0])
    return RecurrenceGradients(dwx, dR, dbias.sum(0), dstates)


def matrix_gradient(
    what: Function, dwx: Tensor, dextra: Tensor, h: Tensor, first: Tensor
) -> Tensor:
    """Sum over rows and steps of a gate's gradient times the output before [products, N, D, D].

    Args:
        what: the function.
        dwx: gradients of the gates with an input [B, T, inputs, N, D].
        dextra: of those without [B, T, extra, N, D].
        h: outputs [B, T, N, D].
        first: output before the first step [B, 1, N, D].
    """
    batch, steps, heads, units = h.shape
    out = h.new_zeros(what.products, heads, units, units)
    extra = dextra.shape[2]
    gates = [dextra[:, :, gate] for gate in range(extra)]
    gates += [dwx[:, :, gate] for gate in range(what.products - extra)]
    for gate, d in enumerate(gates):
        torch.bmm(d[:, 0].permute(1, 2, 0), first[:, 0].transpose(0, 1), out=out[gate])
    # Whichever needs fewer products; both read the gradients where they are, and the outputs
    # for every gate while they are near.
    if batch <= steps:
        for b in range(batch if steps > 1 else 0):
            for gate, d in enumerate(gates):
                out[gate].baddbmm_(d[b, 1:].permute(1, 2, 0), h[b, :-1].transpose(0, 1))
    else:
        for t in range(1, steps):
            for gate, d in enumerate(gates):
                out[gate].baddbmm_(d[:, t].permute(1, 2, 0), h[:, t - 1].transpose(0, 1))
    return out


class NativeSteps:
    """The pointwise operations in C++, step by step.

    Args:
        wx: [B, T, inputs, N, D], in the type computed in and contiguous.
        bias: [gates, N, D], likewise.
        states: before the first step [S, B, 1, N, D], likewise.
        trace: memory for what comes out.
    """

    def __init__(
        self,
        call: Recurrence,
        wx: Tensor,
        bias: Tensor | None,
        states: Tensor,
        trace: RecurrenceTrace,
    ) -> None:
        self.what = function(call.function)
        self.held = (wx, bias, states)
        self.trace = trace
        self._point = _native(call.function, "point", wx.dtype, "ppppppppl")
        self._unpoint = _native(call.function, "unpoint", wx.dtype, "pppppppppppppl")
        self._z = _shape(call, wx, None)
        lanes = _lanes(wx.dtype)
        self.padded = math.ceil(call.units / lanes) * lanes
        self.call = call

    def forward(self, product: Tensor, t: int) -> None:
        """Step t, given its products [N, B, products, D]."""
        wx, bias, states = self.held
        self._point(
            wx.data_ptr(),
            product.data_ptr(),
            _at(bias),
            states.data_ptr(),
            self.trace.h.data_ptr(),
            self.trace.rest.data_ptr(),
            _at(self.trace.gates),
            ctypes.addressof(self._z),
            t,
        )

    def begin_backward(
        self, dh: Tensor | None, drest: Tensor | None, dlast: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for dwx, dextra, and the gradients of the products [N, B, products, D]."""
        wx, what, call = self.held[0], self.what, self.call
        batch = wx.shape[0]
        extra = len(what.gates) - len(what.inputs)
        self.given = tuple(_optional(one, wx.dtype) for one in (dh, drest, dlast))
        self.dwx = torch.empty_like(wx)
        self.dextra = wx.new_empty(*wx.shape[:2], extra, *wx.shape[3:])
        self.dproduct = wx.new_empty(call.heads, batch, what.products, call.units)
        self.carry = wx.new_zeros(len(what.states), call.heads, batch, self.padded)
        self.sums = wx.new_zeros(call.heads, batch, len(what.gates), self.padded)
        return self.dwx, self.dextra, self.dproduct

    def backward(self, t: int) -> None:
        """Step t: from the carried gradients of the states to those of gates and products."""
        self._unpoint(
            self.held[2].data_ptr(),
            self.trace.h.data_ptr(),
            self.trace.rest.data_ptr(),
            _at(self.trace.gates),
            *(_at(one) for one in self.given),
            self.dwx.data_ptr(),
            self.dextra.data_ptr(),
            self.carry.data_ptr(),
            self.dproduct.data_ptr(),
            self.sums.data_ptr(),
            ctypes.addressof(self._z),
            t,
        )
