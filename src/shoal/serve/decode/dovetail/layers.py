"""The target without its first layers, which the drafter's process computes.

Both sides have a cache of their own layers with the same blocks: whatever is copied or kept here is
done there, too, when the next step comes, and nothing but tokens, blocks and states crosses.

Shapes: N rows of a step, D hidden, R rows that are needed, V vocabulary.

Source: Zhang et al., Dovetail, 2025, section 3.3.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from shoal.ir import Copy
from shoal.model.attention import Mixer
from shoal.model.config import ModelConfig
from shoal.model.transformer import Transformer
from shoal.serve.cache.attention import PagedAttention, RequestContext
from shoal.serve.cache.paged import PagedCache
from shoal.serve.decode.captured import CapturedRows, Recording, TreeRows
from shoal.serve.decode.dovetail.steps import CacheCopy, CopyMode, RequestBatch, packed
from shoal.serve.decode.dovetail.wire import HEAD_BYTES, MessageHeader, MessageKind, layers_bytes


class LayerProvider(Protocol):
    """Computes the first layers: a :class:`~shoal.serve.decode.dovetail.part.DovetailDrafter`."""

    hidden: int
    """width of a state"""
    itemsize: int
    """bytes of one of its numbers"""
    expected_bytes: int
    """that must have crossed the way by the formula"""

    def tell(self, head: MessageHeader, body: bytes = b"") -> None:
        """Send a message.

        Raises:
            ServeError: the other process is gone.
        """

    def states(self, rows: int) -> bytes:
        """The requested states of this number of rows.

        Raises:
            ServeError: the other process is gone.
        """


class FirstLayers:
    """The first layers, elsewhere."""

    def __init__(self, peer: LayerProvider, count: int) -> None:
        self.count, self._peer, self._numbers = count, peer, 0
        self._gone: list[int] = []

    def room(self, owner: object, num_blocks: int, block_size: int) -> int:
        """The number of a cache over there, which lives as long as ``owner``."""
        self._numbers += 1
        self._peer.tell(MessageHeader(MessageKind.ROOM, self._numbers, num_blocks, block_size))
        self._peer.expected_bytes += HEAD_BYTES
        # A message of its own might come between the parts of an exchange.
        weakref.finalize(owner, self._gone.append, self._numbers)
        return self._numbers

    def states(self, number: int, step: RequestBatch, size: int, dtype: torch.dtype) -> Tensor:
        """What comes out of these layers [N, D].

        Args:
            number: of the cache.
            step: its rows, and what was copied in the cache before.
            size: tokens of a block.
            dtype: of the states.

        Raises:
            ServeError: the other process is gone.
        """
        peer = self._peer
        while self._gone:
            peer.tell(MessageHeader(MessageKind.ROOM, self._gone.pop()))
            peer.expected_bytes += HEAD_BYTES
        body = packed(step, size)
        peer.tell(
            MessageHeader(
                MessageKind.LAYERS, number, len(body), len(step.contexts), len(step.moved)
            ),
            body,
        )
        rows = len(step.tokens)
        peer.expected_bytes += layers_bytes(
            rows,
            peer.hidden * peer.itemsize,
            requests=len(step.contexts),
            blocks=sum(one.num_blocks(size) for one in step.contexts),
            tree_rows=sum(one.length for one in step.contexts if one.seen is not None),
            copies=len(step.moved),
            numbers=sum(len(one.numbers) for one in step.moved),
        )
        raw = bytearray(peer.states(rows))
        # A copy lies as kernels want it.
        return torch.frombuffer(raw, dtype=dtype).view(rows, peer.hidden).clone()


class LaterCache(PagedCache):
    """The cache of the layers that are here; layers keep the numbers that they have in the model.

    Args:
        first: the layers elsewhere.
        config: the whole model.
        options: of :class:`~shoal.serve.cache.paged.PagedCache`.
    """

    def __init__(
        self,
        first: FirstLayers,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        **options: Any,
    ) -> None:
        here = config.model_copy(update={"num_layers": config.num_layers - first.count})
        super().__init__(here, num_blocks, block_size, **options)
        self.config, self._first = config, first
        self._sides[:0] = [()] * first.count
        self._moved: list[CacheCopy] = []
        self._number = first.room(self, num_blocks, block_size)

    def sized(self, num_blocks: int) -> LaterCache:
        return LaterCache(
            self._first, self.config, num_blocks, self.block_size,
            dtype=self.dtype, device=self.device, form=self.form,
        )  # fmt: skip

    def gather(self, layer: int, blocks_BW: Tensor) -> tuple[Tensor, Tensor]:
        return super().gather(layer - self._first.count, blocks_BW)

    def keep(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        super().keep(sources, targets)
        if sources:
            self._moved.append(CacheCopy(CopyMode.KEEP, [*sources, *targets]))

    def move(self, copies: Iterable[Copy]) -> None:
        copies = tuple(copies)
        super().move(copies)
        self._moved += (
            CacheCopy(CopyMode.MOVE, (one.source, one.target, one.num_blocks)) for one in copies
        )

    def states(
        self, contexts: Sequence[RequestContext], tokens_N: Tensor, position_N: Tensor
    ) -> Tensor:
        """What comes out of the layers elsewhere [N, D], whose cache has these rows then.

        Args:
            contexts: of the requests.
            tokens_N: of their rows.
            position_N: place of each.

        Raises:
            ServeError: the process that computes them is gone.
        """
        position, depth, row = position_N.cpu().numpy(), [], 0
        for one in contexts:
            if one.seen is not None:
                depth.append(position[row : row + one.length] - one.start)
            row += one.length
        flat = np.concatenate(depth) if depth else np.empty(0, dtype=np.int64)
        moved, self._moved = self._moved, []
        step = RequestBatch(moved, contexts, tokens_N.cpu().numpy(), flat)
        states = self._first.states(self._number, step, self.block_size, self.dtype)
        return states.to(self.device)


class LaterLayers:
    """A model whose first layers are elsewhere; a :class:`~shoal.serve.engine.runner.FlatModel`.

    Args:
        model: whole; of its first layers nothing is held on to.
        count: of these.
    """

    def __init__(self, model: Transformer, count: int) -> None:
        self.config = model.config
        rest = copy.copy(model)
        rest._modules = dict(model._modules)  # the model that was given keeps its layers
        rest.blocks = nn.ModuleList(list(model.blocks)[count:])
        self._rest = rest
        self.through, self.finished, self.logits = rest.through, rest.finished, rest.logits

    @property
    def weight(self) -> Tensor:
        """See :class:`~shoal.serve.engine.runner.FlatModel`."""
        return self._rest.weight

    def flat(
        self, tokens_N: Tensor, position_N: Tensor, mixer: Mixer, rows_R: Tensor | None = None
    ) -> Tensor:
        """See :class:`~shoal.serve.engine.runner.FlatModel`."""
        assert isinstance(mixer, PagedAttention)
        assert isinstance(mixer.cache, LaterCache)
        x_ND = mixer.cache.states(mixer.contexts, tokens_N, position_N)
        return self.finished(*self.through(x_ND, position_N, mixer, rows_R))


class LaterRows(CapturedRows):
    """Recorded steps of the layers that are here; what they read comes from elsewhere."""

    def write(self, recording: Recording, several: Iterable[TreeRows]) -> None:
        several = tuple(several)
        super().write(recording, several)
        recording.several = several

    def _embed(self, recording: Recording) -> None:
        assert isinstance(self._cache, LaterCache)
        contexts = [
            RequestContext(
                one.start, len(one.depth), one.blocks, None if len(one.depth) == 1 else one.seen
            )
            for one in recording.several
        ]
        tokens_N, position_N = recording.fed[:2]
        recording.x_ND.copy_(self._cache.states(contexts, tokens_N, position_N))
