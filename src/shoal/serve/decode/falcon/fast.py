"""The net of Falcon by the kernels of inference: steps of an LSTM, and a block that sees a tree.

The LSTM's products with its inputs are made for all places at once, those with its own state one
place after the other. The block is a model of one layer, computed as the target is, over a paged
cache of its own.

Shapes: E sequences that are read, T places of each, k of which go on, D hidden, L LSTM layers,
R rows of a sequence in the block, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.kernel.rnn.cell import lstm_cell, side_by_side
from shoal.model.accelerate import accelerate
from shoal.model.attention import Mixer, attend
from shoal.model.drafters.falcon import SemiAutoregressive
from shoal.model.transformer import Transformer
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.captured import TreeRows
from shoal.serve.decode.heads.fast import ready_linear

# The block needs no embedding, and a model has one.
_NO_TOKENS = 64


class FalconState(NamedTuple):
    """Behind some places of E sequences: what the LSTM carries on, two tensors [L, E, D].

    Cells are in fp32 or wider.
    """

    h: Tensor
    c: Tensor


class FalconInput(NamedTuple):
    """What a pass reads.

    Args:
        x: features and embeddings side by side [E, T, 2 D].
        lengths: places of each sequence, falling; what lies behind them is not read.
        state: before them.
        earlier: [E, R - T, D] what the LSTM gave at the places before, where the block is to read
            these once more, since the last k rows of a sequence see each other; None for none.
        branches: whose rows they are in the block, sequence after sequence, and what rows see.
        everything: the last k rows of each sequence see all that stands there.
    """

    x: Tensor
    lengths: Sequence[int]
    state: FalconState
    earlier: Tensor | None
    branches: Sequence[TreeRows]
    everything: bool


class FalconOutput(NamedTuple):
    """What a pass makes.

    Args:
        features: of the next k places of each sequence [E, k, D].
        logits: of the tokens behind them [E, k, V].
        outputs: of the LSTM at the rows of the block [E, R, D]; padded where lengths differ.
        state: behind each sequence's last place.
    """

    features: Tensor
    logits: Tensor
    outputs: Tensor
    state: FalconState


class FastFalcon:
    """The net, prepared for drafting.

    Args:
        net: trained.
        target: for whom; gives dtype, device and head.
        weights: format of the matrices, but for those that the LSTM reads at every place.

    Attributes:
        shell: a model of one layer, the block.
    """

    def __init__(
        self, net: SemiAutoregressive, target: Transformer, weights: str = "plain"
    ) -> None:
        like = target.weight
        net = net.to(like.device, like.dtype).requires_grad_(False)
        self.nbytes = sum(one.numel() * one.element_size() for one in net.parameters())
        self.k, self.config, self._head = net.k, net.config, target
        self.layers = net.lstm.num_layers
        self._cell = lstm_cell(like.dtype, like.device)
        self._wide = torch.promote_types(like.dtype, torch.float32)
        self._into, self._onto = [], []
        for layer in range(self.layers):
            into, onto = (getattr(net.lstm, f"weight_{kind}_l{layer}") for kind in ("ih", "hh"))
            bias = getattr(net.lstm, f"bias_ih_l{layer}") + getattr(net.lstm, f"bias_hh_l{layer}")
            self._into.append(ready_linear(side_by_side(into), side_by_side(bias), weights))
            # Read at every place: what lies in the caches is not read faster in fewer bits.
            self._onto.append(ready_linear(side_by_side(onto), None, "plain"))
        config = net.config.model_copy(update={"vocab_size": _NO_TOKENS, "tied": True})
        shell = Transformer(config).to(like.device, like.dtype).requires_grad_(False)
        shell.blocks[0] = net.block
        if weights != "plain":
            for module in list(net.block.modules()):
                for name, child in list(module.named_children()):
                    if isinstance(child, nn.Linear):
                        setattr(module, name, ready_linear(child.weight, child.bias, weights))
        if target.head is not None:
            accelerate(shell)
        self.shell = shell

    @property
    def weight(self) -> Tensor:
        """The target's embedding."""
        return self._head.weight

    def begin(self, sequences: int) -> FalconState:
        """Before the first place."""
        size = (self.layers, sequences, self.config.hidden)
        return FalconState(
            self.weight.new_zeros(size), self.weight.new_zeros(size, dtype=self._wide)
        )

    def mixed(
        self, x_ETX: Tensor, state: FalconState, lengths: Sequence[int], out_ETD: Tensor
    ) -> FalconState:
        """The LSTM over more places; its state behind each sequence's last one.

        Args:
            x_ETX: features and embeddings side by side.
            state: before them.
            lengths: places of each sequence, falling.
            out_ETD: what it gives; written, where there is a place.
        """
        sequences, places, _ = x_ETX.shape
        active = [sum(length > place for length in lengths) for place in range(places)]
        width = self.config.hidden
        after = FalconState(state.h.new_empty(state.h.shape), state.c.new_empty(state.c.shape))
        for layer in range(self.layers):
            gates_ETG = self._into[layer](x_ETX).view(sequences, places, 4 * width)
            last = layer == self.layers - 1
            whole = out = out_ETD if last else x_ETX.new_empty(sequences, places, width)
            h, c = state.h[layer], state.c[layer]
            new_h, new_c = after.h[layer], after.c[layer]
            for place, count in enumerate(active):
                if count < len(h):
                    h, c, new_h, new_c = h[:count], c[:count], new_h[:count], new_c[:count]
                    gates_ETG, out = gates_ETG[:count], out[:count]
                onto = self._onto[layer](h)
                self._cell(gates_ETG[:, place], onto, c, new_c, new_h, out[:, place])
                h, c = new_h, new_c
            x_ETX = whole
        return after

    def block(
        self, x_ND: Tensor, position_N: Tensor, mixer: Mixer, rows_R: Tensor | None = None
    ) -> Tensor:
        """Features k places further of rows; ``x_ND`` may change.

        Args:
            x_ND: what the LSTM gave, rows of all sequences side by side.
            position_N: their places.
            mixer: keeps their keys and values, and knows what they see.
            rows_R: those that are wanted; all, if not given.
        """
        stream_RD, branch_RD = self.shell.through(x_ND, position_N, mixer, rows_R)
        # The norm is of the model that the block is taken for; it adds what is left on its way.
        return self.shell.norm.after(stream_RD, branch_RD)[0]

    def logits(self, features_RD: Tensor) -> Tensor:
        """Scores of the tokens behind features."""
        return self._head.logits(features_RD)

    def read(self, reading: FalconInput, cache: PagedCache) -> FalconOutput:
        """A pass, computed operator by operator.

        Args:
            reading: what is read.
            cache: keys and values of the places before; those of the rows are added.
        """
        x, lengths, earlier = reading.x, list(reading.lengths), reading.earlier
        sequences, places = x.shape[:2]
        before = 0 if earlier is None else earlier.shape[1]
        width = self.config.hidden
        outputs = x.new_empty(sequences, before + places, width)
        if earlier is not None:
            outputs[:, :before] = earlier
        state = reading.state
        if places:
            state = self.mixed(x, state, lengths, outputs[:, before:])
        rows = [outputs[number, : before + own] for number, own in enumerate(lengths)]
        stops = np.cumsum([len(one) for one in rows])
        request = np.concatenate([np.arange(stop - self.k, stop) for stop in stops])
        mixer = _Gathered(cache, reading, request)
        device = x.device
        place_N = torch.from_numpy(
            np.concatenate([one.root + one.depth for one in reading.branches])
        )
        features = self.block(
            torch.cat(rows), place_N.to(device), mixer, torch.from_numpy(request).to(device)
        )
        logits = self.logits(features)
        return FalconOutput(
            features.view(sequences, self.k, width),
            logits.view(sequences, self.k, -1),
            outputs,
            state,
        )

    def best(self, logits_EkV: Tensor, width: int) -> np.ndarray:
        """The best tokens [E, k, W]."""
        wide = logits_EkV.to(self._wide)
        array: np.ndarray = wide.topk(width, -1).indices.cpu().numpy()
        return array


