"""Pieces of answers as the JSON of each endpoint, whole or in chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shoal.ir.serving import Request, SamplingParams
from shoal.serve.http.answer import LogprobEntry, ResponseBuilder, ResponseDelta
from shoal.serve.http.errors import ApiError, error_body
from shoal.serve.http.logprobs import chat_logprobs, completion_logprobs, usage
from shoal.serve.http.openai import ParsedRequest
from shoal.serve.text.tools import ToolCallReader


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt that is ready for the engine.

    Args:
        tokens: its ids.
        text: what it says, where that is known: it is echoed, and offsets count from its start.
    """

    tokens: Sequence[int]
    text: str | None


@dataclass(frozen=True)
class GenerationJob:
    """Everything that an HTTP request makes the engine do.

    Args:
        created: s since 1970.
        prompts: each gets ``ask.best_of`` answers.
        params: of each answer.
        answers: what has come of each.
    """

    id: str
    created: int
    ask: ParsedRequest
    prompts: list[PreparedPrompt]
    params: list[SamplingParams]
    answers: list[ResponseBuilder]

    def prompt_of(self, index: int) -> PreparedPrompt:
        """The prompt that an answer belongs to."""
        return self.prompts[index // self.ask.best_of]

    def request(self, index: int, *, adapter: str | None = None) -> Request:
        """What the engine computes for an answer; ``adapter`` of the model, or None."""
        prompt, choice = list(self.prompt_of(index).tokens), index % self.ask.best_of
        own, params = f"{self.id}-{index}", self.params[index]
        # What is found in a cache has no log probabilities.
        alone = params.prompt_logprobs is not None
        return Request(
            own,
            prompt,
            len(prompt),
            params,
            priority=self.ask.priority,
            adapter=adapter,
            salt=own if alone else self.ask.salt,
            # Other answers to the same prompt begin with the cache of the first.
            fork_of=f"{self.id}-{index - choice}" if choice and not alone else None,
        )

    def usage(self) -> dict[str, Any]:
        """Tokens so far; of a prompt with several answers, those that its first one found."""
        return usage(
            sum(len(prompt.tokens) for prompt in self.prompts),
            sum(answer.num_tokens for answer in self.answers),
            sum(answer.num_cached for answer in self.answers[:: self.ask.best_of]),
        )


class ResponseWriter(Protocol):
    """How the pieces of a job become JSON.

    Attributes:
        done: what a stream ends with, behind its events.
    """

    done: bytes

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The events before an answer's first piece."""

    def delta(self, index: int, piece: ResponseDelta) -> list[dict[str, Any]]:
        """The events of a piece; none if it has nothing to send yet."""

    def ending(self) -> list[dict[str, Any]]:
        """The events behind the last piece of all answers."""

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event of an error in the middle of a stream."""

    def whole(self, answers: Sequence[ResponseDelta]) -> dict[str, Any]:
        """All answers at once."""


class _Writer:
    """What answers of choices share."""

    kind = ""
    chunk_kind = ""
    done = b"data: [DONE]\n\n"

    def __init__(self, job: GenerationJob, name: str) -> None:
        self._job = job
        self._name = name

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._job.id,
            "object": kind,
            "created": self._job.created,
            "model": self._name,
            "choices": choices,
        }

    def ending(self) -> list[dict[str, Any]]:
        """A chunk with the usage, where it was asked for."""
        return self._chunk(last=True) if self._job.ask.include_usage else []

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The error in its one shape."""
        return error_body(error)

    def _chunk(self, *choices: dict[str, Any], last: bool = False) -> list[dict[str, Any]]:
        frame = self._frame(self.chunk_kind, [*choices])
        if self._job.ask.include_usage:
            frame["usage"] = self._job.usage() if last else None
        return [frame]

    def _silent(self, piece: ResponseDelta) -> bool:
        return not (piece.text or piece.entries or piece.finish or self._job.ask.token_ids)

    def _ids(self, index: int, piece: ResponseDelta, *, with_prompt: bool) -> dict[str, Any]:
        ids: dict[str, Any] = {} if self._job.params[index].workers == 1 else {"worker": index}
        if not self._job.ask.token_ids:
            return ids
        ids["token_ids"] = piece.tokens
        if with_prompt:
            ids["prompt_token_ids"] = list(self._job.prompt_of(index).tokens)
        return ids


class CompletionWriter(_Writer):
    """``/v1/completions``."""

    kind = chunk_kind = "text_completion"

    def opening(self, index: int) -> list[dict[str, Any]]:
        """The prompt, where it is echoed."""
        if not self._job.ask.echo:
            return []
        piece = ResponseDelta(text=self._echo(index))
        return self._chunk(self._choice(index, piece, self._job.answers[index].prompt))

    def delta(self, index: int, piece: ResponseDelta) -> list[dict[str, Any]]:
        """A piece of text."""
        return [] if self._silent(piece) else self._chunk(self._choice(index, piece))

    def whole(self, answers: Sequence[ResponseDelta]) -> dict[str, Any]:
        """All answers at once."""
        choices = []
        for place, index in enumerate(self._kept(answers)):
            prompt = self._job.answers[index].prompt
            choice = {**self._choice(index, answers[index], prompt, whole=True), "index": place}
            choice["text"] = self._echo(index) + choice["text"]
            choices.append(choice)
        return {**self._frame(self.kind, choices), "usage": self._job.usage()}

    def _kept(self, answers: Sequence[ResponseDelta]) -> list[int]:
        """The answers to give: of each prompt those that are likeliest by the token."""
        ask = self._job.ask
        if ask.best_of == ask.n:
            return list(range(len(answers)))

        def likely(index: int) -> float:
            logprobs = [entry.logprob for entry in answers[index].entries]
            return sum(logprobs) / len(logprobs) if logprobs else -math.inf

        kept = []
        for first in range(0, len(answers), ask.best_of):
            group = range(first, first + ask.best_of)
            kept += sorted(group, key=likely, reverse=True)[: ask.n]
        return kept

    def _echo(self, index: int) -> str:
        return (self._job.prompt_of(index).text or "") if self._job.ask.echo else ""

    def _choice(
        self,
        index: int,
        piece: ResponseDelta,
        prompt: Sequence[LogprobEntry] = (),
        *,
        whole: bool = False,
    ) -> dict[str, Any]:
        wanted = self._job.ask.logprobs is not None
        start = len(self._job.prompt_of(index).text or "")
        return {
            "index": index,
            "text": piece.text,
            "logprobs": completion_logprobs(piece.entries, start, prompt) if wanted else None,
            "finish_reason": piece.finish,
            **self._ids(index, piece, with_prompt=whole),
        }


class ChatWriter(_Writer):
    """``/v1/chat/completions``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, job: GenerationJob, name: str) -> None:
        super().__init__(job, name)
        tools = job.ask.tools is not None
        self._readers = [ToolCallReader() if tools else None for _ in job.params]

    def opening(self, index: int) -> list[dict[str, Any]]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._chunk(choice)

    def delta(self, index: int, piece: ResponseDelta) -> list[dict[str, Any]]:
        """A piece of text, or calls."""
        if self._silent(piece):
            return []
        text, calls = self._read(index, piece)
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = calls
        if not delta and self._silent(replace(piece, text="")):
            return []  # the text may be part of a call
        return self._chunk(
            {
                "index": index,
                "delta": delta,
                "logprobs": self._logprobs(piece),
                "finish_reason": self._finish(index, piece),
                **self._ids(index, piece, with_prompt=False),
            }
        )

    def whole(self, answers: Sequence[ResponseDelta]) -> dict[str, Any]:
        """All answers at once."""
        choices = [self._message(index, piece) for index, piece in enumerate(answers)]
        return {**self._frame(self.kind, choices), "usage": self._job.usage()}

    def _message(self, index: int, piece: ResponseDelta) -> dict[str, Any]:
        text, _ = self._read(index, piece)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        reader = self._readers[index]
        if reader is not None and reader.calls:
            calls = [call.as_json() for call in reader.calls]
            message |= {"content": text or None, "tool_calls": calls}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(piece),
            "finish_reason": self._finish(index, piece),
            **self._ids(index, piece, with_prompt=True),
        }

    def _read(self, index: int, piece: ResponseDelta) -> tuple[str, list[dict[str, Any]]]:
        """Words and parts of calls of a piece."""
        reader = self._readers[index]
        if reader is None:
            return piece.text, []
        text, parts = reader.feed(piece.text, last=piece.finish is not None)
        return text, [part.as_json() for part in parts]

    def _finish(self, index: int, piece: ResponseDelta) -> str | None:
        reader, tools = self._readers[index], self._job.ask.tools
        # Of a function that the request named, the model has not chosen to call it.
        called = reader is not None and bool(reader.calls) and not (tools and tools.named)
        return "tool_calls" if called and piece.finish == "stop" else piece.finish

    def _logprobs(self, piece: ResponseDelta) -> dict[str, Any] | None:
        wanted = self._job.ask.logprobs is not None
        return chat_logprobs(piece.entries) if wanted else None
