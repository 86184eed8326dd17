"""What a request may ask for: ranges of its parameters, and its tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shoal.core.errors import ServeError, require
from shoal.ir import Request, SamplingParams
from shoal.ir.serving import MIN_REPETITION_PENALTY, MIN_TEMPERATURE

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
    one, far = params, f"-{MAX_PENALTY} to {MAX_PENALTY}"
    least, most = MIN_REPETITION_PENALTY, MAX_PENALTY
    warm = MIN_TEMPERATURE <= one.temperature < math.inf
    some = f"1 to {streams}, the streams of the model"
    alone = "1: the model has no parallel streams that a request could choose among"
    part = "a fraction in (0, 1]"
    whole = (
        "nothing: the model has no feed-forward layers of two sizes (ffn: duo) whose routers were "
        "trained; shoal model routers trains them"
    )
    biases = all(abs(bias) <= MAX_BIAS and token >= 0 for token, bias in one.logit_bias)
    reported = f"0 to {MAX_LOGPROBS}"
    for name, good, expected in (
        ("max_tokens", one.max_tokens >= 1, "1 or more"),
        (
            "temperature",
            one.temperature == 0 or warm,
            f"0 for the best token, or at least {MIN_TEMPERATURE:g}",
        ),
        ("top_k", one.top_k >= 0, "0 (all) or more"),
        ("top_p", 0 < one.top_p <= 1, "(0, 1]"),
        ("min_p", 0 <= one.min_p <= 1, "0 (all) to 1"),
        (
            "repetition_penalty",
            least <= one.repetition_penalty <= most,
            f"{least} to {most}; 1 for none",
        ),
        ("frequency_penalty", -most <= one.frequency_penalty <= most, far),
        ("presence_penalty", -most <= one.presence_penalty <= most, far),
        ("logit_bias", biases, f"numbers from -{MAX_BIAS:g} to {MAX_BIAS:g} for token ids"),
        (
            "min_tokens",
            0 <= one.min_tokens <= one.max_tokens,
            f"0 to max_tokens = {one.max_tokens}",
        ),
        (
            "streams",
            one.streams is None or 1 <= one.streams <= max(1, streams),
            some if streams > 1 else alone,
        ),
        (
            "compute",
            one.compute is None or (shares and 0 < one.compute <= 1),
            part if shares else whole,
        ),
        ("pooling", one.pooling in (None, "mean", "last"), "mean or last"),
        ("logprobs", 0 <= (one.logprobs or 0) <= MAX_LOGPROBS, reported),
        ("prompt_logprobs", 0 <= (one.prompt_logprobs or 0) <= MAX_LOGPROBS, reported),
    ):
        require(good, name, getattr(one, name), expected=expected, error=ServeError)
    require(
        one.grammar is None or (bool(one.stop_ids) and not one.min_tokens),
        "grammar",
        one.stop_ids,
        expected="a token that ends the output, and no min_tokens",
        error=ServeError,
    )


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
