"""What a request may ask for: ranges of its parameters, and its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.core.errors import ServeError, require
from shoal.ir import Request, SamplingParams
from shoal.ir.serving import MIN_REPETITION_PENALTY, MIN_TEMPERATURE

__all__ = ["MAX_LOGPROBS", "check_params", "check_tokens"]

# Most alternatives reported with a token.
MAX_LOGPROBS = 20
MAX_PENALTY = 10.0
MAX_BIAS = 1e6


def check_params(params: SamplingParams, facts: Mapping[str, Any] | None = None) -> None:
    """Refuse what cannot be sampled.

    Args:
        params: of a request.
        facts: of the engine: ``streams`` of the model, of which a request may ask for fewer, and
            ``shares``, whether it can compute less for a request.

    Raises:
        ServeError: a value that is out of its range.
    """
    facts = facts or {}
    streams, shares = facts.get("streams", 1), facts.get("shares", False)
    for name, value, good, expected in (
        ("max_tokens", params.max_tokens, params.max_tokens >= 1, "1 or more"),
        (
            "temperature",
            params.temperature,
            params.temperature == 0 or MIN_TEMPERATURE <= params.temperature < math.inf,
            f"0 for the best token, or at least {MIN_TEMPERATURE:g}",
        ),
        ("top_k", params.top_k, params.top_k >= 0, "0 (all) or more"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "(0, 1]"),
        ("min_p", params.min_p, 0 <= params.min_p <= 1, "0 (all) to 1"),
        (
            "repetition_penalty",
            params.repetition_penalty,
            MIN_REPETITION_PENALTY <= params.repetition_penalty <= MAX_PENALTY,
            f"{MIN_REPETITION_PENALTY} to {MAX_PENALTY}; 1 for none",
        ),
        *(
            (name, value, -MAX_PENALTY <= value <= MAX_PENALTY, f"-{MAX_PENALTY} to {MAX_PENALTY}")
            for name, value in (
                ("frequency_penalty", params.frequency_penalty),
                ("presence_penalty", params.presence_penalty),
            )
        ),
        (
            "logit_bias",
            params.logit_bias,
            all(abs(bias) <= MAX_BIAS and token >= 0 for token, bias in params.logit_bias),
            f"numbers from -{MAX_BIAS:g} to {MAX_BIAS:g} for token ids",
        ),
        (
            "min_tokens",
            params.min_tokens,
            0 <= params.min_tokens <= params.max_tokens,
            f"0 to max_tokens = {params.max_tokens}",
        ),
        (
            "grammar",
            params.stop_ids,
            params.grammar is None or (bool(params.stop_ids) and not params.min_tokens),
            "a token that ends the output, and no min_tokens",
        ),
        (
            "streams",
            params.streams,
            params.streams is None or 1 <= params.streams <= max(1, streams),
            f"1 to {streams}, the streams of the model"
            if streams > 1
            else "1: the model has no parallel streams that a request could choose among",
        ),
        (
            "compute",
            params.compute,
            params.compute is None or (shares and 0 < params.compute <= 1),
            "a share in (0, 1]"
            if shares
            else "nothing: the model has no feed-forward layers of two sizes (ffn: duo) whose "
            "routers were trained; shoal model routers trains them",
        ),
        ("pooling", params.pooling, params.pooling in (None, "mean", "last"), "mean or last"),
        (
            "logprobs",
            params.logprobs,
            params.logprobs is None or 0 <= params.logprobs <= MAX_LOGPROBS,
            f"0 to {MAX_LOGPROBS}",
        ),
    ):
        require(good, name, value, expected=expected, error=ServeError)


def check_tokens(request: Request, vocab_size: int | None) -> None:
    """Refuse a prompt that the model cannot read.

    Args:
        request: that arrives.
        vocab_size: tokens that the model knows; None where that is not checked.

    Raises:
        ServeError: it is empty, or has a token that the model does not know.
    """
    where = f"request {request.id}"
    require(
        request.n_prompt >= 1 and request.n_prompt == len(request.tokens),
        f"{where}: prompt",
        request.n_prompt,
        expected="at least one token, and nothing generated yet",
        error=ServeError,
    )
    if vocab_size is None:
        return
    params, prompt = request.params, (min(request.tokens), max(request.tokens))
    others = (*params.stop_ids, *(token for token, _ in params.logit_bias))
    for what, tokens, hint in (
        ("prompt token", prompt, "use the tokenizer that belongs to the model"),
        ("stop or biased token", others, ""),
    ):
        for token in tokens:
            require(
                0 <= token < vocab_size,
                f"{where}: {what}",
                token,
                expected=f"token ids below vocab_size = {vocab_size}",
                hint=hint,
                error=ServeError,
            )
