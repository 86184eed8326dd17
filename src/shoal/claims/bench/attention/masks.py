"""The patterns of the benchmark over documents of real lengths.

A document is a file of the Python standard library, a token a byte. A sequence is filled with
documents drawn at random among those that fit into it; the last one is cut.

Source: Long-Context Attention Benchmark, 2025 (the patterns).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from shoal.core.errors import UnknownPartError, nearest, require
from shoal.core.random import generator
from shoal.corpora.stdlib import Stdlib
from shoal.ir.mask import Mask

# Length, lengths of documents, block, seed -> mask.
_Pattern = Callable[[int, Sequence[int], int, int], Mask]

MASKS: dict[str, _Pattern] = {
    "full": lambda length, documents, block, seed: Mask.full(length),
    "causal": lambda length, documents, block, seed: Mask.causal(length),
    "document": lambda length, documents, block, seed: Mask.document(_ids(documents), causal=False),
    "causal_document": lambda length, documents, block, seed: Mask.document(_ids(documents)),
    "sliding": lambda length, documents, block, seed: Mask.sliding(
        length, max(1, length // 16), causal=False
    ),
    "causal_sliding": lambda length, documents, block, seed: Mask.sliding(
        length, max(1, length // 8)
    ),
    "shared_question": lambda length, documents, block, seed: Mask.shared_question(
        [_question(size) for size in documents]
    ),
    "prefix_lm": lambda length, documents, block, seed: Mask.prefix(length, length // 4),
    "global_sliding": lambda length, documents, block, seed: Mask.global_sliding(
        length, max(1, length // 32), length // 32
    ),
    "causal_blockwise": lambda length, documents, block, seed: Mask.causal_blockwise(documents),
    "block_sparse_20": lambda length, documents, block, seed: Mask.random_blocks(
        length, block, 0.2, seed
    ),
    "block_sparse_50": lambda length, documents, block, seed: Mask.random_blocks(
        length, block, 0.5, seed
    ),
    "block_sparse_80": lambda length, documents, block, seed: Mask.random_blocks(
        length, block, 0.8, seed
    ),
}


def check_masks(names: Sequence[str]) -> None:
    """Refuse names that are no pattern.

    Raises:
        UnknownPartError: lists the patterns.
    """
    for name in names:
        if name not in MASKS:
            hint = nearest(name, MASKS)
            raise UnknownPartError(
                f"masks = {name!r}: expected one of {', '.join(MASKS)}"
                + (f"; {hint}" if hint else "")
            )


def build_mask(
    name: str, length: int, *, block: int, seed: int, pool: Sequence[int] | None = None
) -> Mask:
    """A pattern over one sequence; the same for the same arguments.

    Args:
        name: the pattern.
        length: tokens T.
        block: edge of the blocks of block-sparse patterns.
        seed: of documents and blocks.
        pool: lengths of documents to draw from; those of real files if not given.

    Raises:
        UnknownPartError: there is no such pattern.
        ConfigError: the length is not a multiple of the block.
    """
    check_masks([name])
    return MASKS[name](length, document_lengths(length, seed=seed, pool=pool), block, seed)


@functools.cache
def real_lengths() -> tuple[int, ...]:
    """Bytes of every file of the standard library that is not empty, rising.

    Raises:
        DataError: this Python has no source.
    """
    sizes = (len(document.text.encode()) for document in Stdlib().documents())
    return tuple(sorted(size for size in sizes if size))


def document_lengths(
    length: int, *, seed: int, index: int = 0, pool: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Lengths of documents that fill a sequence; their sum is ``length``.

    Args:
        length: tokens of the sequence.
        seed: of the draw.
        index: number of the sequence.
        pool: lengths to draw from; those longer than the sequence are never drawn.
    """
    fitting = [size for size in (real_lengths() if pool is None else pool) if 0 < size <= length]
    require(
        bool(fitting),
        "documents",
        f"none of up to {length} tokens",
        expected="at least one that fits into a sequence",
    )
    draw = generator(seed, purpose="bench.documents", step=length, index=index)
    document_lengths: list[int] = []
    left = length
    while left:
        document_lengths.append(min(left, fitting[int(draw.integers(len(fitting)))]))
        left -= document_lengths[-1]
    return tuple(document_lengths)


def _ids(documents: Sequence[int]) -> np.ndarray:
    return np.repeat(np.arange(len(documents)), documents)


def _question(size: int) -> list[int]:
    """A document as a question, half of it, and up to three answers."""
    if size < 8:
        return [size]
    answers = size - size // 2
    third = answers // 3
    return [size // 2, third, third, answers - 2 * third]
