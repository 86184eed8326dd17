"""Windows in which every token knows its document, so that nothing crosses documents.

Source: Dubey et al., The Llama 3 Herd of Models, 2024, section 3.2 (document mask).
Shapes: N windows of T + 1 tokens.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.core.random import seed64
from shoal.corpora.protocols import WindowTokens, data_time
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work


@part
class DocumentMask:
    """Attention and loss stay inside a document.

    A document is stored as end of text, its tokens, end of text: its first token is predicted from
    the first end of text, and the second one is predicted as its end, as if the document were
    scored alone. Windows are those of ``stream``; ids count the documents of a window from 0.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"separates_documents"})

    def num_windows(self, split: WindowTokens, seq_len: int) -> int:
        """Windows of one epoch."""
        return max(0, len(split) + split.num_documents - 1) // seq_len

    def fill(
        self, split: WindowTokens, windows_N: np.ndarray, *, seq_len: int, seed: int, epoch: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 [N, T+1] and document ids int32 [N, T+1]."""
        starts = split.offsets  # [documents + 1], without the opening end of text
        count = split.num_documents
        size = len(split) + count
        offset = seed64(seed, purpose="document offset", step=epoch) % size
        tokens = np.empty((len(windows_N), seq_len + 1), dtype=np.int64)
        documents = np.empty((len(windows_N), seq_len + 1), dtype=np.int32)
        for row, window in enumerate(windows_N.tolist()):
            position = (offset + window * seq_len) % size
            # Document d opens at starts[d] + d; both grow, so bisection finds it.
            document = _document_at(starts, count, position)
            done = 0
            number = 0
            while done <= seq_len:
                begin = int(starts[document])
                inside = position - (begin + document)
                length = int(starts[document + 1]) - begin + 1
                take = min(length - inside, seq_len + 1 - done)
                piece = tokens[row, done : done + take]
                if inside == 0:
                    piece[0] = split.end_of_text
                    split.read(begin, piece[1:])
                else:
                    split.read(begin + inside - 1, piece)
                documents[row, done : done + take] = number
                done += take
                number += 1
                document = (document + 1) % count
                position = int(starts[document]) + document
        return tokens, documents

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Each token is read as 2 to 4 bytes and written as 8, its document id as 4."""
        # Seconds a window and a batch take in Python, measured once on a server CPU.
        return data_time(work, machine, bytes_per_token=14, row_s=1.5e-5, fixed_s=1.5e-4)


def _document_at(starts: np.ndarray, count: int, position: int) -> int:
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if int(starts[middle]) + middle <= position:
            low = middle
        else:
            high = middle
    return low
