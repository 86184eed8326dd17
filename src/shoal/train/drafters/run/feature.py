"""Drafters of features in training: their loss, and their guesses along the true path.

Glancing: a first pass without gradient says how many tokens the net would get wrong; so many
places, times a share that falls over the run, are shown what comes k places later, in both of
their streams, and the second pass is made on these inputs.

Source: Gao et al., Falcon, 2025, section 3.2 (coupled sequential glancing distillation); the loss
of features and tokens: Li et al., EAGLE, 2024, section 4.2.
Differs: places that were shown the later features are left out of the loss, as in the glancing
that it is made of (Qian et al., Glancing Transformer, 2021): there the answer is the input.
Shapes: B sequences, T tokens, L supervised places, D hidden, V vocabulary, P judged places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.random import generator
from shoal.model.attention import KVCache
from shoal.model.transformer import Transformer
from shoal.train.drafters.protocols import TargetRows


class FeatureNet(Protocol):
    """A net that makes the features k places further of features and tokens."""

    k: int

    def cache(self, batch: int, capacity: int, dtype: torch.dtype) -> KVCache:
        """An empty cache for its layers."""

    def mixed(self, features_BTD: Tensor, embeds_BTD: Tensor, state: Any = None) -> Any:
        """What its layers read, and the state behind these places."""

    def seen(
        self, x_BTD: Tensor, position_T: Tensor, mask: Tensor | None, cache: KVCache | None = None
    ) -> Tensor:
        """Features k places further."""

    def __call__(self, features_BTD: Tensor, embeds_BTD: Tensor, *, shift: int = 0) -> Tensor:
        """Features k places further of every place."""


@dataclass(frozen=True)
class FeatureLoss:
    """``SmoothL1(features) + weight (soft KL(target || drafter) + (1 - soft) CE)``.

    Args:
        weight: what the loss of tokens counts.
        soft: share of the target's distribution in it; the rest is for the token of the text.
    """

    weight: float
    soft: float

    def __call__(
        self,
        found_ND: Tensor,
        true_ND: Tensor,
        next_N: Tensor,
        output_VD: Tensor,
        wanted_NV: Tensor | None = None,
    ) -> Tensor:
        """The mean over N places.

        Args:
            found_ND: the drafter's features.
            true_ND: the target's.
            next_N: the tokens of the text that follow them.
            output_VD: the target's output matrix.
            wanted_NV: scores by the target's features, if they are known.
        """
        near = F.smooth_l1_loss(found_ND.float(), true_ND.float())
        said = F.log_softmax(F.linear(found_ND, output_VD.to(found_ND.dtype)).float(), -1)
        if wanted_NV is None:
            wanted_NV = F.linear(true_ND, output_VD.to(true_ND.dtype))
        wanted = wanted_NV.float().softmax(-1)
        apart = F.kl_div(said, wanted, reduction="batchmean")
        total = self.soft * apart
        if self.soft < 1:
            total = total + (1 - self.soft) * F.nll_loss(said, next_N)
        return near + self.weight * total


class FeatureLearner:
    """A net that learns the target's features.

    Args:
        target: gives embedding and output matrix, which stand still.
        loss: of features and tokens.
        glance: shares of the wrong places that are shown, at the beginning and at the end.
        rounds: passes of the net whose draft tokens are evaluated.
        seed: seed of the revealed positions.
    """

    def __init__(
        self,
        net: nn.Module,
        target: Transformer,
        *,
        lr: float,
        loss: FeatureLoss,
        glance: tuple[float, float] = (0.0, 0.0),
        rounds: int = 1,
        seed: int = 0,
    ) -> None:
        self.net = net
        self.embed_VD = target.embed.weight.detach()
        self.output_VD = target.output_weight.detach()
        self._lr, self._loss, self._glance = lr, loss, glance
        self._rounds, self._seed = rounds, seed

    @property
    def _guess(self) -> Any:
        """The net by what it promises."""
        return self.net

    def groups(self) -> Sequence[tuple[Sequence[nn.Parameter], float]]:
        """The whole net."""
        return [(list(self.net.parameters()), self._lr)]

    def state(self) -> Mapping[str, Tensor]:
        """The net."""
        return self.net.state_dict()

    def finish(self, directory: Path) -> Path | None:
        """The target is what it was."""
        return None

    def loss(self, rows: TargetRows, *, step: int, total: int) -> Tensor:
        """The loss on the text, some of whose places look ahead."""
        net: FeatureNet = self._guess
        k = net.k
        length = rows.tokens.shape[1] - k - 1
        features = rows.hidden[:, :length]
        # Side by side, or every product with them would first copy the matrix for each sequence.
        wanted = rows.hidden[:, k : k + length].contiguous()
        tokens, later = rows.tokens[:, 1 : length + 1], rows.tokens[:, k + 1 : k + 1 + length]
        shift = step % k
        counted: Tensor | None = None
        share = self._share(step, total)
        scores = F.linear(wanted, self.output_VD.to(wanted.dtype))
        if share > 0:
            right = scores.max(-1).indices  # a fifth of the time of argmax
            shown = self._shown(features, tokens, right, share, shift, step)
            features = torch.where(shown.unsqueeze(-1), wanted, features)
            tokens = torch.where(shown, later, tokens)
            counted = ~shown
        result = net(features, F.embedding(tokens, self.embed_VD), shift=shift)
        flat = (result, wanted, later, scores)
        if counted is not None and bool(counted.any()):
            made, true, words, scored = (one[counted] for one in flat)
        else:
            made, true, words, scored = (one.flatten(0, 1) for one in flat)
        return self._loss(made, true, words, self.output_VD, scored)

    def _share(self, step: int, total: int) -> float:
        first, last = self._glance
        return first + (last - first) * (step / max(1, total - 1))

    @torch.no_grad()
    def _shown(
        self,
        features: Tensor,
        tokens: Tensor,
        right: Tensor,
        share: float,
        shift: int,
        step: int,
    ) -> Tensor:
        """Places [B, L] that look ahead: whole blocks, as many as the first pass calls for."""
        net: FeatureNet = self._guess
        result = net(features, F.embedding(tokens, self.embed_VD), shift=shift)
        said = F.linear(result, self.output_VD.to(result.dtype)).max(-1).indices
        wrong = int((said != right).sum())
        rows, length = tokens.shape
        block = (torch.arange(length) + shift) // net.k
        blocks = int(block[-1]) + 1
        number = min(rows * blocks, round(share * wrong / net.k))
        draws = generator(self._seed, purpose="glancing", step=step)
        chosen = torch.zeros(rows * blocks, dtype=torch.bool)
        chosen[torch.from_numpy(draws.permutation(rows * blocks)[:number].copy())] = True
        return chosen.view(rows, blocks)[:, block]

    def guesses(self, rows: TargetRows, places: Sequence[int]) -> Tensor:
        """Logits along the true path: the first pass from true features, others from its own.

        A pass that goes on reads the tokens that are right and the features that the net made of
        them before, as it will when its guesses were.
        """
        net: FeatureNet = self._guess
        k, batch, count = net.k, len(rows.tokens), len(places)
        length = rows.tokens.shape[1] - 1
        embeds = F.embedding(rows.tokens, self.embed_VD)
        read, states = self._walk(rows, embeds, places)
        cache = net.cache(batch, length + self._rounds * count * k, rows.hidden.dtype)
        net.seen(read, torch.arange(length), None, cache)
        place_C = torch.tensor(places)
        steps = torch.arange(k)
        own = torch.arange(count).repeat_interleave(k).unsqueeze(1) == torch.arange(
            count
        ).repeat_interleave(k).unsqueeze(0)
        prefix = torch.arange(length) <= place_C.repeat_interleave(k).unsqueeze(1)
        nothing = torch.zeros_like(own)
        levels: list[Tensor] = []
        for turn in range(self._rounds):
            if turn == 0:
                # The last k places of the prefix once more, each of which sees all of them.
                at = (place_C.unsqueeze(1) - k + 1 + steps).flatten()
                x = read[:, at]
                sees = [prefix, nothing]
            else:
                at = (place_C.unsqueeze(1) + (turn - 1) * k + 1 + steps).flatten()
                width = embeds.shape[-1]
                said = embeds[:, at + 1].reshape(batch * count, k, width)
                made = levels[-1].reshape(batch * count, k, width)
                x, states = net.mixed(made, said, states)
                x = x.reshape(batch, count * k, width)
                sees = [prefix, nothing, *[own] * turn]
            mask = torch.zeros(count * k, length + (turn + 1) * count * k)
            mask.masked_fill_(~torch.cat(sees, 1), float("-inf"))
            levels.append(net.seen(x.to(read.dtype), at, mask[None, None], cache))
        features = torch.stack(levels).view(self._rounds, batch, count, k, -1)
        flat = features.permute(0, 3, 1, 2, 4).reshape(self._rounds * k, batch * count, -1)
        return F.linear(flat, self.output_VD.to(flat.dtype))

    def _walk(self, rows: TargetRows, embeds: Tensor, places: Sequence[int]) -> tuple[Tensor, Any]:
        """What the layers read at all places, and the state behind each judged one."""
        net: FeatureNet = self._guess
        parts, kept, state = [], {}, None
        begin = 0
        for place in sorted(set(places)):
            part, state = net.mixed(
                rows.hidden[:, begin : place + 1], embeds[:, begin + 1 : place + 2], state
            )
            parts.append(part)
            kept[place] = state
            begin = place + 1
        if begin < rows.tokens.shape[1] - 1:
            part, _ = net.mixed(rows.hidden[:, begin:-1], embeds[:, begin + 1 :], state)
            parts.append(part)
        if state is None:
            return torch.cat(parts, 1), None
        stacked = tuple(
            torch.stack([kept[place][number] for place in places], 2).flatten(1, 2)
            for number in range(len(state))
        )
        return torch.cat(parts, 1), stacked
