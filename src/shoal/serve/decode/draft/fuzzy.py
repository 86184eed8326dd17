"""A draft some of whose layers read the same, stale input, so that their attention is one.

Layers l .. l + n - 1 of a group compute attention from what enters the group; then the group is
walked in order: what a layer's attention gave is added, and its feed-forward layer reads the
stream as it is then. Or the feed-forward layers, too, read one stream: what enters the group and
what the attention of all its layers gave. Only guesses come of it: what the model verifies is
another model.

Shapes: N rows, D hidden, n layers of a group, H query heads, K key/value heads, d head_dim.

Source: Wu et al., EasySpec, 2025, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ModelError
from shoal.kernel.protocols import Ready
from shoal.model.attention import Mixer, Turn
from shoal.model.config import ModelConfig
from shoal.model.transformer import Transformer, TransformerBlock
from shoal.plan.trees.fuzzy import Groups, spans
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.captured import Recording, Recordings, TreeRows
from shoal.serve.decode.draft.stacked import StackedLayers


@runtime_checkable
class GroupMixer(Protocol):
    """A mixer that also answers the queries of several layers in one call."""

    def positions(self, layers: int) -> Tensor:
        """Places of all rows, each as often as there are layers [N * n]."""

    def group(self, first: int, layers: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What N * n queries see, row by row and layer by layer [N * n, H, d]."""


