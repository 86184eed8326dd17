"""A step of the target as it is sent to the process of its first layers, and read there.

What is written: copies inside the cache since the last step, each a kind, a length and so many
numbers; of each request where its rows begin, how many they are, whether they are a tree, and how
many blocks it holds; these blocks; tokens; and of rows of trees their depth and what they see.

Shapes: N rows of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from shoal.serve.cache.attention import RequestContext

_WORD = np.dtype(np.uint32)
_BITS = np.dtype(np.int64)


class CopyMode(IntEnum):
    """How something is copied inside a cache."""

    KEEP = 1
    """tokens: slots, and as many slots that they go to"""
    MOVE = 2
    """blocks: the first, where they go, how many"""


class CacheCopy(NamedTuple):
    """One copy inside a cache; what the numbers mean is with :class:`CopyMode`."""

    kind: CopyMode
    numbers: Sequence[int]


class RequestBatch(NamedTuple):
    """Rows of several requests, and what comes before them.

    Args:
        moved: copies inside the cache, in order.
        contexts: of the requests.
        tokens: of the rows [N].
        depth: of rows of trees, how far behind the root each stands.
    """

    moved: Sequence[CacheCopy]
    contexts: Sequence[RequestContext]
    tokens: np.ndarray
    depth: np.ndarray

    def positions(self) -> np.ndarray:
        """Place of each row in its request [N]."""
        result, first = [], 0
        for one in self.contexts:
            if one.seen is None:
                result.append(np.arange(one.start, one.stop))
            else:
                result.append(one.start + self.depth[first : first + one.length].astype(np.int64))
                first += one.length
        return np.concatenate(result)

    def slots(self, size: int) -> np.ndarray:
        """Where the keys and values of each row go [N], in blocks of ``size`` tokens."""
        results = []
        for one in self.contexts:
            at = np.arange(one.start, one.stop)
            results.append(np.asarray(one.blocks, dtype=np.int64)[at // size] * size + at % size)
        return np.concatenate(results)


def packed(step: RequestBatch, size: int) -> bytes:
    """A step as it is sent.

    Args:
        step: of one request or more.
        size: tokens of a block.
    """
    words: list[int] = []
    for kind, numbers in step.moved:
        words += (kind, len(numbers), *numbers)
    blocks: list[int] = []
    for one in step.contexts:
        count = one.num_blocks(size)
        words += (one.start, one.length, one.seen is not None, count)
        blocks += one.blocks[:count]
    body = np.array([*words, *blocks], dtype=_WORD).tobytes() + step.tokens.astype(_WORD).tobytes()
    seen = [one.seen for one in step.contexts if one.seen is not None]
    if seen:
        body += np.concatenate(seen).astype(_BITS).tobytes() + step.depth.astype(np.uint8).tobytes()
    return body


def unpacked(body: bytes, requests: int, copies: int) -> RequestBatch:
    """A step as it was sent.

    Args:
        body: of the message.
        requests: whose rows it has.
        copies: that it begins with.
    """
    at = 0

    def words(count: int) -> np.ndarray:
        nonlocal at
        words = np.frombuffer(body, _WORD, count, at)
        at += words.nbytes
        return words

    moved = []
    for _ in range(copies):
        kind, length = words(2).tolist()
        moved.append(CacheCopy(CopyMode(kind), words(length).tolist()))
    heads = words(4 * requests).reshape(requests, 4).tolist()
    blocks = [words(count).tolist() for *_, count in heads]
    tokens = words(sum(length for _, length, *_ in heads)).astype(np.int64)
    rows = sum(length for _, length, tree, _ in heads if tree)
    seen = np.frombuffer(body, _BITS, rows, at)
    depth = np.frombuffer(body, np.uint8, rows, at + seen.nbytes)
    contexts, first = [], 0
    for (start, length, tree, _), held in zip(heads, blocks, strict=True):
        own = None
        if tree:
            own, first = seen[first : first + length], first + length
        contexts.append(RequestContext(start, length, held, own))
    return RequestBatch(moved, contexts, tokens, depth)
