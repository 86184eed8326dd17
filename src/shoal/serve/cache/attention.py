"""Attention over the paged cache, by the kernel that dispatch takes, or by copies of pages.

The tokens of a step lie side by side, those of requests that compute a single token
first. A kernel of ``paged_attention`` reads their pages where they lie. Without one, their
blocks are copied side by side, short contexts are padded, and one call does them all; requests in
slots are read where they lie, all slots of the step as one dense batch. Longer
chunks are taken one by one, but where the same bits are wanted in any company: then every
token is a query of the paged kernel.

Shapes: N tokens of the step, B requests of a group, W blocks of the longest of them,
S = W * block_size, H query heads, K key/value heads, G = H / K, d head_dim.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with
PagedAttention, 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.kernel.protocols import Ready
from shoal.model.attention import attend
from shoal.model.parscale import before, causal
from shoal.serve.cache.paged import PagedCache

# Padded tokens that are cheaper than another call of the kernel.
_SPARE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What the new tokens of one request see.

    Args:
        start: tokens of it that the cache holds already.
        length: its tokens in this step.
        blocks: its blocks, in order; at least as many as its tokens fill.
        seen: where its tokens are a tree or the last part of one, what each sees from the root
            on, a bit each.
        root: where the tree begins; at ``start``, if not given.
        virtual: they see the prefix of a model that has one.
    """

    start: int
    length: int
    blocks: Sequence[int]
    seen: np.ndarray | None = None
    root: int | None = None
    virtual: bool = True

    @property
    def stop(self) -> int:
        """Its tokens after the step."""
        return self.start + self.length

    def num_blocks(self, block_size: int) -> int:
        """Blocks that its tokens fill, in part or whole."""
        return -(-self.stop // block_size)


@dataclass(frozen=True, slots=True)
class _Group:
    """Requests with one token each: rows ``first .. last``."""

    first: int
    last: int
    blocks: Tensor  # [B, W]
    longest: int
    mask: Tensor | None  # [B, 1, 1, longest]
    bare: Tensor | None  # [B], which see no prefix; None where all see it


@dataclass(frozen=True, slots=True)
class _Dense:
    """Requests with one token each, rows ``0 .. last``, in slots that are read in one piece."""

    last: int
    first_slot: int
    places: Tensor  # [last], the slot of each row, from the first slot on
    count: int  # slots
    longest: int
    mask: Tensor  # [count, 1, 1, longest]
    bare: Tensor | None  # [count]


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Several tokens of one request: rows ``first .. last``."""

    first: int
    last: int
    blocks: Tensor | None  # [1, W]; None where nothing lies before them
    slot: int | None  # where it is in a slot
    stop: int
    mask: Tensor | None  # [length, stop]
    virtual: bool


@dataclass(frozen=True, slots=True)
class _Paged:
    """Queries that a kernel answers from the pages: rows ``first .. last``."""

    kernel: Ready
    first: int
    last: int
    blocks: Tensor  # [B, W]
    lengths: Tensor  # [last - first], the tokens that each sees
    requests: Tensor | None  # [last - first], the row of ``blocks`` of each; None: one each
    tree: Tensor | None = None  # [2, last - first], root and seen tokens of each


class PagedAttention:
    """A :class:`~shoal.model.attention.Mixer` for the tokens of one step.

    Args:
        cache: where keys and values go and come from.
        contexts: of the requests, in the order of their tokens; those with one token
            first, by falling number of tokens they see; then trees.
        slots_N: where the new tokens go.
        dtype: of the queries.
        kernel: of ``paged_attention``; pages are copied without one.
        prompts: the same for chunks of several tokens; they are taken one by one without.
        exact: the kernel answers every query, those of long chunks too.
        prefix: of a layer, the keys and values [2, M, K, d] of virtual tokens that all requests
            see first; pages are then copied, without a kernel.
    """

    def __init__(
        self,
        cache: PagedCache,
        contexts: Sequence[RequestContext],
        slots_N: Tensor,
        dtype: torch.dtype,
        kernel: Ready | None = None,
        *,
        prompts: Ready | None = None,
        exact: bool = False,
        prefix: Callable[[int], Tensor] | None = None,
    ) -> None:
        self.cache, self.contexts = cache, contexts
        self._slots_N, self._prefix = slots_N, prefix
        single = 0
        while single < len(contexts) and contexts[single].length == 1:
            single += 1
        self._groups: list[_Group] = []
        self._dense: _Dense | None = None
        self._prompts: list[_Prompt] = []
        self._paged: list[_Paged] = []
        trees = single
        while trees < len(contexts) and contexts[trees].seen is not None:
            trees += 1
        if kernel is not None and exact and trees == single:
            self._add_pages(kernel, contexts)
            return
        if kernel is not None:
            self._add_pages(kernel, contexts[:single])
        elif cache.slot_blocks and single:
            self._dense = self._slots(contexts[:single], dtype)
        else:
            self._groups = [
                self._group(first, contexts[first:last], dtype)
                for first, last in _groups([context.stop for context in contexts[:single]])
            ]
        row = single
        if kernel is not None:
            row = self._add_pages(kernel, contexts[single:trees], row)
        else:
            row = self._add_prompts(contexts[single:trees], row, dtype)
        many = kernel if exact else prompts
        if many is not None:
            self._add_pages(many, contexts[trees:], row)
        else:
            self._add_prompts(contexts[trees:], row, dtype)

    def _add_prompts(self, contexts: Sequence[RequestContext], row: int, dtype: torch.dtype) -> int:
        """Let a dense call answer each of these; where their rows end."""
        for context in contexts:
            self._prompts.append(self._prompt(row, context, dtype))
            row += context.length
        return row

    def _add_pages(self, kernel: Ready, contexts: Sequence[RequestContext], first: int = 0) -> int:
        """Let a kernel answer these, whose rows begin at ``first``; where they end."""
        if not contexts:
            return first
        size = self.cache.block_size
        filled = [context.num_blocks(size) for context in contexts]
        blocks_BW = np.zeros((len(contexts), max(filled)), dtype=np.int32)
        for row, (context, width) in enumerate(zip(contexts, filled, strict=True)):
            blocks_BW[row, :width] = context.blocks[:width]
        counts = [context.length for context in contexts]
        last = first + sum(counts)
        requests = tree = None
        if contexts[0].seen is not None:
            lengths = np.repeat([context.stop for context in contexts], counts)
            requests = self._tensor(np.repeat(np.arange(len(contexts)), counts))
            roots = np.repeat([_root(context) for context in contexts], counts)
            seen = np.concatenate([one.seen for one in contexts if one.seen is not None])
            tree = self._tensor(np.stack((roots, seen)))
        elif last - first == len(contexts):
            lengths = np.array([context.stop for context in contexts], dtype=np.int64)
        else:
            lengths = np.concatenate(
                [np.arange(context.start + 1, context.stop + 1) for context in contexts]
            )
            requests = self._tensor(np.repeat(np.arange(len(contexts)), counts))
        blocks = self._tensor(blocks_BW)
        paged = _Paged(kernel, first, last, blocks, self._tensor(lengths), requests, tree)
        self._paged.append(paged)
        return last

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self.cache.device)

    def _group(self, first: int, contexts: Sequence[RequestContext], dtype: torch.dtype) -> _Group:
        size = self.cache.block_size
        longest = contexts[0].stop
        width = contexts[0].num_blocks(size)
        # Short rows are padded with block 0, whose numbers are finite and get no weight.
        blocks_BW = np.zeros((len(contexts), width), dtype=np.int64)
        for row, context in enumerate(contexts):
            filled = context.num_blocks(size)
            blocks_BW[row, :filled] = context.blocks[:filled]
        mask = None
        if contexts[-1].stop < longest:
            stops_B = np.fromiter((context.stop for context in contexts), np.int64, len(contexts))
            hidden = np.arange(longest) >= stops_B[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self.cache.device)
            mask = mask.masked_fill_(self._tensor(hidden), float("-inf"))[:, None, None]
        blocks, bare = self._tensor(blocks_BW), self._bare(contexts)
        return _Group(first, first + len(contexts), blocks, longest, mask, bare)

    def _bare(self, contexts: Sequence[RequestContext]) -> Tensor | None:
        if self._prefix is None or all(context.virtual for context in contexts):
            return None
        return self._tensor(np.array([not context.virtual for context in contexts]))

    def _slots(self, contexts: Sequence[RequestContext], dtype: torch.dtype) -> _Dense:
        slots = np.array([context.blocks[0] for context in contexts]) // self.cache.slot_blocks
        first = int(slots.min())
        places = slots - first
        count, longest = int(places.max()) + 1, contexts[0].stop
        # Slots without a row, whose prompts are still computed, see all: their answer is dropped.
        stops = np.full(count, longest)
        stops[places] = [context.stop for context in contexts]
        mask = torch.zeros((count, longest), dtype=dtype, device=self.cache.device)
        hidden = self._tensor(np.arange(longest) >= stops[:, None])
        mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        bare = self._bare(contexts)
        if bare is not None:
            result = bare
            bare = bare.new_zeros(count)
            bare[places] = result
        return _Dense(len(contexts), first, self._tensor(places), count, longest, mask, bare)

    def _prompt(self, row: int, context: RequestContext, dtype: torch.dtype) -> _Prompt:
        stop = context.stop
        last = row + context.length
        slots = self.cache.slot_blocks
        slot = context.blocks[0] // slots if slots else None
        if not context.start and context.seen is None:
            return _Prompt(row, last, None, slot, stop, None, context.virtual)
        filled = context.num_blocks(self.cache.block_size)
        blocks_1W = np.array([context.blocks[:filled]], dtype=np.int64)
        mask = torch.full(
            (context.length, stop), float("-inf"), dtype=dtype, device=self.cache.device
        ).triu_(context.start + 1)
        if context.seen is not None:
            root = _root(context)
            hidden = context.seen[:, None] >> np.arange(stop - root) & 1 == 0
            mask[:, root:].masked_fill_(self._tensor(hidden), float("-inf"))
        blocks = self._tensor(blocks_1W)
        return _Prompt(row, last, blocks, slot, stop, mask, context.virtual)

    def __call__(self, layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
        """Store the new keys and values; what the queries see [N, H, d]."""
        self.cache.write(layer, self._slots_N, k_NKd, v_NKd)
        # By their first row: which of them come first depends on which have a kernel.
        parts = {group.first: self._decode(layer, q_NHd, group) for group in self._groups}
        if self._dense is not None:
            parts[0] = self._decode_slots(layer, q_NHd, self._dense)
        for paged in self._paged:
            whole = paged.last - paged.first == len(q_NHd)
            queries = q_NHd if whole else q_NHd[paged.first : paged.last]
            sides = self.cache.sides(layer)
            where = (paged.blocks, paged.lengths, paged.requests)
            more = () if paged.tree is None else (paged.tree,)
            parts[paged.first] = paged.kernel(queries, *sides, *where, *more)
        for prompt in self._prompts:
            rows = slice(prompt.first, prompt.last)
            if prompt.blocks is None:
                keys, values = k_NKd[None, rows], v_NKd[None, rows]
            elif prompt.slot is not None:
                keys, values = self.cache.slots(layer, prompt.slot, 1, prompt.stop)
            else:
                keys, values = self.cache.gather(layer, prompt.blocks)
                keys, values = keys[:, : prompt.stop], values[:, : prompt.stop]
            length = prompt.last - prompt.first
            mask = prompt.mask
            if prompt.virtual:
                keys, values, mask = self._behind(layer, keys, values, mask, length)
            out = attend(
                q_NHd[None, rows].transpose(1, 2),
                keys.transpose(1, 2),
                values.transpose(1, 2),
                mask,
                causal=mask is None and length > 1,
            )
            parts[prompt.first] = out[0].transpose(0, 1)
        return parts[0] if len(parts) == 1 else torch.cat([parts[row] for row in sorted(parts)])

    def _decode(self, layer: int, q_NHd: Tensor, group: _Group) -> Tensor:
        """One token of each request of a group.

        The G queries that share a key are the queries of one head: no key is repeated.
        """
        keys, values = self.cache.gather(layer, group.blocks)
        keys, values = keys[:, : group.longest], values[:, : group.longest]
        seen = self._behind(layer, keys, values, group.mask, bare=group.bare)
        return _single(q_NHd[group.first : group.last], *seen)

    def _decode_slots(self, layer: int, q_NHd: Tensor, dense: _Dense) -> Tensor:
        """One token of each request, over all slots as they lie."""
        keys, values = self.cache.slots(layer, dense.first_slot, dense.count, dense.longest)
        queries = q_NHd.new_zeros(dense.count, *q_NHd.shape[1:])
        queries[dense.places] = q_NHd[: dense.last]
        seen = self._behind(layer, keys, values, dense.mask, bare=dense.bare)
        return _single(queries, *seen)[dense.places]

    def _behind(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        length: int = 1,
        *,
        bare: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values [B, S, K, d] behind the prefix, and the mask of so many queries.

        Rows that are ``bare`` do not see the prefix.
        """
        if self._prefix is None:
            return keys, values, mask
        prefix = self._prefix(layer).to(keys.dtype)
        keys, values = before(prefix.unsqueeze(1), keys, values)
        virtual = prefix.shape[1]
        mask = causal(mask, virtual, length, 0, keys)
        if bare is not None:
            hidden = torch.zeros(
                len(keys), 1, 1, keys.shape[1], dtype=keys.dtype, device=keys.device
            )
            hidden[bare, ..., :virtual] = float("-inf")
            mask = hidden if mask is None else mask + hidden
        return keys, values, mask


def _single(q_BHd: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """What one query of each row sees [B, H, d]; keys and values are [B, S, K, d]."""
    batch, _, kv_heads, dim = keys.shape
    heads = q_BHd.shape[1]
    out = F.scaled_dot_product_attention(
        q_BHd.reshape(batch, kv_heads, heads // kv_heads, dim),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=mask,
    )
    return out.reshape(batch, heads, dim)


def _root(context: RequestContext) -> int:
    return context.start if context.root is None else context.root


def _groups(stops: Sequence[int]) -> list[tuple[int, int]]:
    """Cut requests, longest first, into groups that need little padding."""
    groups = []
    first = spare = 0
    for place, stop in enumerate(stops):
        spare += stops[first] - stop
        if spare > max(_SPARE_TOKENS, (place - first) * stops[first] // 3):
            groups.append((first, place))
            first, spare = place, 0
    if stops:
        groups.append((first, len(stops)))
    return groups
