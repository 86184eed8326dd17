"""Prompt tokens in training: put behind some places of the text, and taught what comes later.

Source: Chen et al., Hardware-Aware Parallel Prompt Decoding, 2024, sections 3.2 and 3.3.
Shapes: B sequences, T tokens, N places, m prompt tokens, E members, R = N m E rows, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.random import generator, seed64
from shoal.model.attention import KVCache
from shoal.model.drafters.ppd import PromptTokens, prompt_mask, prompt_positions
from shoal.model.rope import tables_at
from shoal.model.transformer import Transformer
from shoal.train.drafters.protocols import TargetRows

if TYPE_CHECKING:
    from shoal.train.drafters.ppd import PpdTraining


class _Context(KVCache):
    """Keys and values of a text, before those of rows that hang behind it and are not kept."""

    def __init__(self, text: KVCache) -> None:
        self._text = text

    def append(
        self, layer: int, k_BTKd: Tensor, v_BTKd: Tensor, prefix_2PMKd: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """All keys and values of one layer."""
        assert prefix_2PMKd is None  # targets with streams are refused
        keys, values = self._text.held(layer)
        return torch.cat((keys, k_BTKd), 1), torch.cat((values, v_BTKd), 1)


def behind(
    target: Transformer, tokens_BT: Tensor, prompts: PromptTokens, places_N: Tensor
) -> Tensor:
    """Final hidden states of the prompt tokens behind some places, [B, N, m E, D].

    Args:
        target: stands still.
        tokens_BT: the text.
        prompts: the embeddings.
        places_N: places behind which they hang.
    """
    count, ensemble = prompts.embeddings.shape[:2]
    batch, length = tokens_BT.shape
    dtype = target.weight.dtype
    cache = KVCache(target.config, batch, length, dtype=dtype)
    with torch.no_grad():
        target.hidden(tokens_BT, cache=cache)
    group = prompts.group().to(dtype)
    x = group.repeat(len(places_N), 1).expand(batch, -1, -1)
    positions = prompt_positions(places_N, count, ensemble)
    cos, sin = tables_at(positions.float(), *target.unstretched, dtype)
    mask = prompt_mask(length, places_N, count, ensemble, dtype)[length:]
    context = _Context(cache)
    for block in target.blocks:
        x = block(x, cos, sin, mask[None, None], context)
    normed: Tensor = target.norm(x)
    return normed.reshape(batch, len(places_N), prompts.rows, -1)


class PromptLearner:
    """The embeddings of prompt tokens learn what the target says later.

    Args:
        target: stands still.
        seed: of the first embeddings and of the places.
    """

    def __init__(self, part: PpdTraining, target: Transformer, seed: int) -> None:
        self.part, self._seed = part, seed
        self.target = target.requires_grad_(False)
        self.prompts = PromptTokens(part.prompts, part.ensemble, target.config.hidden)
        self.net: nn.Module = self.prompts
        draws = torch.Generator().manual_seed(seed64(seed, purpose="prompt tokens"))
        some = torch.randint(0, target.config.vocab_size, (self.prompts.rows,), generator=draws)
        with torch.no_grad():
            known = target.embed.weight[some].float()
            self.prompts.embeddings.copy_(known.view_as(self.prompts.embeddings))

    def groups(self) -> Sequence[tuple[Sequence[nn.Parameter], float]]:
        """The embeddings."""
        return [([self.prompts.embeddings], self.part.lr)]

    def loss(self, rows: TargetRows, *, step: int, total: int) -> Tensor:
        """Mean of ``sum_i decay^(i - 1) KL(target at t + i || prompt token i behind t)``."""
        part, length = self.part, rows.tokens.shape[1]
        draws = generator(self._seed, purpose="prompt places", step=step)
        last = length - part.prompts - 1
        places = torch.from_numpy(draws.permutation(last)[: part.points].copy()).sort().values
        said = self._logits(rows.tokens, places)
        terms: list[Tensor] = []
        for ahead in range(1, part.prompts + 1):
            true = self.target.logits(rows.hidden[:, places + ahead].to(self.target.weight.dtype))
            wanted = F.log_softmax(true.float(), -1).flatten(0, 1)
            result = F.log_softmax(said[ahead - 1].float(), -1)
            apart = F.kl_div(result, wanted, reduction="batchmean", log_target=True)
            terms.append(part.decay ** (ahead - 1) * apart)
        return torch.stack(terms).sum()

    def _logits(self, tokens: Tensor, places: Tensor) -> Tensor:
        """[m, B N, V]."""
        hidden = behind(self.target, tokens, self.prompts, places).flatten(0, 1)
        groups, rows, _ = hidden.shape
        logits = self.target.logits(hidden.flatten(0, 1)).view(groups, rows, -1)
        return self.prompts.mean(logits).transpose(0, 1)

    def guesses(self, rows: TargetRows, places: Sequence[int]) -> Tensor:
        """Logits of each prompt token."""
        return self._logits(rows.tokens, torch.tensor(places))

    def state(self) -> Mapping[str, Tensor]:
        """The embeddings."""
        return self.prompts.state_dict()

    def finish(self, directory: Path) -> Path | None:
        """The target is what it was."""
        return None
