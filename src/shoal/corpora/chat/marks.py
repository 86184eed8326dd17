"""Which tokens of chats are learned: found where texts are tokenised, kept as spans.

Shapes: N tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shoal.core.errors import DataError
from shoal.corpora.protocols import Document, WindowTokens

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer


class LearnedTokens:
    """Which tokens of a split are learned, laid out as the split: 1 where one is, else 0.

    A packing fills windows with these as with tokens, so that both are cut alike.

    Args:
        split: whose tokens.
        spans: (begin, end) of what is learned, one after the other, int64 [2 * spans].
    """

    end_of_text = 0  # what a packing puts between or behind documents is not learned

    def __init__(self, split: WindowTokens, spans: np.ndarray) -> None:
        self.offsets = split.offsets
        self.num_documents = split.num_documents
        self.total = int((spans[1::2] - spans[::2]).sum())
        self._spans = spans
        self._size = len(split)

    def __len__(self) -> int:
        """Tokens of the split."""
        return self._size

    def read(self, start: int, out_N: np.ndarray) -> None:
        """Fill ``out_N`` with 1 and 0 from a token on; after the last comes the first."""
        places = np.arange(start, start + len(out_N)) % self._size
        out_N[:] = np.searchsorted(self._spans, places, side="right") & 1


def mark(
    document: Document,
    spans: Sequence[tuple[int, int]],
    tokenizer: Tokenizer,
    encoding: Encoding,
    end: int,
) -> tuple[bytes, list[int], np.ndarray]:
    """The text of a document that is learned, all tokens, and which are learned, its end included.

    No token lies across the beginning of an answer, as none does where a prompt is served.

    Args:
        document: the text.
        spans: (begin, end) in characters of what of it is learned.
        tokenizer: that has encoded it.
        encoding: the text as a whole.
        end: the end of text that follows it; it is learned unless the answer ends with it.

    Raises:
        DataError: no token begins in what is learned.
    """
    text, ids = document.text, encoding.ids
    places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
    begins = places[:, 0]
    # Some tokenizers leave the blank before a word out of its place.
    cuts = [
        begin
        for begin, _ in spans
        if begin and (text[begin - 1] == " " or ((begins < begin) & (places[:, 1] > begin)).any())
    ]
    if cuts:
        edges = [0, *cuts, len(text)]
        pieces = [
            tokenizer.encode(text[edge:stop], add_special_tokens=False)
            for edge, stop in itertools.pairwise(edges)
        ]
        ids = [one for piece in pieces for one in piece.ids]
        begins = np.array(
            [
                edge + at
                for edge, piece in zip(edges, pieces, strict=False)
                for at, _ in piece.offsets
            ],
            dtype=np.int64,
        )
    bounds = np.array(spans, dtype=np.int64).reshape(-1)
    flags = np.searchsorted(bounds, begins, side="right") % 2 == 1
    if not flags.any():
        raise DataError(
            f"data: {document.name}: the chat template removes the answer; remove the row, or "
            f"give another data.template"
        )
    closes = spans[-1][1] == len(text) and end not in np.array(ids)[flags]
    raw = "".join(text[begin:stop] for begin, stop in spans).encode()
    return raw, ids, np.append(flags, closes)


def last_sign(tokenizer: Tokenizer, ids: list[int], signs: set[int]) -> int | None:
    """The special token that ends a text, if only blanks follow it."""
    for at in range(len(ids) - 1, -1, -1):
        if ids[at] in signs:
            return ids[at]
        if tokenizer.decode([ids[at]]).strip():
            return None
    return None
