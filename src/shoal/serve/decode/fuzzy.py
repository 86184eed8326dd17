"""A draft some of whose layers read the same, stale input, so that their attention is one.

Layers l .. l + n - 1 of a group compute attention from what enters the group; then the group is
walked in order: what a layer's attention gave is added, and its feed-forward layer reads the
stream as it is then. Only guesses come of it: what the model verifies is another model.

Shapes: N rows, D hidden, n layers of a group, H query heads, K key/value heads, d head_dim.

Source: Wu et al., EasySpec, 2025, section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.errors import ModelError
from shoal.kernel.calls import Pointwise
from shoal.kernel.dispatch import dispatch
from shoal.kernel.protocols import Ready
from shoal.kernel.tensors import name_of
from shoal.model.attention import Mixer, Turn
from shoal.model.config import ModelConfig
from shoal.model.linear import DispatchedLinear
from shoal.model.norm import RMSNorm
from shoal.model.transformer import Block, Transformer
from shoal.plan.fuzzy import Groups, spans
from shoal.serve.cache import PagedCache
from shoal.serve.decode.captured import Branch, Recording, Recordings

__all__ = ["FuzzyModel", "FuzzyRecordings", "Stacked", "stack"]


@runtime_checkable
class GroupMixer(Protocol):
    """A mixer that also answers the queries of several layers in one call."""

    def positions(self, layers: int) -> Tensor:
        """Places of all rows, each as often as there are layers [N * n]."""
        ...

    def group(self, first: int, layers: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What N * n queries see, row by row and layer by layer [N * n, H, d]."""
        ...


class Stacked:
    """Queries, keys and values of the layers of a group by one product.

    The weights of their norms are folded into it, so that one normalised input serves all.

    Args:
        blocks: of the group, before kernels pack their weights.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        first = blocks[0]
        weights = [one.attention.qkv_proj.weight * one.attention_norm.weight for one in blocks]
        biases = [one.attention.qkv_proj.bias for one in blocks]
        self.weight = torch.cat(weights).contiguous()
        self.bias = (
            None if biases[0] is None else torch.cat([one for one in biases if one is not None])
        )
        self.norm = RMSNorm(len(first.attention_norm.weight), first.attention_norm.eps)
        self.norm.weight = nn.Parameter(
            torch.ones_like(first.attention_norm.weight), requires_grad=False
        )
        self.project: nn.Module = nn.Identity()

    def ready(self, fast: bool) -> None:
        """Choose what computes.

        Args:
            fast: kernels of inference, as the draft itself has them.
        """
        out, width = self.weight.shape
        if fast:
            dtype, device = name_of(self.weight.dtype), self.weight.device.type
            call = Pointwise(
                "rms_norm", 1, width, width, dtype, "cuda" if device == "cuda" else "cpu"
            )
            self.norm.kernel = dispatch(call).prepare(call, self.norm.weight, self.norm.eps)
            self.project = DispatchedLinear(self.weight, self.bias)
            return
        self.project = nn.Linear(width, out, bias=self.bias is not None, device="meta")
        self.project.weight = nn.Parameter(self.weight, requires_grad=False)
        if self.bias is not None:
            self.project.bias = nn.Parameter(self.bias, requires_grad=False)


def stack(draft: Transformer, groups: Groups) -> dict[int, Stacked]:
    """By its first layer, the stacked products of each group of several layers.

    Raises:
        ModelError: the draft's layers cannot be stacked.
    """
    if draft.config.qk_norm:
        raise ModelError(
            f"model {draft.config.name}: norms of queries and keys differ from layer to layer, and "
            "realise = fused rotates all of a group at once; use realise: sequential"
        )
    found = {}
    for layers in spans(groups, len(draft.blocks)):
        if len(layers) > 1:
            blocks = [draft.blocks[layer] for layer in layers]
            found[layers[0]] = Stacked([one for one in blocks if isinstance(one, Block)])
    return found


class FuzzyModel:
    """A draft by groups; a :class:`~shoal.serve.decode.draft_net.DraftModelNet`.

    Args:
        draft: ready to serve.
        groups: of its layers.
        stacked: for ``realise: fused``; layer by layer without.

    Raises:
        ModelError: its blocks do not normalise, attend, normalise and feed forward, in this order.
    """

    def __init__(
        self, draft: Transformer, groups: Groups, stacked: dict[int, Stacked] | None = None
    ) -> None:
        for block in draft.blocks:
            if not isinstance(block, Block) or block.parallel:
                raise ModelError(
                    f"model {draft.config.name}: its blocks are not pre-norm attention, then "
                    "pre-norm feed-forward; layers of such a draft cannot read stale input. Use "
                    "speculative: draft_model"
                )
        self.draft, self.groups = draft, groups
        self._spans = spans(groups, len(draft.blocks))
        self._blocks = [block for block in draft.blocks if isinstance(block, Block)]
        self._stacked = stacked or {}

    @property
    def config(self) -> ModelConfig:
        """Of the draft."""
        return self.draft.config

    @property
    def weight(self) -> Tensor:
        """See :class:`~shoal.serve.decode.captured.Recordable`."""
        return self.draft.weight

    def flat(
        self, tokens_N: Tensor, position_N: Tensor, mixer: Mixer, rows_R: Tensor | None = None
    ) -> Tensor:
        """See :meth:`~shoal.model.transformer.Transformer.flat`."""
        x_ND, branch_ND = self.through(self.draft.embed(tokens_N), position_N, mixer)
        if rows_R is not None:
            x_ND, branch_ND = x_ND[rows_R], branch_ND[rows_R]
        return self.finished(x_ND, branch_ND)

    def finished(self, x_ND: Tensor, branch_ND: Tensor) -> Tensor:
        """See :meth:`~shoal.model.transformer.Transformer.finished`."""
        return self.draft.finished(x_ND, branch_ND)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """Scores [R, V]."""
        return self.draft.logits(hidden_RD)

    def through(self, x_ND: Tensor, position_N: Tensor, mixer: Mixer) -> tuple[Tensor, Tensor]:
        """See :meth:`~shoal.model.transformer.Transformer.through`."""
        turn = self.draft.turn(position_N, x_ND.dtype)
        branch_ND: Tensor | None = None
        for layers in self._spans:
            if len(layers) == 1:
                x_ND, branch_ND = self._blocks[layers[0]].flat(x_ND, branch_ND, turn, mixer)
                continue
            x_ND, seen = self._seen(layers, x_ND, branch_ND, turn, mixer)
            branch_ND = None
            for layer, seen_NE in zip(layers, seen, strict=True):
                block = self._blocks[layer]
                if branch_ND is not None:
                    x_ND = block.attention_norm.after(x_ND, branch_ND)[0]
                mixed = block.attention.o_proj(seen_NE)
                x_ND, normed = block.mlp_norm.after(x_ND, mixed)
                branch_ND = block.mlp(normed)
        assert branch_ND is not None
        return x_ND, branch_ND

    def _seen(
        self, layers: range, x_ND: Tensor, branch_ND: Tensor | None, turn: Turn, mixer: Mixer
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The stream that enters a group, and what each of its layers sees [N, H d] of it."""
        stacked = self._stacked.get(layers[0])
        if stacked is None:
            first = self._blocks[layers[0]]
            x_ND, normed = first.attention_norm.after(x_ND, branch_ND)
            seen = [first.attention.flat(normed, turn, mixer)]
            for layer in layers[1:]:
                block = self._blocks[layer]
                seen.append(block.attention.flat(block.attention_norm(x_ND), turn, mixer))
            return x_ND, seen
        x_ND, normed = stacked.norm.after(x_ND, branch_ND)
        rows, count = len(x_ND), len(layers)
        qkv = stacked.project(normed)
        attention = self._blocks[layers[0]].attention
        if isinstance(mixer, GroupMixer):
            turned = self.draft.turn(mixer.positions(count), x_ND.dtype)
            q, k, v = turned(attention, qkv.view(rows * count, -1))
            out = mixer.group(layers[0], count, q, k, v).reshape(rows, count, -1)
            return x_ND, out.unbind(1)
        parts = qkv.view(rows, count, -1).unbind(1)
        found = []
        for layer, part in zip(layers, parts, strict=True):
            q, k, v = turn(attention, part.contiguous())
            found.append(mixer(layer, q, k, v).reshape(rows, -1))
        return x_ND, found


