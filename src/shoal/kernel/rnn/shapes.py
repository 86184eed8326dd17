"""Checks of what goes into a recurrence, and its defaults."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from shoal.core.errors import KernelError, require
from shoal.kernel.calls import Device
from shoal.kernel.rnn.call import Recurrence
from shoal.kernel.rnn.functions import function
from shoal.kernel.tensors import name_of


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that is computed in."""
    return torch.promote_types(dtype, torch.float32)


def check(
    name: str, wx: Tensor, R: Tensor, bias: Tensor | None = None, states: Tensor | None = None
) -> None:
    """Refuse what does not fit together.

    Raises:
        KernelError: a shape or a type is wrong; names what was given and what is right.
    """
    what = function(name)
    require(
        wx.dim() == 5 and wx.numel() > 0,
        "rnn.wx",
        list(wx.shape),
        expected="[B, T, gates, heads, units], none of them 0",
        error=KernelError,
    )
    batch, _, gates, heads, units = wx.shape
    require(
        gates == len(what.inputs),
        "rnn.wx",
        list(wx.shape),
        expected=f"{len(what.inputs)} gates in dimension 2: {name} has "
        f"{', '.join(what.inputs)} from the input",
        error=KernelError,
    )
    wanted = {
        "R": (R, [what.products, heads, units, units]),
        "b": (bias, [len(what.gates), heads, units]),
        "states": (states, [len(what.states), batch, 1, heads, units]),
    }
    hints = {
        "R": f"{name} has recurrent products of {', '.join(what.gates[: what.products])}",
        "b": f"{name} has biases of {', '.join(what.gates)}",
        "states": f"the states of {name} are {', '.join(what.states)}, before the first step",
    }
    for key, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        require(
            list(tensor.shape) == shape,
            f"rnn.{key}",
            list(tensor.shape),
            expected=f"{shape} for wx {list(wx.shape)}",
            hint=hints[key],
            error=KernelError,
        )
        require(
            tensor.dtype == wx.dtype and tensor.device == wx.device,
            f"rnn.{key}",
            f"{tensor.dtype} on {tensor.device}",
            expected=f"{wx.dtype} on {wx.device}, as wx",
            error=KernelError,
        )
    name_of(wx.dtype)


def bias_of(name: str, R: Tensor, bias: Tensor | None) -> Tensor:
    """The bias, or zeros."""
    if bias is not None:
        return bias
    return R.new_zeros(len(function(name).gates), R.shape[1], R.shape[2])


def states_of(name: str, wx: Tensor, states: Tensor | None) -> Tensor:
    """The states before the first step, or zeros."""
    if states is not None:
        return states
    return wx.new_zeros(len(function(name).states), wx.shape[0], 1, *wx.shape[3:])


def call_of(name: str, wx: Tensor, *, backward: bool) -> Recurrence:
    """The call that these inputs are."""
    batch, steps, _, heads, units = wx.shape
    return Recurrence(
        name,
        batch,
        steps,
        heads,
        units,
        name_of(wx.dtype),
        cast(Device, wx.device.type),
        backward,
    )