class FuzzyModel:
    """A draft by groups; a :class:`~shoal.serve.decode.draft.net.DraftModelNet`.

    Args:
        stacked: for ``realise: fused``; layer by layer without.
        full: feed-forward layers of a group read one stream, as their attention does.

    Raises:
        ModelError: its blocks do not normalise, attend, normalise and feed forward, in this order.
    """

    def __init__(
        self,
        draft: Transformer,
        groups: Groups,
        stacked: dict[int, StackedLayers] | None = None,
        *,
        full: bool = False,
    ) -> None:
        for block in draft.blocks:
            if not isinstance(block, TransformerBlock) or block.parallel:
                raise ModelError(
                    f"model {draft.config.name}: its blocks are not pre-norm attention, then "
                    "pre-norm feed-forward; layers of such a draft cannot read stale input. Use "
                    "speculative: draft_model"
                )
        self.draft, self.groups = draft, groups
        self._spans = spans(groups, len(draft.blocks))
        self._blocks = [block for block in draft.blocks if isinstance(block, TransformerBlock)]
        self._stacked, self._full = stacked or {}, full

    @property
    def config(self) -> ModelConfig:
        return self.draft.config

    @property
    def weight(self) -> Tensor:
        return self.draft.weight

    def flat(
        self, tokens_N: Tensor, position_N: Tensor, mixer: Mixer, rows_R: Tensor | None = None
    ) -> Tensor:
        x_ND, branch_ND = self.through(self.draft.embed(tokens_N), position_N, mixer)
        if rows_R is not None:
            x_ND, branch_ND = x_ND[rows_R], branch_ND[rows_R]
        return self.finished(x_ND, branch_ND)

    def finished(self, x_ND: Tensor, branch_ND: Tensor) -> Tensor:
        return self.draft.finished(x_ND, branch_ND)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        return self.draft.logits(hidden_RD)

    def through(self, x_ND: Tensor, position_N: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor]:
        turn = self.draft.turn(position_N, x_ND.dtype)
        branch_ND: Tensor | None = None
        for layers in self._spans:
            if len(layers) == 1:
                x_ND, branch_ND = self._blocks[layers[0]].flat(x_ND, branch_ND, turn, mixer)
                continue
            stacked = self._stacked.get(layers[0])
            if stacked is not None:
                x_ND, seen_NnE = self._fused(stacked, layers, x_ND, branch_ND, turn, mixer)
                seen = list(seen_NnE.unbind(1))
            else:
                x_ND, seen = self._seen(layers, x_ND, branch_ND, turn, mixer)
            if not self._full:
                x_ND, branch_ND = self._walked(layers, x_ND, seen)
            elif stacked is not None:
                mixed = stacked.o_proj(seen_NnE.flatten(1))
                x_ND, normed = stacked.mlp_norm.after(x_ND, mixed)
                branch_ND = stacked.mlp(normed)
            else:
                x_ND, branch_ND = self._summed(layers, x_ND, seen)
        assert branch_ND is not None
        return x_ND, branch_ND

    def _walked(self, layers: range, x_ND: Tensor, seen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """A group in order: what a layer's attention gave, then its feed-forward layer."""
        branch_ND: Tensor | None = None
        for layer, seen_NE in zip(layers, seen, strict=True):
            block = self._blocks[layer]
            if branch_ND is not None:
                x_ND = block.attention_norm.after(x_ND, branch_ND)[0]
            x_ND, normed = block.mlp_norm.after(x_ND, block.attention.o_proj(seen_NE))
            branch_ND = block.mlp(normed)
        assert branch_ND is not None
        return x_ND, branch_ND

    def _summed(self, layers: range, x_ND: Tensor, seen: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """A group whose feed-forward layers read one stream, layer by layer."""
        blocks = [self._blocks[layer] for layer in layers]
        mixed = torch.stack(
            [block.attention.o_proj(one) for block, one in zip(blocks, seen, strict=True)]
        )
        x_ND = x_ND + mixed.sum(0)
        return x_ND, torch.stack([block.mlp(block.mlp_norm(x_ND)) for block in blocks]).sum(0)

    def _seen(
        self, layers: range, x_ND: Tensor, branch_ND: Tensor | None, turn: Turn, mixer: Mixer
    ) -> tuple[Tensor, list[Tensor]]:
        """The stream that enters a group, and what each of its layers sees [N, H d] of it."""
        first = self._blocks[layers[0]]
        x_ND, normed = first.attention_norm.after(x_ND, branch_ND)
        seen = [first.attention.flat(normed, turn, mixer)]
        for layer in layers[1:]:
            block = self._blocks[layer]
            seen.append(block.attention.flat(block.attention_norm(x_ND), turn, mixer))
        return x_ND, seen

    def _fused(
        self,
        stacked: StackedLayers,
        layers: range,
        x_ND: Tensor,
        branch_ND: Tensor | None,
        turn: Turn,
        mixer: Mixer,
    ) -> tuple[Tensor, Tensor]:
        """The same [N, n, H d] by one product, and by one call of attention if it can."""
        x_ND, normed = stacked.norm.after(x_ND, branch_ND)
        rows, count = len(x_ND), len(layers)
        qkv = stacked.qkv_proj(normed)
        attention = self._blocks[layers[0]].attention
        if isinstance(mixer, GroupMixer):
            turned = self.draft.turn(mixer.positions(count), x_ND.dtype)
            q, k, v = turned(attention, qkv.view(rows * count, -1))
            return x_ND, mixer.group(layers[0], count, q, k, v).reshape(rows, count, -1)
        parts = qkv.view(rows, count, -1).unbind(1)
        results = []
        for layer, part in zip(layers, parts, strict=True):
            q, k, v = turn(attention, part.contiguous())
            results.append(mixer(layer, q, k, v).reshape(rows, -1))
        return x_ND, torch.stack(results, 1)


class _Repeated:
    """What a recorded step of N rows is about, each row as often as a group has layers.

    Keys of the layers of a cache lie one behind the other, so that of a layer further on the same
    slot is two sides further on: a group's rows are rows of one long cache.
    """

    def __init__(self, recording: Recording, layers: int, blocks: int, size: int) -> None:
        rows, requests = recording.fed.shape[1], len(recording.blocks)
        self.fed = torch.zeros(7, rows * layers, dtype=torch.int64)
        self.blocks = torch.zeros(requests * layers, recording.blocks.shape[1], dtype=torch.int32)
        self._fed = self.fed.numpy().reshape(7, rows, layers)
        self._blocks = self.blocks.numpy().reshape(requests, layers, -1)
        self._source = recording.blocks.numpy()[:, None]
        ahead = 2 * blocks * np.arange(layers)
        # Of token, position, slot, length, request, root, seen: how often, and how much further.
        self._times, self._ahead = np.ones((7, 1, 1), np.int64), np.zeros((7, 1, layers), np.int64)
        self._times[4], self._ahead[4] = layers, np.arange(layers)
        self._ahead[2] = ahead * size
        self._ahead_blocks = ahead.astype(np.int32)[:, None]

    def write(self, recording: Recording) -> None:
        """The step as it is now."""
        np.multiply(recording.numbers[:, :, None], self._times, out=self._fed)
        self._fed += self._ahead
        np.add(self._source, self._ahead_blocks, out=self._blocks)


class FuzzyRecordings(Recordings):
    """Recorded passes of a :class:`FuzzyModel`, the attention of a group in one call."""

    def __init__(
        self, model: FuzzyModel, cache: PagedCache, attention: Ready, longest: int
    ) -> None:
        super().__init__(model, cache, attention, longest)
        self._sizes = sorted({size for size in model.groups if size > 1})
        self._repeated: dict[Recording, dict[int, _Repeated]] = {}
        # Keys of every layer from one on, and values of every layer from there on.
        store = cache.stores[0]
        self._flat = store.view(-1, *store.shape[3:])

    def write(self, recording: Recording, several: Iterable[TreeRows]) -> None:
        super().write(recording, several)
        cache = self._cache
        repeated = self._repeated.get(recording)
        if repeated is None:
            repeated = self._repeated[recording] = {
                size: _Repeated(recording, size, cache.num_blocks, cache.block_size)
                for size in self._sizes
            }
        for one in repeated.values():
            one.write(recording)

    def mixer(self, recording: Recording, alone: bool) -> Mixer:
        return _Grouped(
            super().mixer(recording, alone), self._cache, self._attention, self._flat,
            self._repeated[recording],
        )  # fmt: skip


class _Grouped:
    """The :class:`GroupMixer` of one recording."""

    def __init__(
        self,
        plain: Mixer,
        cache: PagedCache,
        attention: Ready,
        flat: Tensor,
        repeated: dict[int, _Repeated],
    ) -> None:
        self._plain, self._attention, self._flat = plain, attention, flat
        self._slots = cache.num_blocks * cache.block_size
        self._repeated, self._put = repeated, cache.put

    def __call__(self, layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
        """See :class:`~shoal.model.attention.Mixer`."""
        return self._plain(layer, q_NHd, k_NKd, v_NKd)

    def positions(self, layers: int) -> Tensor:
        return self._repeated[layers].fed[1]

    def group(self, first: int, layers: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        one = self._repeated[layers]
        start = 2 * first * self._slots
        stop = start + (2 * layers - 1) * self._slots
        keys, values = self._flat[start:stop], self._flat[start + self._slots : stop + self._slots]
        self._put(keys, one.fed[2], k)
        self._put(values, one.fed[2], v)
        _, _, _, length, request, *_ = one.fed
        out: Tensor = self._attention(
            q, (keys,), (values,), one.blocks, length, request, one.fed[5:]
        )
        return out