class _Repeated:
    """What a recorded step of N rows is about, each row as often as a group has layers.

    Keys of the layers of a cache lie one behind the other, so that of a layer further on the same
    slot is two sides further on: a group's rows are rows of one long cache.
    """

    def __init__(self, recording: Recording, layers: int, blocks: int, size: int) -> None:
        self._layers, self._step = layers, 2 * blocks
        rows, requests = recording.fed.shape[1], len(recording.blocks)
        self.fed = torch.zeros(7, rows * layers, dtype=torch.int64)
        self.blocks = torch.zeros(requests * layers, recording.blocks.shape[1], dtype=torch.int32)
        self._fed = self.fed.numpy().reshape(7, rows, layers)
        self._blocks = self.blocks.numpy().reshape(requests, layers, -1)
        ahead = np.arange(layers)
        self._ahead_slots, self._ahead = ahead * self._step * size, ahead
        self._ahead_blocks = (ahead * self._step).astype(np.int32)[:, None]

    def write(self, recording: Recording) -> None:
        """The step as it is now."""
        self._fed[:] = recording.numbers[:, :, None]
        self._fed[2] += self._ahead_slots
        self._fed[4] *= self._layers
        self._fed[4] += self._ahead
        np.add(recording.blocks.numpy()[:, None], self._ahead_blocks, out=self._blocks)


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

    def write(self, recording: Recording, several: Iterable[Branch]) -> None:
        """See :meth:`~shoal.serve.decode.captured.Recordings.write`."""
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
        """See :meth:`~shoal.serve.decode.captured.Recordings.mixer`."""
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
        """See :class:`GroupMixer`."""
        return self._repeated[layers].fed[1]

    def group(self, first: int, layers: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See :class:`GroupMixer`."""
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
