"""The pointwise half of a recurrence: what becomes of a state when the product is there.

Shapes: B batch, N heads, D units of a head, S states. ``wx_BGND`` holds what comes from the
input, one for each gate that has an input; ``rh_BGND`` the recurrent products, one for each gate
that has one; ``bias_GND`` one for each gate. The first state is the output.

Sources: Elman, Finding Structure in Time, 1990; Hochreiter and Schmidhuber, Long Short-Term
Memory, 1997; Cho et al., Learning Phrase Representations using RNN Encoder-Decoder, 2014 (GRU);
Beck et al., xLSTM: Extended Long Short-Term Memory, 2024 (sLSTM).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shoal.core.errors import KernelError, suggestion

if TYPE_CHECKING:
    from torch import Tensor


class Function(Protocol):
    """One kind of recurrence.

    Attributes:
        name: short name.
        states: names of the states, the output first.
        inputs: names of the gates with an input, in their order in wx.
        gates: names of all gates, in the order of the biases; those with a recurrent product
            come first.
        products: how many have a recurrent product.
        kept: numbers for each unit that the backward pass wants of the gates.
    """

    name: str
    states: tuple[str, ...]
    inputs: tuple[str, ...]
    gates: tuple[str, ...]
    products: int
    kept: int

    def step(self, wx_BGND: Tensor, rh_BGND: Tensor, bias_GND: Tensor, s_SBND: Tensor) -> Tensor:
        """The states after one more step [S, B, N, D]."""


class Lstm:
    """``c = sigmoid(f) c + sigmoid(i) tanh(z)``, ``h = sigmoid(o) tanh(c)``."""

    name = "lstm"
    states: tuple[str, ...] = ("h", "c")
    inputs: tuple[str, ...] = ("i", "f", "z", "o")
    gates: tuple[str, ...] = ("i", "f", "z", "o")
    products = 4
    kept = 4

    def step(self, wx_BGND: Tensor, rh_BGND: Tensor, bias_GND: Tensor, s_SBND: Tensor) -> Tensor:
        import torch

        i, f, z, o = (wx_BGND + rh_BGND + bias_GND).unbind(1)
        c = f.sigmoid() * s_SBND[1] + i.sigmoid() * z.tanh()
        return torch.stack([o.sigmoid() * c.tanh(), c])


class Gru:
    """``h = z h + (1 - z) tanh(n + r g)``: g is the recurrent product alone, n the input alone."""

    name = "gru"
    states: tuple[str, ...] = ("h",)
    inputs: tuple[str, ...] = ("r", "z", "n")
    gates: tuple[str, ...] = ("g", "r", "z", "n")
    products = 3
    kept = 4

    def step(self, wx_BGND: Tensor, rh_BGND: Tensor, bias_GND: Tensor, s_SBND: Tensor) -> Tensor:
        g = rh_BGND[:, 0] + bias_GND[0]
        r, z = (wx_BGND[:, :2] + rh_BGND[:, 1:] + bias_GND[1:3]).sigmoid().unbind(1)
        n = (wx_BGND[:, 2] + bias_GND[3] + r * g).tanh()
        return (z * s_SBND[0] + (1 - z) * n)[None]


class Elman:
    """``h = tanh(g)``."""

    name = "elman"
    states: tuple[str, ...] = ("h",)
    inputs: tuple[str, ...] = ("g",)
    gates: tuple[str, ...] = ("g",)
    products = 1
    kept = 0

    def step(self, wx_BGND: Tensor, rh_BGND: Tensor, bias_GND: Tensor, s_SBND: Tensor) -> Tensor:
        return (wx_BGND[:, 0] + rh_BGND[:, 0] + bias_GND[0]).tanh()[None]


class Slstm:
    """Exponential gates over a cell c and its normaliser n, kept finite by their maximum m.

    With ``a = log sigmoid(f) + m``: ``m' = max(a, i)``, ``i' = exp(i - m')``, ``f' = exp(a - m')``,
    ``c = f' c + i' tanh(z)``, ``n = max(f' n + i', 1)``, ``h = sigmoid(o) c / n``. Where n is 0
    the state is new, and ``m' = i``.
    """

    name = "slstm"
    states: tuple[str, ...] = ("h", "c", "n", "m")
    inputs: tuple[str, ...] = ("i", "f", "z", "o")
    gates: tuple[str, ...] = ("i", "f", "z", "o")
    products = 4
    kept = 4

    def step(self, wx_BGND: Tensor, rh_BGND: Tensor, bias_GND: Tensor, s_SBND: Tensor) -> Tensor:
        import torch
        import torch.nn.functional as F

        i, f, z, o = (wx_BGND + rh_BGND + bias_GND).unbind(1)
        _, c, n, m = s_SBND
        kept = F.logsigmoid(f) + m
        new = torch.where(n == 0, i, torch.maximum(kept, i))
        i, f = (i - new).exp(), (kept - new).clamp(max=0).exp()
        c = f * c + i * z.tanh()
        n = (f * n + i).clamp(min=1)
        return torch.stack([o.sigmoid() * c / n, c, n, new])


FUNCTIONS: dict[str, Function] = {made.name: made for made in (Lstm(), Gru(), Elman(), Slstm())}


def function(name: str) -> Function:
    """The function of this name.

    Raises:
        KernelError: there is none.
    """
    if name not in FUNCTIONS:
        raise KernelError(
            f"rnn.function = {name!r}: expected one of {', '.join(FUNCTIONS)}"
            + suggestion(name, FUNCTIONS)
        )
    return FUNCTIONS[name]
