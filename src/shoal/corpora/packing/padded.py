"""Windows of one document each, filled up with the end of text.

Source: Nie et al., Large Language Diffusion Models (LLaDA), 2025, section 2.3 (the ends behind an
answer are learned as part of it).
Shapes: N windows of T + 1 tokens.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shoal.core.parts import part
from shoal.corpora.protocols import WindowTokens, data_time
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work


@part
class PaddedPacking:
    """One document per window, for short documents such as question and answer.

    It begins with the document's first token. The remaining positions are filled with the end of
    text, which is trained like any token; longer documents are truncated.
    """

    traits: ClassVar[frozenset[str]] = frozenset(
        {"keeps_beginnings", "one_document", "separates_documents"}
    )

    def num_windows(self, split: WindowTokens, seq_len: int) -> int:
        """Windows of one epoch: documents."""
        return split.num_documents

    def fill(
        self, split: WindowTokens, windows_N: np.ndarray, *, seq_len: int, seed: int, epoch: int
    ) -> tuple[np.ndarray, None]:
        """Tokens int64 [N, T+1]; no document ids."""
        tokens = np.full((len(windows_N), seq_len + 1), split.end_of_text, dtype=np.int64)
        for row, document in enumerate(windows_N.tolist()):
            begin, end = split.offsets[document], split.offsets[document + 1]
            split.read(int(begin), tokens[row, : min(int(end - begin), seq_len + 1)])
        return tokens, None

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Each token is read as 2 to 4 bytes and written as 8."""
        # Seconds a window and a batch take in Python, measured once on a server CPU.
        return data_time(work, machine, bytes_per_token=10, row_s=8e-6, fixed_s=1.1e-4)