class _Gathered:
    """A :class:`~shoal.model.attention.Mixer` that copies what rows see out of the cache.

    Args:
        cache: of the net.
        reading: whose rows are asked.
        asked: rows that have an answer, the last k of every sequence.
    """

    def __init__(self, cache: PagedCache, reading: FalconInput, asked: np.ndarray) -> None:
        self._cache, self._reading, self._asked = cache, reading, asked
        size = cache.block_size
        self._blocks = [
            np.asarray(one.blocks, dtype=np.int64)[: -(-one.stop // size)]
            for one in reading.branches
        ]
        places = [np.arange(one.start, one.stop) for one in reading.branches]
        slots = [
            blocks[at // size] * size + at % size
            for blocks, at in zip(self._blocks, places, strict=True)
        ]
        self._slots = torch.from_numpy(np.concatenate(slots)).to(cache.device)

    def __call__(self, layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
        """See :class:`~shoal.model.attention.Mixer`; rows that are not asked get zeros."""
        cache = self._cache
        cache.write(layer, self._slots, k_NKd, v_NKd)
        out = torch.zeros_like(q_NHd)
        first = 0
        for one, blocks in zip(self._reading.branches, self._blocks, strict=True):
            stop = first + len(one.depth)
            own = self._asked[(self._asked >= first) & (self._asked < stop)]
            rows = torch.from_numpy(own).to(q_NHd.device)
            table = torch.from_numpy(blocks[None]).to(cache.device)
            keys, values = (side[:, : one.stop] for side in cache.gather(layer, table))
            mask = None
            if not self._reading.everything:
                hidden = one.seen[own - first, None] >> np.arange(one.stop - one.root) & 1 == 0
                mask = q_NHd.new_zeros(len(own), one.stop)
                mask[:, one.root :].masked_fill_(
                    torch.from_numpy(hidden).to(mask.device), float("-inf")
                )
            result = attend(
                q_NHd[rows].transpose(0, 1).unsqueeze(0),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                mask,
                causal=False,
            )
            out[rows] = result[0].transpose(0, 1)
            first = stop
        return out
