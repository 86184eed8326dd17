"""Tokens for the rows of a step, so that a row that has none ends alone.

Rows do not depend on each other. A row whose scores are not finite has no token; its request ends
with an error, and the others have the tokens that they have without it. Where choosing itself
fails, rows are chosen for one by one, and the one that fails is known.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from shoal.ir import Request, TokenInfo
from shoal.serve.engine.adjust import Adjuster
from shoal.serve.engine.failure import failure
from shoal.serve.engine.sampler import choose

log = logging.getLogger("shoal.serve")

NOT_FINITE = (
    "the model's scores of the next token are not finite numbers, so that no token can be chosen; "
    "the weights, the adapter or the precision (overflow) of the model do not suit this prompt"
)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """What was chosen.

    Args:
        tokens: request id -> its next token, for every request; of one in ``failed`` or
            ``errors`` any.
        infos: request id -> log probabilities, if requested.
        failed: request id -> why it cannot go on, which is its own fault.
        errors: request id -> why it cannot go on, which is not its fault.
    """

    tokens: Mapping[str, tuple[int, ...]]
    infos: Mapping[str, tuple[TokenInfo, ...]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)


def choose_rows(adjust: Adjuster, logits_RV: Tensor, requests: Sequence[Request]) -> TokenChoice:
    """The next token of every row.

    Args:
        adjust: changes scores before tokens are chosen by them.
        logits_RV: scores of all tokens, by the model.
        requests: whose rows they are.
    """
    try:
        return _together(adjust, logits_RV, requests)
    except Exception as cause:
        if len(requests) == 1:
            name = requests[0].id
            log.exception("no token could be chosen for request %s", name)
            return TokenChoice({name: (0,)}, errors={name: failure(cause)})
    results = [
        choose_rows(adjust, logits_RV[row : row + 1], [request])
        for row, request in enumerate(requests)
    ]
    return TokenChoice(
        *(
            {name: value for one in results for name, value in getattr(one, kind).items()}
            for kind in ("tokens", "infos", "failed", "errors")
        )
    )


def _together(adjust: Adjuster, logits_RV: Tensor, requests: Sequence[Request]) -> TokenChoice:
    scores_RV, failed = adjust(logits_RV, requests)
    tokens, infos, bad = choose(logits_RV, requests, scores_RV)
    return TokenChoice(
        {request.id: (new,) for request, new in zip(requests, tokens, strict=True)},
        infos,
        failed,
        {requests[row].id: NOT_FINITE for row in bad if requests[row].id not in failed},
    )
