"""Windows over all documents laid end to end, each closed by the end of text.

Source: Brown et al., Language Models are Few-Shot Learners (GPT-3), 2020, appendix B.
Shapes: N windows of T + 1 tokens.
"""

from __future__ import annotations

import numpy as np

from shoal.core.parts import part
from shoal.core.random import seed64
from shoal.corpora.protocols import WindowTokens, data_time
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work


@part
class StreamPacking:
    """Concatenate documents without padding; attention crosses document boundaries.

    Window w of an epoch starts at ``offset + w * T``, so neighbours share one token and each token
    is a target once. The tokens form a ring and the offset is random in every epoch, so windows
    differ between epochs; less than one window per epoch, the remainder of the division by T, is
    not read.
    """

    def num_windows(self, split: WindowTokens, seq_len: int) -> int:
        """Windows of one epoch."""
        return max(0, len(split) - 1) // seq_len

    def fill(
        self, split: WindowTokens, windows_N: np.ndarray, *, seq_len: int, seed: int, epoch: int
    ) -> tuple[np.ndarray, None]:
        """Tokens int64 [N, T+1]; no document ids."""
        size = len(split)
        offset = seed64(seed, purpose="stream offset", step=epoch) % size
        tokens = np.empty((len(windows_N), seq_len + 1), dtype=np.int64)
        for row, window in enumerate(windows_N.tolist()):
            split.read((offset + window * seq_len) % size, tokens[row])
        return tokens, None

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Each token is read as 2 to 4 bytes and written as 8."""
        # Seconds a window and a batch take in Python, measured once on a server CPU.
        return data_time(work, machine, bytes_per_token=10, row_s=8e-6, fixed_s=1.1e-4)
