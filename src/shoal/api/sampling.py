"""How the answers of :class:`~shoal.api.llm.LLM` are chosen, in the words of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen, how many answers a prompt gets, and when they end.

    The names and the defaults are those of vLLM's ``SamplingParams``, and ``shoal.SamplingParams``
    is this class. The values have the ranges of ``POST /v1/completions`` and are checked where they
    are used, for some depend on the model.

    Args:
        n: answers of each prompt.
        temperature: 0 takes the best token; up to 2.
        top_p: sample from the best tokens that together have this probability, in (0, 1].
        top_k: sample from so many of the best tokens; 0 or -1 for all.
        min_p: sample from tokens of at least this share of the best one's probability, 0 to 1.
        max_tokens: most new tokens of an answer; None for as many as the model has room for.
        min_tokens: no answer ends before so many new tokens.
        stop: a string, or several, that end an answer and are no part of it.
        stop_token_ids: tokens that end an answer.
        include_stop_str_in_output: an answer has the string that ended it.
        ignore_eos: go on when the model ends the text.
        seed: the same seed, prompt and options give the same tokens; None draws one.
        logprobs: report the log probability of each token and of so many best ones, up to 20;
            None for no report.
        prompt_logprobs: the same of each token of the prompt, but the first; such a prompt is
            computed whole, whatever the cache holds.
        structured_outputs: the form of the answer: ``{"json": SCHEMA}``, ``{"regex": PATTERN}`` or
            ``{"choice": [TEXT, ...]}``. Each token is one with which the answer can still have it.
        presence_penalty: taken from a token's score once the answer has it, -2 to 2.
        frequency_penalty: taken from a token's score each time that the answer has it, -2 to 2.
        repetition_penalty: a token that prompt or answer has is this many times less likely;
            1 for none.
        logit_bias: token id -> what is added to its score, -100 to 100.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None

    def body(self) -> dict[str, Any]:
        """The fields as ``POST /v1/completions`` has them, which has no ``prompt_logprobs``."""
        body = {field.name: getattr(self, field.name) for field in fields(self)}
        del body["prompt_logprobs"]
        if isinstance(self.structured_outputs, Mapping):
            body["structured_outputs"] = dict(self.structured_outputs)
        for name in ("stop", "stop_token_ids"):
            if isinstance(body[name], tuple):
                body[name] = list(body[name])
        if isinstance(self.logit_bias, Mapping):
            body["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        return body
