"""From a request that was understood to what the engine computes: tokens, parameters, answers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from shoal.serve.engine.link import ModelInfo
from shoal.serve.http.answer import ResponseBuilder
from shoal.serve.http.errors import ApiError
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.openai import ParsedRequest, too_long
from shoal.serve.http.writers import GenerationJob, PreparedPrompt
from shoal.serve.text.pieces import READ_WHOLE, TextModel


class RequestPreparer:
    """Makes requests ready for the engine, and refuses what it could not compute.

    Args:
        text: tokenizer of the model.
        model: what the engine says about its model.
        limits: limits of the options of a request.

    Attributes:
        eos_ids: tokens that end an answer.
    """

    def __init__(self, text: TextModel, model: ModelInfo, limits: HttpLimits) -> None:
        self._text, self._model, self._limits = text, model, limits
        self.eos_ids = model.eos_ids | {
            token for token in text.eos_ids() if token < model.vocab_size
        }

    def encode(self, text: str, param: str, *, special: bool = True) -> list[int]:
        """Tokens of a text.

        Args:
            text: any text.
            param: the field that it came in, for errors.
            special: add what the tokenizer puts around a text.

        Raises:
            ApiError: it has more tokens than the model has positions.
        """
        limit = self._model.max_position
        most = max(limit * self._text.longest, READ_WHOLE)
        # Some tokenizers make nothing of blanks, and would read megabytes of them to the end.
        if len(text) > most:
            raise ApiError(
                f"{param} of {len(text)} characters: expected at most {most}, for the model has "
                f"{limit} positions; shorten it",
                param=param,
                code="context_length_exceeded",
            )
        tokens, count = self._text.encode_within(text, limit, special=special)
        if count > len(tokens):
            raise too_long(count, 0, self._model, param=param, estimated=True)
        return tokens

    def check_end(self, param: str, ask: ParsedRequest) -> None:
        """Refuse a form of an answer that nothing could end.

        Args:
            param: the field that asks for the form.
            ask: the request.

        Raises:
            ApiError: no token ends the text.
        """
        if not self.eos_ids and not ask.sampling.stop_ids:
            raise ApiError(
                f"{param}: this model has no token that ends a text; give stop_token_ids",
                param=param,
                code="unsupported_parameter",
            )

    def job(
        self,
        prefix: str,
        ask: ParsedRequest,
        prompts: list[PreparedPrompt],
        stops: Sequence[str] = (),
    ) -> GenerationJob:
        """All answers to a request.

        Args:
            prefix: of its id.
            ask: the request.
            prompts: each gets ``ask.best_of`` answers.
            stops: strings that end an answer besides those of the request.

        Raises:
            ApiError: a prompt does not fit, or the answers have too many log probabilities.
        """
        stop_ids = ask.sampling.stop_ids | (frozenset() if ask.ignore_eos else self.eos_ids)
        # The choice requires how likely each answer is.
        choosing = ask.best_of > ask.n and ask.logprobs is None
        params = []
        for place, prompt in enumerate(prompts):
            room = min(self._check_length(prompt, ask), self._check_logprobs(prompts, ask))
            params += [
                replace(
                    ask.sampling,
                    max_tokens=ask.max_tokens or max(1, room // ask.sampling.workers),
                    seed=(ask.sampling.seed + place * ask.best_of + choice) % 2**63,
                    stop_ids=stop_ids,
                    logprobs=0 if choosing else ask.logprobs,
                )
                for choice in range(ask.best_of)
            ]
        answers = [
            ResponseBuilder(
                self._text,
                (*ask.stops, *stops),
                stop_ids,
                keep_stop=ask.keep_stop,
                min_tokens=ask.sampling.min_tokens,
                echo=ask.echo,
                prompt_only=ask.prompt_only,
            )
            for _ in params
        ]
        return GenerationJob(
            prefix + secrets.token_hex(12), int(time.time()), ask, prompts, params, answers
        )

    def _check_logprobs(self, prompts: Sequence[PreparedPrompt], ask: ParsedRequest) -> int:
        """Tokens of an answer whose log probabilities, with those of the others, stay in bounds."""
        if ask.logprobs is None:
            return self._model.max_position
        each = ask.best_of * (1 + ask.logprobs)
        echoed = each * sum(len(prompt.tokens) for prompt in prompts) if ask.echo else 0
        most = (self._limits.logprob_values - echoed) // (each * len(prompts))
        if most < (ask.max_tokens or max(1, ask.sampling.min_tokens)):
            raise ApiError(
                f"max_tokens = {ask.max_tokens} with {each * len(prompts)} log probabilities at "
                f"each, and {echoed} of what is echoed: expected at most "
                f"{self._limits.logprob_values} together; ask for fewer of either",
                param="logprobs",
                code="invalid_value",
            )
        return most

    def _check_length(self, prompt: PreparedPrompt, ask: ParsedRequest) -> int:
        """Room for new tokens behind a prompt."""
        wanted = ask.max_tokens or max(1, ask.sampling.min_tokens)
        wanted *= ask.sampling.workers  # whose tokens stand in each other's contexts
        return self.check_prompt(prompt.tokens, wanted, ask.given)

    def check_prompt(self, tokens: Sequence[int], wanted: int, param: str) -> int:
        """Room for new tokens behind a prompt.

        Args:
            tokens: of the prompt.
            wanted: new tokens that there must be room for.
            param: the field that it came in, for errors.

        Raises:
            ApiError: there is no token, one that the model does not know, or not enough room.
        """
        model = self._model
        if not tokens:
            raise ApiError(
                f"{param}: no tokens: expected at least one; give some text",
                param=param,
                code="invalid_value",
            )
        room = model.max_position - len(tokens)
        if room < wanted:
            raise too_long(len(tokens), wanted, model, param=param)
        for token in tokens:
            if token >= model.vocab_size:
                raise ApiError(
                    f"{param}: token {token}: expected ids below {model.vocab_size}; the tokenizer "
                    "does not belong to the model",
                    param=param,
                    code="invalid_value",
                )
        return room
