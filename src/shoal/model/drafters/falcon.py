"""A net over the target's features that gives the features of several places at once.

The input of place i is the target's feature f_i and the embedding of the token at i + 1, which
the feature has chosen; the output of place i is the feature of place i + k. So the last k inputs
give the next k features, and the target's head makes tokens of them. An LSTM ties the inputs
together, and one layer of attention lets the outputs of a block see the whole block.

With k = 1 the relaxed mask is the causal one, and the net guesses features one by one.

Source: Gao et al., Falcon, 2025, section 3.1.
Shapes: B sequences, T places, D hidden, S places seen.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.kernel.rnn.cell import native, side_by_side
from shoal.kernel.rnn.steps import lstm_steps
from shoal.model.attention import KVCache
from shoal.model.config import ModelConfig
from shoal.model.linear import DispatchedLinear
from shoal.model.rope import frequencies, tables_at
from shoal.model.transformer import TransformerBlock

State = tuple[Tensor, Tensor]
"""What an LSTM hands on: two tensors [layers, B, D]."""

# The backward pass of attention in reduced precision goes through so many queries at a time, and
# looks no further than their last place.
_QUERIES = 128


def relaxed_mask(length: int, k: int, dtype: torch.dtype, *, shift: int = 0) -> Tensor:
    """Additive mask [T, T]: a place sees those before it, and all of its own block of k.

    Args:
        length: T.
        k: places of a block.
        dtype: of the mask.
        shift: places of the first block that lie before the first place.
    """
    place = torch.arange(length)
    last = (place + shift) // k * k + k - 1 - shift
    hidden = place.unsqueeze(0) > last.unsqueeze(1)
    return torch.zeros(length, length, dtype=dtype).masked_fill_(hidden, float("-inf"))


class SemiAutoregressive(nn.Module):
    """LSTM layers, then a block of the target's kind."""

    def __init__(self, config: ModelConfig, k: int, lstm_layers: int = 2) -> None:
        super().__init__()
        self.config = config.model_copy(update={"num_layers": 1})
        self.k = k
        self.lstm = nn.LSTM(2 * config.hidden, config.hidden, lstm_layers, batch_first=True)
        self.block = TransformerBlock(self.config, 0)

    @property
    def _dtype(self) -> torch.dtype:
        return self.block.attention_norm.weight.dtype

    def cache(self, batch: int, capacity: int, dtype: torch.dtype) -> KVCache:
        """An empty cache for the layer of attention."""
        return KVCache(self.config, batch, capacity, dtype=dtype)

    def mixed(
        self, features_BTD: Tensor, embeds_BTD: Tensor, state: State | None = None
    ) -> tuple[Tensor, State]:
        """The LSTM over more places: what the block reads [B, T, D], and the state behind them.

        Args:
            features_BTD: of the places.
            embeds_BTD: of the tokens one place further.
            state: behind the places before; zero at the beginning.
        """
        device = features_BTD.device.type
        with torch.autocast(device, enabled=False):  # it has no reduced precision
            dtype = self._dtype
            both = torch.cat((features_BTD.to(dtype), embeds_BTD.to(dtype)), -1)
            out, state = self.lstm(both, state)
        return out, state

    def _begun(self, features_BTD: Tensor, embeds_BTD: Tensor) -> Tensor:
        """As :meth:`mixed` from the beginning, in reduced precision where that is wanted."""
        device = features_BTD.device
        dtype = torch.get_autocast_dtype(device.type)
        if not torch.is_autocast_enabled(device.type) or not native(dtype, device):
            return self.mixed(features_BTD, embeds_BTD)[0]
        x_BTD = torch.cat((features_BTD.to(dtype), embeds_BTD.to(dtype)), -1)
        for layer in range(self.lstm.num_layers):
            into, onto, one, other = (
                side_by_side(getattr(self.lstm, f"{name}_l{layer}").to(dtype))
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            x_BTD = lstm_steps(F.linear(x_BTD, into, one + other), onto, DispatchedLinear)
        return x_BTD

    def seen(
        self,
        x_BTD: Tensor,
        position_T: Tensor,
        mask: Tensor | None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The features k places further, [B, T, D].

        Args:
            x_BTD: what :meth:`mixed` gave.
            position_T: of the places.
            mask: additive, broadcastable to [B, 1, T, S]; None is causal.
            cache: keys and values of places before, appended to.
        """
        device = x_BTD.device.type
        exact = bool(_QUERIES % self.k) and torch.is_grad_enabled()
        reduced = torch.is_autocast_enabled(device) and not exact
        dtype = torch.get_autocast_dtype(device) if reduced else self._dtype
        cos, sin = tables_at(position_T.float(), *frequencies(self.config, 1), dtype)
        with torch.autocast(device, enabled=reduced):
            mask = None if mask is None else mask.to(dtype)
            out: Tensor = self.block(x_BTD.to(dtype), cos, sin, mask, cache)
        if cache is not None:
            cache.length += x_BTD.shape[1]
        return out

    def forward(self, features_BTD: Tensor, embeds_BTD: Tensor, *, shift: int = 0) -> Tensor:
        """The features k places further of every place, from the true ones: a training pass.

        Args:
            features_BTD: f_i.
            embeds_BTD: embedding of the token at i + 1.
            shift: of the blocks, see :func:`relaxed_mask`.
        """
        x_BTD = self._begun(features_BTD, embeds_BTD)
        length = x_BTD.shape[1]
        mask = None
        if self.k > 1:
            mask = relaxed_mask(length, self.k, x_BTD.dtype, shift=shift)[None, None]
        return self.seen(x_BTD, torch.arange(length), mask)
