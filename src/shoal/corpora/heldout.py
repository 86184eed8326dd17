"""Scoring the held-out documents, and the compressors that a model must beat.

Each document is scored alone: it is opened by an end of text, and every one of its
tokens and the end of text after it is predicted exactly once. A document longer than
the context is covered by windows that overlap, so that all tokens but the first
``context`` have at least ``context - stride`` tokens before them. Bits per byte is the
length of the code that the model gives all documents, divided by their UTF-8 bytes.

Source: sliding windows, Baevski and Auli, Adaptive Input Representations, 2019, section 5.
Shapes: b windows of at most C inputs.
"""

from __future__ import annotations

import gzip
import json
import lzma
import math
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from shoal.core.errors import DataError, require
from shoal.core.files import write_json
from shoal.corpora.order import check_split
from shoal.corpora.protocols import Packing
from shoal.corpora.tokens import TokenSet, TokenSplit


class EvalBatch(NamedTuple):
    """Windows to score together.

    Args:
        tokens: int64 [b, C'+1], padded at the end with the end of text; inputs are
            ``[:, :-1]``, targets ``[:, 1:]``.
        scored: bool [b, C']: which targets count; each held-out token that is learned counts once
            in all.
        documents: int64 [b]: the document of each window.
    """

    tokens: np.ndarray
    scored: np.ndarray
    documents: np.ndarray


class _Window(NamedTuple):
    document: int
    begin: int  # first input
    first: int  # first target that counts
    end: int  # past the last target


def heldout_chunks(
    split: TokenSplit,
    *,
    context: int,
    stride: int | None = None,
    batch_tokens: int = 16_384,
    max_tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[EvalBatch]:
    """Batches that score every token of a split once, with its best available context.

    Windows of about equal length go together. With several ranks each gets its share of
    the batches; the ranks' sums add up to the whole.

    Args:
        split: usually ``TokenSet.heldout``.
        context: most inputs of a window, C; at most what the model was made for.
        stride: tokens a window advances; half the context if not given. About
            ``context / stride`` times the tokens pass through the model.
        batch_tokens: inputs of one batch, padding included.
        max_tokens: score about so many tokens at most, in windows spread evenly over
            the split and always the same; None for all.
        rank: which share.
        world: number of shares.

    Raises:
        DataError: nothing is held out.
        ConfigError: a length that cannot be used.
    """
    step = context // 2 if stride is None else stride
    require(context >= 2, "evaluation context", context, expected="at least 2 tokens")
    require(1 <= step <= context, "evaluation stride", step, expected=f"1 to {context}")
    require(0 <= rank < world, "evaluation rank", rank, expected=f"0 to {world - 1}")
    if split.num_documents == 0:
        raise DataError(
            "data: the held-out split has no documents, so evaluation is not possible; "
            "give more documents, or set heldout_every of the corpus to a smaller number"
        )
    windows = _spread(_windows(split, context, step), len(split), max_tokens)
    # Longest first: the largest batch comes before all others, so memory fails early.
    windows.sort(key=lambda window: (window.begin - window.end, window.document, window.begin))
    return _batches(split, windows, batch_tokens, rank, world)


def bits_per_byte(nll: float, tokens: int, split: TokenSplit) -> float:
    """Bits per UTF-8 byte of text.

    Exact when all tokens of the split were scored; of a part of them, their bytes are
    taken to be the split's average.

    Args:
        nll: sum of negative log-likelihoods over the scored tokens, nats.
        tokens: number of scored tokens.
        split: what they are from.
    """
    share = tokens / split.num_learned
    return nll / math.log(2) / (share * split.text_bytes)


def gzip_bits_per_byte(tokens: TokenSet) -> float:
    """Bits per byte of ``gzip -9`` on each held-out document alone; kept beside the tokens."""
    return _compressed(tokens, "gzip", lambda raw: len(gzip.compress(raw, 9, mtime=0)))


def xz_bits_per_byte(tokens: TokenSet) -> float:
    """Bits per byte of ``xz -9e`` on each held-out document alone; kept beside the tokens."""
    preset = 9 | lzma.PRESET_EXTREME
    return _compressed(tokens, "xz", lambda raw: len(lzma.compress(raw, preset=preset)))


def check(tokens: TokenSet, packing: Packing, *, seq_len: int, global_batch: int) -> None:
    """Refuse before the first step what would fail at some later one.

    Raises:
        DataError: training text is shorter than one batch, or nothing is held out.
    """
    check_split(tokens.train, packing, seq_len=seq_len, global_batch=global_batch)
    heldout_chunks(tokens.heldout, context=max(2, seq_len))


def _windows(split: TokenSplit, context: int, stride: int) -> Iterator[_Window]:
    for number in range(split.num_documents):
        targets = int(split.offsets[number + 1] - split.offsets[number])
        end = min(targets, context)
        yield _Window(number, 0, 0, end)
        while end < targets:
            first, end = end, min(targets, end + stride)
            yield _Window(number, end - context, first, end)


def _spread(windows: Iterator[_Window], total: int, limit: int | None) -> list[_Window]:
    if limit is None or limit >= total:
        return list(windows)
    kept: list[_Window] = []
    seen = scored = 0
    for window in windows:
        size = window.end - window.first
        seen += size
        if scored + size / 2 <= limit / total * seen:
            scored += size
            kept.append(window)
    return kept


def _batches(
    split: TokenSplit, windows: list[_Window], batch_tokens: int, rank: int, world: int
) -> Iterator[EvalBatch]:
    start = number = 0
    while start < len(windows):
        length = windows[start].end - windows[start].begin
        chosen = windows[start : start + max(1, batch_tokens // length)]
        if number % world == rank:
            yield _filled(split, chosen, length)
        start += len(chosen)
        number += 1


def _filled(split: TokenSplit, windows: list[_Window], length: int) -> EvalBatch:
    tokens = np.full((len(windows), length + 1), split.end_of_text, dtype=np.int64)
    scored = np.zeros((len(windows), length), dtype=bool)
    for row, (document, begin, first, end) in enumerate(windows):
        # Input 0 is the opening end of text, which is not stored: input i is token i - 1.
        start = int(split.offsets[document])
        opening = 1 if begin == 0 else 0
        split.read(start + begin - 1 + opening, tokens[row, opening : end - begin + 1])
        scored[row, first - begin : end - begin] = True
        if split.learned is not None:
            flags = np.empty(end - first, dtype=np.int64)
            split.learned.read(start + first, flags)
            scored[row, first - begin : end - begin] = flags == 1
    return EvalBatch(tokens, scored, np.array([window.document for window in windows]))


def _compressed(tokens: TokenSet, name: str, size: Callable[[bytes], int]) -> float:
    file = tokens.path / f"baseline-{name}.json"
    if file.is_file():
        try:
            return float(json.loads(file.read_bytes())["bits_per_byte"])
        except (ValueError, KeyError, TypeError):
            file.unlink(missing_ok=True)  # damaged; it is computed again
    if tokens.heldout.text_bytes == 0:
        raise DataError("data: there is no held-out text to compress; give more documents")
    compressed = sum(size(raw) for raw in tokens.heldout_texts())
    result = 8 * compressed / tokens.heldout.text_bytes
    if os.access(tokens.path, os.W_OK):
        write_json(file, {"bits_per_byte": result}, error=DataError)
    return result
