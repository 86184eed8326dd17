"""Scores before a token is chosen by them: penalties, bias, and what other hooks change.

Only rows of requests that want any of it are touched, and of these only the tokens that
something happens to. What a request has generated is counted as it grows; the counts can
be made again from its tokens, so the end of a request need not be reported.

Shapes: R rows, V vocabulary, E changed scores.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from shoal.ir import Request, SamplingParams
from shoal.serve.engine.hooks import EngineHook, EngineHooks
from shoal.serve.text.grammar import Grammars

# Requests that are remembered besides those of the last step.
_REMEMBERED = 256


class _OfRequest(Protocol):
    """What is known of a request."""

    request: Request


_T = TypeVar("_T", bound=_OfRequest)


class RequestHistory(Generic[_T]):
    """Records of the latest requests; dropped ones are computed again.

    Args:
        make: from a request, as it is now.
    """

    def __init__(self, make: Callable[[Request], _T]) -> None:
        self._make = make
        self._known: OrderedDict[str, _T] = OrderedDict()

    def of(self, requests: Sequence[Request]) -> list[_T]:
        """What is known of these."""
        results = [self._one(request) for request in requests]
        while len(self._known) > len(requests) + _REMEMBERED:
            self._known.popitem(last=False)
        return results

    def _one(self, request: Request) -> _T:
        known = self._known.get(request.id)
        if known is None or known.request is not request:
            known = self._known[request.id] = self._make(request)
        self._known.move_to_end(request.id)
        return known


class _History:
    """The tokens of a request whose scores change, each with how often it was generated."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._fed = request.n_prompt
        params = request.params
        prompt = request.tokens[: request.n_prompt] if params.repetition_penalty != 1 else []
        biased = dict(params.logit_bias)
        ids = list({*prompt, *biased})
        self._place = {token: place for place, token in enumerate(ids)}
        self._ids = np.array(ids, dtype=np.int64)
        # Generated so often; in prompt or output; bias.
        self._values = np.zeros((3, len(ids)))
        self._values[1] = np.isin(self._ids, list(set(prompt)))
        self._values[2] = [biased.get(token, 0.0) for token in ids]
        self._counts = _counts(params)

    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [E], and their three numbers [3, E]."""
        if self._counts:
            for token in self.request.tokens[self._fed :]:
                self._count(token)
            self._fed = len(self.request.tokens)
        number = len(self._place)
        return self._ids[:number], self._values[:, :number]

    def _count(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):  # twice the room, so that growing is rare
            room = max(64, place)
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._values = np.concatenate([self._values, np.zeros((3, room))], axis=1)
        self._ids[place] = token
        self._values[0, place] += 1
        self._values[1, place] = 1


def _counts(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
    )


class PenaltyHook(EngineHook):
    """Penalties, bias, and tokens that must not come yet.

    As :func:`shoal.model.generate.adjust` does, all rows together.
    """

    kind: ClassVar[str] = "penalties"

    def __init__(self) -> None:
        self._histories: RequestHistory[_History] = RequestHistory(_History)

    def wanted(self, requests: Sequence[Request]) -> Sequence[int]:
        """Rows whose scores change."""
        return [
            row
            for row, one in enumerate(requests)
            if one.params.logit_bias
            or (one.params.min_tokens > one.n_generated and one.params.stop_ids)
            or _counts(one.params)
        ]

    def adjust(
        self, scores_RV: Tensor, rows: Sequence[int], requests: Sequence[Request]
    ) -> Mapping[str, str]:
        results = [(row, requests[row]) for row in rows]
        scored = [(row, a) for row, a in results if a.params.logit_bias or _counts(a.params)]
        if scored:
            self._penalise(scores_RV, [row for row, _ in scored], [one for _, one in scored])
        early = [
            (row, token)
            for row, one in results
            if one.n_generated < one.params.min_tokens
            for token in one.params.stop_ids
        ]
        if early:
            row_E, token_E = torch.tensor(early, device=scores_RV.device).unbind(-1)
            scores_RV[row_E, token_E] = float("-inf")
        return {}

    def _penalise(self, scores_RV: Tensor, rows: list[int], requests: list[Request]) -> None:
        changes = [history.changes() for history in self._histories.of(requests)]
        sizes = [len(ids) for ids, _ in changes]
        settings = [
            (row, p.repetition_penalty, p.frequency_penalty, p.presence_penalty)
            for row, p in zip(rows, [one.params for one in requests], strict=True)
        ]
        table = np.concatenate(
            [
                np.concatenate([values for _, values in changes], axis=1),
                np.repeat(np.array(settings), sizes, axis=0).T,
            ]
        )
        device = scores_RV.device
        token_E = torch.from_numpy(np.concatenate([ids for ids, _ in changes])).to(device)
        count_E, seen_E, bias_E, row_E, repetition_E, frequency_E, presence_E = torch.from_numpy(
            table
        ).to(device)
        row_E = row_E.long()
        # In the order and the precision of the reference, so that the last bit is the same.
        score_E = scores_RV[row_E, token_E].double()
        repeated_E = torch.where(score_E > 0, score_E / repetition_E, score_E * repetition_E)
        score_E = torch.where(seen_E > 0, repeated_E, score_E)
        score_E -= count_E * frequency_E + presence_E * (count_E > 0)
        changed_E = score_E + bias_E
        most = torch.finfo(torch.float32).max
        sound_E = scores_RV[row_E, token_E].isfinite()
        changed_E = torch.where(sound_E, changed_E.clamp(-most, most), changed_E)
        scores_RV[row_E, token_E] = changed_E.to(scores_RV.dtype)


class Adjuster:
    """Changes the scores of rows by hooks: penalties, and forms of answers.

    Args:
        *hooks: of which some adjust scores; penalties and grammars are added where none are.

    Attributes:
        hooks: all of them.
    """

    def __init__(self, *hooks: EngineHook) -> None:
        kinds = {hook.kind for hook in hooks}
        default = [one() for one in (PenaltyHook, Grammars) if one.kind not in kinds]
        self.hooks = EngineHooks((*hooks, *default))

    def __call__(
        self, logits_RV: Tensor, requests: Sequence[Request]
    ) -> tuple[Tensor, dict[str, str]]:
        """Scores [R, V] to choose by, and why requests cannot go on.

        The scores are the same tensor if no request changes any.

        Args:
            logits_RV: scores of all tokens; left as they are.
            requests: whose rows they are.
        """
        scores_RV, failed = logits_RV, dict[str, str]()
        several, adjusts = self.hooks.at(EngineHook.wanted), self.hooks.at(EngineHook.adjust)
        for wanted, adjust in zip(several, adjusts, strict=True):
            rows = wanted(requests)
            if not rows:
                continue
            if scores_RV is logits_RV:
                wide = torch.promote_types(logits_RV.dtype, torch.float32)
                scores_RV = logits_RV.to(wide, copy=True)
            failed |= adjust(scores_RV, rows, requests)
        return scores_RV, failed
