"""Sequences as a masked-diffusion model learns them: some tokens hidden, all of them seen.

Of each sequence a share t ~ U(0, 1) of the tokens is replaced by the mask token; the loss is the
cross-entropy of the hidden tokens, times 1/t. In expectation that is a bound of the negative log
likelihood. The shares of a batch are spread evenly over (0, 1], which keeps each of them uniform
and makes the sum vary less.

Source: Sahoo et al., Simple and Effective Masked Diffusion Language Models, 2024, equation 11 and
appendix C.3 (even spread); Nie et al., Large Language Diffusion Models (LLaDA), 2025, equation 3.
Shapes: B sequences of the global batch, b of them here, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.model.loss import IGNORE

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.corpora.tokens import TokenSet

# A share of 0 would divide by 0; below this hardly any sequence has a hidden token.
_LEAST = 1e-3


class MaskedBatch(NamedTuple):
    """Sequences with hidden tokens.

    Args:
        inputs: tokens int64 [b, T], the hidden ones replaced.
        targets: the hidden tokens int64 [b, T], and -100 elsewhere.
        weights: 1/t of each sequence [b], fp32.
    """

    inputs: Tensor
    targets: Tensor
    weights: Tensor


def masked(
    tokens_bT: Tensor,
    mask_id: int,
    *,
    seed: int,
    step: int,
    first: int,
    total: int,
    kept_bT: Tensor | None = None,
) -> MaskedBatch:
    """Hide tokens; which ones depends on the seed, the step and the place in the global batch.

    Args:
        tokens_bT: token ids int64.
        mask_id: what stands where a token is hidden.
        seed: of the run.
        step: global step.
        first: number of the first sequence in the global batch.
        total: sequences B of the global batch.
        kept_bT: bool, tokens that are never hidden.
    """
    rows, length = tokens_bT.shape
    shift = generator(seed, purpose="mask ratio", step=step).random()
    share_b = (shift + np.arange(first, first + rows) / total) % 1.0
    share_b = _LEAST + (1 - _LEAST) * share_b
    draws = generator(seed, purpose="mask", step=step).random((first + rows, length))[first:]
    hidden_bT = torch.from_numpy(draws < share_b[:, None]).to(tokens_bT.device)
    if kept_bT is not None:
        hidden_bT &= ~kept_bT
    return MaskedBatch(
        tokens_bT.masked_fill(hidden_bT, mask_id),
        tokens_bT.masked_fill(~hidden_bT, IGNORE),
        torch.from_numpy((1 / share_b).astype(np.float32)).to(tokens_bT.device),
    )


def given(tokens_bT: Tensor, mark: int) -> Tensor:
    """Where a sequence is given and nothing is learned: up to its first ``mark``, bool [b, T]."""
    marks = (tokens_bT == mark).long()
    return (marks.cumsum(1) - marks) == 0


def mark_of(learn_after: str, tokens: TokenSet) -> int:
    """The token behind which sequences are learned.

    Raises:
        ConfigError: the text is no single token.
    """
    result = tokens.tokenizer().encode(learn_after, add_special_tokens=False).ids
    if len(result) != 1:
        raise ConfigError(
            f"learn_after = {learn_after!r}: {len(result)} tokens; give a text that is one token"
        )
    return int(result[0])
