"""From prompts to requests of the engine, by the code that reads those of the HTTP server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.api.inputs import Prompt
from shoal.api.sampling import SamplingOptions
from shoal.core.errors import ServeError, require
from shoal.corpora.chat.template import ChatTemplate
from shoal.ir import Request, ServeJob
from shoal.serve.engine.link import ModelInfo
from shoal.serve.http.embeddings import EmbeddingInputs, read_embeddings
from shoal.serve.http.fields import Fields
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.openai import ParsedRequest, read_completion, read_template_values
from shoal.serve.http.preparing import RequestPreparer
from shoal.serve.http.writers import GenerationJob, PreparedPrompt
from shoal.serve.text.grammar import GrammarError, trial
from shoal.serve.text.grammar_check import bad_form
from shoal.serve.text.messages import read_messages
from shoal.serve.text.pieces import TextModel
from shoal.serve.text.tools import read_tools

# More than a server takes: who asks does so on a machine of their own.
_LIMITS = HttpLimits(choices=4096, batch=4096, logprob_values=2**62, stops=1024)
# What requests call the model; no adapter has this name.
_MODEL = ""


class RequestReader:
    """Makes requests of what users give, and refuses what the model could not compute.

    Args:
        job: what is served.
        text: tokenizer of the model.
        template: how conversations become prompts.
        model: what the engine says about its model.
    """

    def __init__(
        self, job: ServeJob, text: TextModel, template: ChatTemplate, model: ModelInfo
    ) -> None:
        self._text, self._template, self._model = text, template, model
        self._adapters = tuple(job.adapters)
        self._prepare = RequestPreparer(text, model, _LIMITS)

    def adapter(self, name: str | None) -> str | None:
        """The name of an adapter; None for the model itself.

        Raises:
            ServeError: the job has no such adapter.
        """
        require(
            name is None or name in self._adapters,
            "adapter",
            name,
            expected=f"one of {', '.join(self._adapters)}"
            if self._adapters
            else "none: the model was opened without adapters={NAME: DIRECTORY}",
            error=ServeError,
        )
        return name

    def completion(
        self,
        prompt: Prompt,
        params: SamplingOptions,
        *,
        special: bool = True,
        stops: Sequence[str] = (),
    ) -> GenerationJob:
        """All answers to a prompt.

        Args:
            prompt: its text, or its tokens.
            params: how they are chosen.
            special: add what the tokenizer puts around a text.
            stops: strings that end an answer besides those of ``params``.

        Raises:
            ServeError: something of it is wrong.
        """
        text = prompt if isinstance(prompt, str) else None
        body = {**params.body(), "model": _MODEL, "prompt": text if text is not None else [prompt]}
        if params.max_tokens is None:
            body["max_tokens"] = self._model.max_position
        ask = read_completion(body, _LIMITS, self._model, (_MODEL,))
        if params.max_tokens is None:
            ask = replace(ask, max_tokens=None)  # as many as there is room for
        if ask.form is not None:
            ask = replace(ask, sampling=replace(ask.sampling, grammar=self._grammar(ask)))
        if params.prompt_logprobs is not None:
            most = Fields({"prompt_logprobs": params.prompt_logprobs}).integer(
                "prompt_logprobs", 0, _LIMITS.logprobs, None
            )
            ask = replace(ask, sampling=replace(ask.sampling, prompt_logprobs=most))
        tokens = self._tokens(prompt, special=special)
        return self._prepare.job("cmpl-", ask, [PreparedPrompt(tokens, text)], stops)

    def _grammar(self, ask: ParsedRequest) -> str:
        """The grammar of the form that an answer must have."""
        assert ask.form is not None
        where, form = ask.form
        self._prepare.check_end(where, ask)
        try:
            return trial(form)
        except GrammarError as cause:
            raise bad_form(where, str(cause)) from None

    def template_values(
        self, tools: object, others: object, add_generation_prompt: object
    ) -> dict[str, Any]:
        """Names that the chat template knows besides the messages.

        Raises:
            ServeError: one of them is wrong.
        """
        offered = read_tools(Fields({"tools": tools}), _LIMITS)
        shown = None if offered is None else [dict(tool) for tool in offered.given]
        begin = Fields({"add_generation_prompt": add_generation_prompt})
        return {
            **read_template_values(others),
            "tools": shown,
            "add_generation_prompt": begin.flag("add_generation_prompt"),
        }

    def chat(
        self, messages: object, values: Mapping[str, Any], params: SamplingOptions
    ) -> GenerationJob:
        """All answers to a conversation.

        Raises:
            ServeError: something of it is wrong, or the template refuses it.
        """
        prompt = self._template.render(read_messages(messages, _LIMITS), values)
        return self.completion(
            prompt, params, special=self._template.special, stops=self._template.stops
        )

    def embedding(
        self, prompt: Prompt, options: Mapping[str, Any]
    ) -> tuple[EmbeddingInputs, Request]:
        """What is wanted of a text, and the request for it.

        Raises:
            ServeError: something of it is wrong.
        """
        text = isinstance(prompt, str)
        body = {**options, "model": _MODEL, "input": prompt if text else [prompt]}
        ask = read_embeddings(body, _LIMITS, self._model, (_MODEL,))
        tokens = self._tokens(prompt)
        self._prepare.check_prompt(tokens, 1, "input")
        return ask, ask.request(f"embd-{os.urandom(12).hex()}", tokens)

    def _tokens(self, prompt: Prompt, *, special: bool = True) -> list[int]:
        if isinstance(prompt, str):
            return self._prepare.encode(prompt, "prompt", special=special)
        return prompt
