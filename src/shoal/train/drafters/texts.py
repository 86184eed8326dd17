"""The text that drafters learn from: the user's, or the target's own.

What is decoded is the target's own text, so the places at which guesses are judged always lie
in greedy continuations by the target.

Source of sampling the training text from the target: Cai et al., Medusa, 2024, section 2.3.2.
Shapes: B sequences, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.random import Permutation, seed64
from shoal.corpora.tokens import TokenSplit
from shoal.model.attention import KVCache
from shoal.model.transformer import Transformer


def windows(split: TokenSplit, seq_len: int, count: int, kept: int, seed: int) -> np.ndarray:
    """Windows of a split, drawn without repeats: ``count`` at most to train on, ``kept`` last.

    Returns:
        int64 [N, T], the last ``kept`` of which nothing is trained on.

    Raises:
        DataError: there is less text than one window beside those that are kept.
    """
    there = len(split) // seq_len
    if there <= kept:
        raise DataError(
            f"data: {len(split)} tokens are {there} windows of seq_len = {seq_len}, and {kept} are "
            "kept for calibration; give more text, or smaller seq_len or calibration_prompts"
        )
    number = min(there, count + kept)
    order = Permutation(there, seed64(seed, purpose="drafter windows"))(np.arange(number))
    windows = np.empty((number, seq_len), dtype=np.int64)
    for row, window in enumerate(order.tolist()):
        split.read(window * seq_len, windows[row])
    return windows


@torch.no_grad()
def continued(
    target: Transformer,
    prompts_BP: Tensor,
    length: int,
    temperatures: Callable[[int], Sequence[float]],
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Sequences that the target goes on with, and what it makes of them.

    Args:
        target: in the dtype of the computation.
        prompts_BP: the beginnings, of one length.
        length: T, of the whole sequences.
        temperatures: place -> temperature of each row for the token there; 0 is greedy.
        seed: of the draws.

    Returns:
        Tokens [B, T] and final hidden states [B, T, D].
    """
    rows, start = prompts_BP.shape
    dtype = target.weight.dtype
    cache = KVCache(target.config, rows, length, dtype=dtype)
    tokens = torch.empty(rows, length, dtype=torch.int64)
    hidden = torch.empty(rows, length, target.config.hidden, dtype=dtype)
    tokens[:, :start] = prompts_BP
    done, draws = 0, torch.Generator().manual_seed(seed64(seed, purpose="drafter text"))
    for stop in range(start, length + 1):
        hidden[:, done:stop] = target.hidden(tokens[:, done:stop], cache=cache)
        if stop < length:
            logits = target.logits(hidden[:, stop - 1]).float()
            heat = torch.tensor(temperatures(stop)).unsqueeze(1)
            shares = torch.softmax(logits / heat.clamp(min=1e-3), -1)
            drawn = torch.multinomial(shares, 1, generator=draws)
            tokens[:, stop] = torch.where(heat > 0, drawn, logits.argmax(-1, True))[:, 0]
        done = stop
    return tokens, hidden
