"""Recurrent blocks: a state of fixed size instead of a cache that grows.

Shapes: B batch, T positions, D hidden, N heads, d units of a head, S states. The recurrence is
the operator ``recurrence`` (:mod:`shoal.kernel.rnn`): LSTM, GRU, Elman or sLSTM, by whichever
kernel is fastest here.

Sources: Beck et al., xLSTM: Extended Long Short-Term Memory, 2024 (the residual block around a
recurrence with heads); Jozefowicz et al., An Empirical Exploration of Recurrent Network
Architectures, 2015 (the bias of the forget gate).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.claims.lab.rnn.autograd import rnn
from shoal.core.errors import ModelError, require
from shoal.kernel.rnn.functions import function as function_of
from shoal.model.norm import RMSNorm


class RecurrentBlock(nn.Module):
    """``x + out(rnn(in(norm(x))))``, optionally followed by a gated feed-forward layer.

    Args:
        hidden: D, of the stream and of the recurrence.
        heads: N recurrent matrices of D / N units each.
        function: lstm, gru, elman or slstm.
        backend: kernel of the recurrence; auto takes the fastest.
        recompute: keep no gates for the backward pass.
        clip: bound of the gradient that the recurrent product sends back, at every step.
        feed_forward: inner width of the feed-forward layer; 0: there is none.
    """

    def __init__(
        self,
        hidden: int,
        heads: int = 1,
        function: str = "slstm",
        *,
        backend: str = "auto",
        recompute: bool = False,
        clip: float | None = None,
        feed_forward: int = 0,
    ) -> None:
        super().__init__()
        require(
            heads >= 1 and hidden >= heads and hidden % heads == 0,
            "rnn.heads",
            heads,
            expected=f"a divisor of hidden = {hidden}",
            error=ModelError,
        )
        what = function_of(function)
        self.function, self.backend, self.recompute, self.clip = function, backend, recompute, clip
        self.heads, self.units = heads, hidden // heads
        self.gates, self.states = len(what.inputs), len(what.states)
        self.norm = RMSNorm(hidden, 1e-6)
        self.input = nn.Linear(hidden, self.gates * hidden, bias=False)
        self.recurrent = nn.Parameter(torch.empty(what.products, heads, self.units, self.units))
        self.bias = nn.Parameter(torch.zeros(len(what.gates), heads, self.units))
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.feed_norm = RMSNorm(hidden, 1e-6) if feed_forward else None
        self.feed_in = nn.Linear(hidden, 2 * feed_forward, bias=False) if feed_forward else None
        self.feed_out = nn.Linear(feed_forward, hidden, bias=False) if feed_forward else None
        with torch.no_grad():
            self.recurrent.normal_(0, 1 / math.sqrt(self.units))
            if "f" in what.gates:
                self.bias[what.gates.index("f")] = 1.0

    def forward(self, x_BTD: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream after the block, and the state after its last position.

        Args:
            x_BTD: the stream.
            state: of the positions before these [S, B, 1, N, d]; new, if not given.
        """
        batch, steps, hidden = x_BTD.shape
        wx = self.input(self.norm(x_BTD)).view(batch, steps, self.gates, self.heads, self.units)
        out, last = rnn(
            wx,
            self.recurrent.to(wx.dtype),
            self.bias.to(wx.dtype),
            state,
            self.function,
            self.backend,
            outputs="hidden",
            recompute=self.recompute,
            clip=self.clip,
        )
        x_BTD = x_BTD + self.output(out.reshape(batch, steps, hidden))
        if self.feed_norm is not None and self.feed_in is not None and self.feed_out is not None:
            gate, value = self.feed_in(self.feed_norm(x_BTD)).chunk(2, -1)
            x_BTD = x_BTD + self.feed_out(F.silu(gate) * value)
        return x_BTD, last

    def state_bytes(self, length: int = 0) -> int:
        """Bytes of the state of one sequence: the same at every length."""
        return self.states * self.heads * self.units * self.recurrent.element_size()


class RecurrentModel(nn.Module):
    """Tokens to logits through recurrent blocks.

    Args:
        vocab_size: tokens.
        hidden: width of the stream.
        layers: blocks.
        heads: of each.
        function: lstm, gru, elman or slstm.
        outputs: logits of a position; the vocabulary, if not given.
        backend: kernel of the recurrences.
        feed_forward: inner width of the feed-forward layers; 0: none.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        layers: int = 1,
        heads: int = 1,
        function: str = "slstm",
        *,
        outputs: int | None = None,
        backend: str = "auto",
        feed_forward: int = 0,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.blocks = nn.ModuleList(
            RecurrentBlock(hidden, heads, function, backend=backend, feed_forward=feed_forward)
            for _ in range(layers)
        )
        self.norm = RMSNorm(hidden, 1e-6)
        self.output = nn.Linear(hidden, outputs or vocab_size, bias=False)

    def forward(
        self, tokens_BT: Tensor, states: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [B, T, V], and the state of every block.

        Raises:
            ModelError: the states are not one a block.
        """
        require(
            states is None or len(states) == len(self.blocks),
            "rnn.states",
            0 if states is None else len(states),
            expected=f"{len(self.blocks)}, one a block",
            error=ModelError,
        )
        x_BTD, after = self.embed(tokens_BT), []
        for index, block in enumerate(self.blocks):
            x_BTD, last = block(x_BTD, None if states is None else states[index])
            after.append(last)
        return self.output(self.norm(x_BTD)), after
