"""Embeddings of prompt tokens: behind the current token, the target's own outputs at them guess on.

Row (i, j) is member j of prompt token i. It stands i places behind the current token, sees the
ordinary context and member j of the prompt tokens before it; ordinary rows never see it. The
guess of distance i is the mean of the logits of its members.

Source: Chen et al., Hardware-Aware Parallel Prompt Decoding, 2024, section 3.
Shapes: m prompt tokens, E members, D hidden, N places behind which a group of them hangs, T
ordinary rows.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PromptTokens(nn.Module):
    """The embeddings."""

    def __init__(self, prompts: int, ensemble: int, hidden: int) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.zeros(prompts, ensemble, hidden))

    @property
    def rows(self) -> int:
        """Rows of one group: m E."""
        return self.embeddings.shape[0] * self.embeddings.shape[1]

    def group(self) -> Tensor:
        """The rows of one group [m E, D], member by member of each prompt token."""
        return self.embeddings.flatten(0, 1)

    def mean(self, logits_NRV: Tensor) -> Tensor:
        """Logits of each distance [N, m, V] from those of a group's rows."""
        prompts, ensemble, _ = self.embeddings.shape
        groups, _, vocab = logits_NRV.shape
        return logits_NRV.view(groups, prompts, ensemble, vocab).mean(2)


def prompt_positions(places_N: Tensor, prompts: int, ensemble: int) -> Tensor:
    """Positions of the rows of all groups [N m E]: place + i for every member of token i = 1..m."""
    ahead = torch.arange(1, prompts + 1).repeat_interleave(ensemble)
    return (places_N.unsqueeze(1) + ahead).reshape(-1)


def prompt_mask(
    length: int, places_N: Tensor, prompts: int, ensemble: int, dtype: torch.dtype
) -> Tensor:
    """Additive mask [T + N m E, T + N m E]: ordinary rows first, then the groups.

    Args:
        length: T; ordinary rows are causal and see no prompt token.
        places_N: place behind which each group hangs; it sees the ordinary rows up to there.
        prompts: m.
        ensemble: E.
        dtype: of the mask.
    """
    group = prompts * ensemble
    rows = length + len(places_N) * group
    sees = torch.zeros(rows, rows, dtype=torch.bool)
    sees[:length, :length] = torch.ones(length, length, dtype=torch.bool).tril_()
    behind = places_N.repeat_interleave(group)
    sees[length:, :length] = torch.arange(length) <= behind.unsqueeze(1)
    token = torch.arange(prompts).repeat_interleave(ensemble)
    member = torch.arange(ensemble).repeat(prompts)
    inside = (token.unsqueeze(0) <= token.unsqueeze(1)) & (
        member.unsqueeze(0) == member.unsqueeze(1)
    )
    for number in range(len(places_N)):
        first = length + number * group
        sees[first : first + group, first : first + group] = inside
    return torch.zeros(rows, rows, dtype=dtype).masked_fill_(~sees, float("-inf"))
