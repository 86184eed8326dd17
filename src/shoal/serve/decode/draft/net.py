"""A second, smaller model beside the target: its forward passes, and a cache of its own.

Shapes: N rows of a pass, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.ir import Request
from shoal.kernel.protocols import Ready
from shoal.model.attention import Mixer
from shoal.model.config import ModelConfig
from shoal.model.transformer import Transformer
from shoal.serve.cache.attention import PagedAttention, RequestContext
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.captured import Recordable, Recordings, TreeRows
from shoal.serve.decode.protocols import TokenTree

# Requests of which something is kept beside those of a step.
_REMEMBERED = 256

# Tokens of a prompt that one pass reads.
_PIECE = 512


class DraftModelNet(Recordable, Protocol):
    """The model of a draft: whole, in this process."""

    @property
    def config(self) -> ModelConfig:
        """What it is."""

    def flat(
        self, tokens_N: Tensor, position_N: Tensor, mixer: Mixer, rows_R: Tensor | None = None
    ) -> Tensor | None:
        """See :meth:`~shoal.model.transformer.Transformer.flat`."""


class DraftNet:
    """Scores of rows of any requests, by a draft model and its paged cache.

    Args:
        model: of the draft.
        cache: its own.
        nbytes: of its weights, before kernels packed them.
        attention: kernel of ``paged_attention`` that reads trees; pages are copied without one.
        prompts: the same for prompts.
        recorded: passes of few rows; all are computed the same way without.
    """

    def __init__(
        self,
        model: DraftModelNet,
        cache: PagedCache,
        *,
        nbytes: int = 0,
        attention: Ready | None = None,
        prompts: Ready | None = None,
        recorded: Recordings | None = None,
    ) -> None:
        self.model, self.cache, self.nbytes = model, cache, nbytes
        self.attention, self.prompts, self.recorded = attention, prompts, recorded

    def read(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> None:
        """Keys and values of tokens from place ``start`` on, one after the other."""
        for first in range(start, start + len(tokens), _PIECE):
            piece = tokens[first - start : first - start + _PIECE]
            context = RequestContext(first, len(piece), blocks)
            self._pass(piece, np.arange(first, context.stop), [context], none=True)

    def rows(self, several: Sequence[TreeRows]) -> Tensor:
        """Scores [N, V] of what comes after every row; of a recording's memory where it has one."""
        if self.recorded is not None:
            result = self.recorded.play(several)
            if result is not None:
                return result[1]
        # Single rows first and longest context first, as attention wants them.
        order = sorted(
            range(len(several)),
            key=lambda place: (len(several[place].depth) > 1, -several[place].stop),
        )
        sorted_ = [several[place] for place in order]
        contexts = [
            RequestContext(one.start, len(one.depth), one.blocks, one.seen, one.root)
            for one in sorted_
        ]
        tokens = np.concatenate([np.asarray(one.tokens, dtype=np.int64) for one in sorted_])
        positions = np.concatenate([one.root + one.depth for one in sorted_])
        ends = np.cumsum([context.length for context in contexts]).tolist()
        inputs = [
            (slice(end - len(one.inputs), end), one.inputs)
            for end, one in zip(ends, sorted_, strict=True)
            if one.inputs is not None
        ]
        logits = self._pass(tokens, positions, contexts, inputs)
        assert logits is not None
        if order == list(range(len(order))):
            return logits
        first = [0, *ends]
        rows = {place: range(first[at], first[at + 1]) for at, place in enumerate(order)}
        return logits[[row for place in range(len(order)) for row in rows[place]]]

    def keep(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy keys and values from slots to slots."""
        self.cache.keep(sources, targets)

    def _pass(
        self,
        tokens: Sequence[int] | np.ndarray,
        positions: np.ndarray,
        contexts: Sequence[RequestContext],
        inputs: Sequence[tuple[slice, Tensor]] = (),
        none: bool = False,
    ) -> Tensor | None:
        size, device = self.cache.block_size, self.cache.device
        slots = np.concatenate([_slots(one, size) for one in contexts])
        fed = torch.from_numpy(np.array([tokens, positions, slots], dtype=np.int64)).to(device)
        mixer = PagedAttention(
            self.cache,
            contexts,
            fed[2],
            self.model.weight.dtype,
            self.attention,
            prompts=self.prompts,
        )
        nobody = torch.empty(0, dtype=torch.int64, device=device) if none else None
        if inputs:  # rows that are no tokens
            model = self.model
            assert isinstance(model, Transformer)
            x_ND = model.embed(fed[0])
            for rows, fed_ID in inputs:
                x_ND[rows] = fed_ID
            hidden: Tensor | None = model.finished(*model.through(x_ND, fed[1], mixer))
        else:
            hidden = self.model.flat(fed[0], fed[1], mixer, nobody)
        assert hidden is not None
        return None if none else self.model.logits(hidden)


def _slots(context: RequestContext, size: int) -> np.ndarray:
    at = np.arange(context.start, context.stop)
    return np.asarray(context.blocks, dtype=np.int64)[at // size] * size + at % size


class Holder(Protocol):
    """State of one request, with blocks of a drafter's cache."""

    request: Request
    blocks: list[int]

    def forget(self) -> None:
        """Its blocks are gone, and what was in them."""


_Held = TypeVar("_Held", bound=Holder)


class DraftState:
    """What the draft's cache holds of one request.

    Attributes:
        blocks: of the draft's cache.
        length: first tokens of the request whose keys and values are there.
        tree: what was guessed last, for the token at place ``root``.
        computed: of each row of it, its row in the draft's own passes; -1 where it had none.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.blocks: list[int] = []
        self.length = 0
        self.root = 0
        self.tree: TokenTree | None = None
        self.computed: Sequence[int] = ()

    def forget(self) -> None:
        self.blocks, self.length, self.tree = [], 0, None

    def accepted(self) -> tuple[int, list[tuple[int, int]]]:
        """Tokens whose keys and values are known now, and the rows (from, to) behind the root.

        The path that the request's tokens took is followed down the last tree.
        """
        tree, tokens = self.tree, self.request.tokens
        if tree is None or len(tokens) <= self.root:
            return self.length, []
        row, moved = 0, []
        for depth, token in enumerate(tokens[self.root + 1 :], 1):
            results = [child for child in tree.shape.children[row] if tree.tokens[child] == token]
            if not results or self.computed[results[0]] < 0:
                break
            row = results[0]
            moved.append((self.computed[row], depth))
        return self.root + 1 + len(moved), moved


class DraftMemory(Generic[_Held]):
    """Allocation of blocks of the draft's cache; the least recently used request is evicted.

    A drafter is not notified that a request has ended; its state ages. A request whose blocks were
    evicted is prefilled again.

    Args:
        num_blocks: of the cache.
        block_size: tokens of one.
        make: creates the state of a request.
    """

    def __init__(self, num_blocks: int, block_size: int, make: Callable[[Request], _Held]) -> None:
        self._size, self._make = block_size, make
        self._free = list(range(num_blocks))
        self._kept: OrderedDict[str, _Held] = OrderedDict()

    def of(self, requests: Sequence[Request]) -> list[_Held]:
        """What is kept of these; they are now the youngest."""
        results = [self._one(request) for request in requests]
        while len(self._kept) > len(requests) + _REMEMBERED:
            self._drop(self._kept.popitem(last=False)[1])
        return results

    def _one(self, request: Request) -> _Held:
        known = self._kept.get(request.id)
        if known is None or known.request is not request:
            if known is not None:
                self._drop(known)
            known = self._kept[request.id] = self._make(request)
        self._kept.move_to_end(request.id)
        return known

    def _drop(self, known: _Held) -> None:
        self._free += known.blocks
        known.forget()

    def hold(self, known: _Held, tokens: int, asked: int) -> bool:
        """Room for so many tokens; False where the requests of this step have all there is.

        Args:
            known: the request that needs it.
            tokens: of it, from the first.
            asked: requests that guess now, the youngest ones: they give nothing.
        """
        missing = -(-tokens // self._size) - len(known.blocks)
        old = len(self._kept) - asked
        while missing > len(self._free) and old > 0:
            self._drop(self._kept.popitem(last=False)[1])
            old -= 1
        if missing > len(self._free):
            self._drop(known)
            return False
        # A new list: what is recorded compares it with the one that it has written down.
        known.blocks = [*known.blocks, *(self._free.pop() for _ in range(missing))]
        return True

    def check_integrity(self) -> None:
        """Every block is free or held once.

        Raises:
            AssertionError: it is not; a mistake of ours.
        """
        held = [block for known in self._kept.values() for block in known.blocks]
        assert len({*held, *self._free}) == len(held) + len(self._free)
