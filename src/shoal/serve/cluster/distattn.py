"""A runner whose requests have their oldest keys and values at other instances.

In every layer the queries go out first, then this instance attends over what it has itself, then
the answers are merged. No other instance's keys or values come here.

Source: Lin et al., Infinite-LLM, 2024, section 4.1 (DistAttention).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.errors import ServeError
from shoal.kernel.calls import PagedAttentionCall as PagedCall
from shoal.kernel.dispatch import dispatch
from shoal.kernel.paged.common import Cached
from shoal.kernel.paged.partial import merge
from shoal.kernel.protocols import Ready
from shoal.kernel.tensors import name_of
from shoal.model.attention import Mixer
from shoal.model.config import ModelConfig
from shoal.plan.batching.cache.distributed import UNBACKED, place_of
from shoal.serve.cache.attention import PagedAttention, RequestContext
from shoal.serve.cache.paged import PagedCache
from shoal.serve.cluster.lending import LenderClient
from shoal.serve.engine.runner import LocalRunner


def part_kernel(config: ModelConfig, cache: PagedCache, *, batch: int = 8) -> Ready:
    """The kernel that attends over a part of a context."""
    call = PagedCall(
        batch=batch,
        context=max(1, config.max_position // 2),
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=cache.block_size,
        dtype=name_of(cache.dtype),
        format=str(cache.form),
        partial=True,
    )
    return dispatch(call).prepare(call)


@dataclass(frozen=True, slots=True)
class _Ask:
    """What one lender is asked in every layer of a step.

    Args:
        creditor: the lender.
        rows_n: of the step's tokens, those whose queries go there.
        places_n: of those rows that any lender is asked for, the same ones.
        record: where its answer comes.
    """

    creditor: LenderClient
    rows_n: Tensor
    places_n: Tensor
    record: Tensor


class DistRunner(LocalRunner):
    """A :class:`~shoal.serve.engine.runner.LocalRunner` for requests that have blocks elsewhere.

    ``creditors`` and ``part`` are set once the other instances are known.
    """

    creditors: dict[int, LenderClient]
    part: Ready
    # Tokens that were generated with the help of others, and bytes that went out and came back
    # for them, of all lenders together; and the keys and values that stayed where they are.
    helped_tokens = helped_bytes = spared_bytes = 0

    def _mixer(self, contexts: list[RequestContext], slots_N: Tensor) -> Mixer:
        away = [_away(context.blocks) for context in contexts]
        if not any(away):
            return super()._mixer(contexts, slots_N)
        return self._spread(contexts, away, slots_N)

    def _spread(
        self, contexts: Sequence[RequestContext], away: list[int], slots_N: Tensor
    ) -> Mixer:
        size, dtype = self.cache.block_size, self.model.weight.dtype
        config = self.model.config
        here = [
            RequestContext(one.start - gone * size, one.length, one.blocks[gone:])
            for one, gone in zip(contexts, away, strict=True)
        ]
        single = sum(context.length == 1 for context in contexts)
        rows: list[int] = []
        tables: dict[int, list[list[int]]] = {}
        requests: dict[int, list[int]] = {}
        places: dict[int, list[int]] = {}
        first = 0
        for context, gone in zip(contexts, away, strict=True):
            result: dict[int, list[int]] = {}
            for number in context.blocks[:gone]:
                instance, block = place_of(number)
                result.setdefault(instance, []).append(block)
            for instance, table in result.items():
                tables.setdefault(instance, []).append(table)
                whose = len(tables[instance]) - 1
                requests.setdefault(instance, []).extend([whose] * context.length)
                places.setdefault(instance, []).extend(range(len(rows), len(rows) + context.length))
            if gone:
                rows.extend(range(first, first + context.length))
            first += context.length
        rows_B = torch.tensor(rows)
        shape = (config.num_heads, config.head_dim + 2)
        asks = []
        for instance, some in tables.items():
            creditor = self.creditors.get(instance)
            if creditor is None:
                raise ServeError(f"blocks of instance {instance}, which this one does not know")
            creditor.plan(some, requests[instance])
            at = torch.tensor(places[instance])
            record = torch.empty((len(at), *shape), dtype=torch.float32)
            asks.append(_Ask(creditor, rows_B[at], at, record))
        part = _Part(self.part, asks, rows_B, dtype)
        # Rows of prompts go with the others if one of them has something elsewhere.
        prompts_too = any(away[single:])
        inner = PagedAttention(
            self.cache,
            here,
            slots_N,
            dtype,
            part.kernel(0),
            prompts=part.kernel(single) if prompts_too else self.prompts,
            exact=self._exact,
        )
        self._count(contexts[:single], away, asks)
        return _DistMixer(part, inner)

    def _count(self, singles: Sequence[RequestContext], away: list[int], asks: list[_Ask]) -> None:
        """Add up traffic of single tokens, which is what generating costs."""
        helped = [gone for _, gone in zip(singles, away, strict=False) if gone]
        if not helped or len(helped) != sum(map(bool, away)):
            return  # prompts are among the rows: their bytes are not those of generated tokens
        config, numbers = self.model.config, self.cache.dtype.itemsize
        per_row = config.num_heads * (config.head_dim * numbers + (config.head_dim + 2) * 4)
        self.helped_tokens += len(helped)
        self.helped_bytes += config.num_layers * per_row * sum(len(ask.rows_n) for ask in asks)
        block = sum(store[:, :, 0].numel() * store.element_size() for store in self.cache.blocks)
        self.spared_bytes += block * sum(helped)


def _away(blocks: Sequence[int]) -> int:
    """How many blocks at the start of a table are elsewhere."""
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high) // 2
        if blocks[middle] < UNBACKED:
            low = middle + 1
        else:
            high = middle
    return low


class _Part:
    """What attends over the blocks here, and puts together what comes from elsewhere.

    Args:
        part: the kernel.
        asks: what is asked of whom.
        rows_B: of the step's tokens, those that have something elsewhere.
        dtype: of the results.
    """

    def __init__(self, part: Ready, asks: list[_Ask], rows_B: Tensor, dtype: torch.dtype) -> None:
        self._part, self._asks, self._rows_B, self._dtype = part, asks, rows_B, dtype
        self._waiting = False

    def ask(self, layer: int, q_NHd: Tensor) -> None:
        """Send the queries of a layer to all lenders."""
        for ask in self._asks:
            ask.creditor.ask(layer, q_NHd.index_select(0, ask.rows_n))
        self._waiting = True

    def _answers(self) -> None:
        if self._waiting:
            for ask in self._asks:
                ask.creditor.answer(ask.record)
        self._waiting = False

    def kernel(self, first: int) -> Ready:
        """For the step's tokens from ``first`` on, as a kernel of whole results."""
        # Which of the rows with something elsewhere are here, and where: the same in every layer.
        tensors: list[Tensor] = []

        def run(
            q_NHd: Tensor,
            keys: Cached,
            values: Cached,
            blocks: Tensor,
            lengths: Tensor,
            requests: Tensor | None = None,
        ) -> Tensor:
            record_NHr: Tensor = self._part(q_NHd, keys, values, blocks, lengths, requests)
            out_NHd = merge([record_NHr], self._dtype)
            if not tensors:
                inside = (self._rows_B >= first) & (self._rows_B < first + len(q_NHd))
                mine = inside.nonzero()[:, 0]
                tensors.extend((mine, self._rows_B[mine] - first))
            mine_B, at_b = tensors
            self._answers()
            if not len(at_b):
                return out_NHd
            parts = [record_NHr.index_select(0, at_b)]
            for ask in self._asks:
                # A lender's record is whole: rows it was not asked for see nothing there.
                whole = record_NHr.new_zeros((len(self._rows_B), *record_NHr.shape[1:]))
                whole[..., -2] = -math.inf
                whole.index_copy_(0, ask.places_n, ask.record)
                parts.append(whole.index_select(0, mine_B))
            out_NHd.index_copy_(0, at_b, merge(parts, self._dtype))
            return out_NHd

        return run


class _DistMixer:
    """A :class:`~shoal.model.attention.Mixer`: queries go out, then this instance works, too."""

    def __init__(self, part: _Part, inner: PagedAttention) -> None:
        self._part, self._inner = part, inner

    def __call__(self, layer: int, q_NHd: Tensor, k_NKd: Tensor, v_NKd: Tensor) -> Tensor:
        self._part.ask(layer, q_NHd)
        return self._inner(layer, q_NHd, k_NKd, v_NKd)
