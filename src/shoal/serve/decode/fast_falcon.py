"""The net of Falcon by the kernels of inference: steps of an LSTM, and a block that sees a tree.

The LSTM's products with its inputs are made for all places at once, those with its own state one
place after the other. The block is a model of one layer, computed as the target is.

Shapes: B sequences, T places, D hidden, L LSTM layers, R rows of any sequences, K key heads, d of
a head, S places seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.model.attention import attend
from shoal.model.drafters.falcon import SemiAutoregressive
from shoal.model.transformer import Transformer
from shoal.serve.decode.fast_heads import ready_linear

__all__ = ["FastFalcon", "Seeing", "State"]

# The block needs no embedding, and a model has one.
_NO_TOKENS = 64


class State(NamedTuple):
    """Behind some places of B sequences: what the LSTM carries on, two tensors [L, B, D]."""

    h: Tensor
    c: Tensor


class Seeing(NamedTuple):
    """Rows of one sequence that lie side by side, and what those that are asked see.

    Args:
        first: row.
        stop: the row behind the last.
        asked: the last so many of them have an output.
        keys: [S, K, d] of places before them.
        values: the same.
        mask: additive [asked, S + rows]; None where they see everything.
    """

    first: int
    stop: int
    asked: int
    keys: Tensor
    values: Tensor
    mask: Tensor | None


class FastFalcon:
    """The net, ready to guess.

    Args:
        net: trained.
        target: for whom; gives dtype, device and head.
        weights: format of the matrices.
    """

    def __init__(
        self, net: SemiAutoregressive, target: Transformer, weights: str = "plain"
    ) -> None:
        like = target.weight
        net = net.to(like.device, like.dtype).requires_grad_(False)
        self.nbytes = sum(one.numel() * one.element_size() for one in net.parameters())
        self.k, self.config, self._head = net.k, net.config, target
        self.layers = net.lstm.num_layers
        self.into, self.onto = [], []
        for layer in range(self.layers):
            into, onto = (getattr(net.lstm, f"weight_{kind}_l{layer}") for kind in ("ih", "hh"))
            bias = getattr(net.lstm, f"bias_ih_l{layer}") + getattr(net.lstm, f"bias_hh_l{layer}")
            # In, forget, out, cell: the three gates side by side.
            self.into.append(ready_linear(_gates(into), _gates(bias), weights))
            self.onto.append(ready_linear(_gates(onto), None, weights))
        config = net.config.model_copy(update={"vocab_size": _NO_TOKENS, "tied": True})
        shell = Transformer(config).to(like.device, like.dtype).requires_grad_(False)
        shell.blocks[0] = net.block
        if weights != "plain":
            for module in list(net.block.modules()):
                for name, child in list(module.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(module, name, ready_linear(child.weight, child.bias, weights))
        if target.head is not None:
            from shoal.model.accelerate import accelerate

            accelerate(shell)
        self._shell = shell
        self.heads = config.num_kv_heads, config.head_dim

    def begin(self, batch: int) -> State:
        """Before the first place."""
        size = (self.layers, batch, self.config.hidden)
        return State(self._head.weight.new_zeros(size), self._head.weight.new_zeros(size))

    def mixed(self, x_BTD: Tensor, state: State, lengths: Sequence[int]) -> tuple[Tensor, State]:
        """The LSTM over more places.

        Args:
            x_BTD: features and embeddings side by side [B, T, 2 D].
            state: before them.
            lengths: places of each sequence, falling; what lies behind them is not read.

        Returns:
            Outputs [B, T, D] and the state behind each sequence's last place.
        """
        active = [sum(length > place for length in lengths) for place in range(lengths[0])]
        hidden: list[Tensor] = []
        cells: list[Tensor] = []
        for layer in range(self.layers):
            gates_BTG = self.into[layer](x_BTD)
            h, c = state.h[layer].clone(), state.c[layer].clone()
            out = h.new_empty(*x_BTD.shape[:2], h.shape[1])
            width = h.shape[1]
            for place, count in enumerate(active):
                gates = gates_BTG[:count, place] + self.onto[layer](h[:count])
                open_ = gates[:, : 3 * width].sigmoid()
                new = gates[:, 3 * width :].tanh()
                carried = open_[:, width : 2 * width] * c[:count] + open_[:, :width] * new
                said = open_[:, 2 * width :] * carried.tanh()
                if count == len(h):
                    h, c = said, carried
                else:
                    h[:count], c[:count] = said, carried
                out[:count, place] = said
            hidden.append(h)
            cells.append(c)
            x_BTD = out
        return x_BTD, State(torch.stack(hidden), torch.stack(cells))

    def seen(
        self, x_RD: Tensor, position_R: Tensor, seeing: Sequence[Seeing]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Features k places further of the rows that are asked [Q, D], and keys and values of all.

        Args:
            x_RD: what :meth:`mixed` gave, rows of all sequences side by side.
            position_R: their places.
            seeing: what they see.
        """
        kept: list[Tensor] = []

        def mixer(layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
            kept.extend((k_NKd.clone(), v_NKd.clone()))
            out = torch.zeros_like(q_NHd)
            for one in seeing:
                asked = slice(one.stop - one.asked, one.stop)
                keys = torch.cat((one.keys, k_NKd[one.first : one.stop]))
                values = torch.cat((one.values, v_NKd[one.first : one.stop]))
                found = attend(
                    q_NHd[asked].transpose(0, 1).unsqueeze(0),
                    keys.transpose(0, 1).unsqueeze(0),
                    values.transpose(0, 1).unsqueeze(0),
                    one.mask,
                    causal=False,
                )
                out[asked] = found[0].transpose(0, 1)
            return out

        rows = [row for one in seeing for row in range(one.stop - one.asked, one.stop)]
        needed = None if len(rows) == len(x_RD) else torch.tensor(rows, device=x_RD.device)
        stream, branch = self._shell.through(x_RD.clone(), position_R, mixer, needed)
        return stream + branch, kept[0], kept[1]

    def best(self, features_QD: Tensor, width: int) -> Tensor:
        """The best tokens by these features [Q, W]."""
        return self._head.logits(features_QD).topk(width, -1).indices


def _gates(rows: Tensor) -> Tensor:
    """PyTorch has in, forget, cell, out."""
    one, two, cell, out = rows.chunk(4)
    return torch.cat((one, two, out, cell)).contiguous()
