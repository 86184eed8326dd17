"""One answer: the engine's tokens as pieces of text, with stop strings and log probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import ServeError
from shoal.ir.serving import FinishReason, Output, Request
from shoal.serve.engine.client import EngineClient
from shoal.serve.engine.output_queue import Listener
from shoal.serve.text.pieces import StopStrings, TextModel


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """Log probabilities at a token.

    Args:
        raw: the bytes that the token stands for.
        logprob: of the token.
        top: (bytes, logprob) of the best ones, best first.
        offset: characters of the answer before it.
    """

    raw: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(slots=True)
class ResponseDelta:
    """What is new of an answer.

    Args:
        text: its characters.
        tokens: ids of new tokens; their text may come later.
        entries: log probabilities of the tokens whose text has come.
        finish: why the answer ended; None while it goes on.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    entries: list[LogprobEntry] = field(default_factory=list)
    finish: FinishReason | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.tokens or self.entries or self.finish)


class ResponseBuilder:
    """Turns the outputs of a request into pieces.

    Args:
        model: the tokenizer.
        stops: strings that end the answer; they are no part of it.
        stop_ids: tokens that end it; they have no text.
        keep_stop: the string that ends the answer is part of it.
        min_tokens: smallest number of tokens before a stop string ends the answer.
        echo: the answer begins with its prompt. Its log probabilities are then those of all tokens,
            also of the one that ends the text.
        prompt_only: it has nothing else.

    Attributes:
        prompt: log probabilities of the prompt's tokens, if requested; the first token has none.
    """

    def __init__(
        self,
        model: TextModel,
        stops: Sequence[str],
        stop_ids: frozenset[int],
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
        echo: bool = False,
        prompt_only: bool = False,
    ) -> None:
        self._model = model
        self._echo, self._prompt_only = echo, prompt_only
        self._scored: list[tuple[float, Sequence[tuple[int, float]]]] = []
        self.prompt: list[LogprobEntry] = []
        self._text = model.stream()
        self._stops = StopStrings(stops, keep=keep_stop)
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._decoded = 0
        self._sent = 0
        self._held: list[LogprobEntry] = []
        self.num_tokens = 0
        # Tokens of the prompt that were found in the cache when the answer began.
        self.num_cached = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found, so that nothing may follow."""
        return self._stops.matched

    def score(self, message: Mapping[str, Any]) -> None:
        """Take in log probabilities of the prompt; those of a token may come again."""
        new = len(self._scored) + 1 - message["first"]
        if new >= 0:
            self._scored += message["infos"][new:]

    def scores(self, tokens: Sequence[int]) -> list[tuple[float, Sequence[tuple[int, float]]]]:
        """(log probability, best tokens with theirs) of each token of the prompt but the first.

        Raises:
            ServeError: they are not all there.
        """
        if len(self._scored) < len(tokens) - 1:
            raise ServeError(
                "this engine gives no log probabilities of prompts; leave out echo and "
                "prompt_logprobs"
            )
        return self._scored

    def end_prompt(self, tokens: Sequence[int]) -> None:
        """All log probabilities of the prompt are there.

        Raises:
            ServeError: they are not.
        """
        text, place = self._model.stream(), 0
        for token, (logprob, best) in zip(tokens, [(0.0, ()), *self.scores(tokens)], strict=True):
            self.prompt.append(self._entry(token, logprob, best, place))
            place += len(text.feed(token))
        self._scored.clear()

    def _entry(
        self, token: int, logprob: float, best: Iterable[tuple[int, float]], offset: int
    ) -> LogprobEntry:
        top = tuple((self._model.token_bytes(t), value) for t, value in best)
        return LogprobEntry(self._model.token_bytes(token), logprob, top, offset)

    def feed(self, outputs: Sequence[Output]) -> ResponseDelta:
        """Take in what the engine gave; outputs after a stop string are left out."""
        piece = ResponseDelta()
        if self._prompt_only:
            self.num_cached, piece.finish = outputs[0].cached, "length"
            return piece
        text: list[str] = []
        for output in outputs:
            if not self.num_tokens:
                self.num_cached = output.cached
            for place, token in enumerate(output.tokens):
                self.num_tokens += 1
                piece.tokens.append(token)
                ends = output.finish == "stop" and token in self._stop_ids
                if place < len(output.infos) and (self._echo or not ends):
                    info = output.infos[place]
                    entry = self._entry(token, info.logprob, info.top, self._decoded)
                    self._held.append(entry)
                if ends:
                    continue  # it ends the text and is not in it
                new = self._text.feed(token)
                self._decoded += len(new)
                early = self.num_tokens < self._min_tokens
                text.append(new if early else self._stops.feed(new))
                if self.stopped:
                    break
            if self.stopped:
                piece.finish = "stop"
                break
            piece.finish = output.finish
        if piece.finish is not None:
            rest = self._stops.feed(self._text.finish())
            text += [rest, self._stops.finish()]
            piece.finish = "stop" if self.stopped else piece.finish
        piece.text = "".join(text)
        self._sent += len(piece.text)
        everything = piece.finish is not None and not self.stopped
        while self._held and (everything or self._held[0].offset < self._sent):
            piece.entries.append(self._held.pop(0))
        return piece


async def pieces(
    client: EngineClient, request: Request, answer: ResponseBuilder, began: Callable[[float], None]
) -> AsyncGenerator[ResponseDelta, None]:
    """The pieces of an answer as they come; leaving early aborts the request.

    Args:
        client: of the engine.
        request: that is answered.
        answer: turns outputs into pieces.
        began: called with when its first step began, s on the monotonic clock.

    Raises:
        ServeError: the engine refused the request, died, or the reader is too slow.
    """
    on: dict[str, Listener] = {
        "began": lambda message: began(message["at"]),
        "prompt_logprobs": answer.score,
    }
    scored = request.params.prompt_logprobs is not None
    prompt = request.tokens[: request.n_prompt] if scored else []
    batches = client.batches(request, on)
    async with contextlib.aclosing(batches):
        async for outputs in batches:
            if prompt:
                answer.end_prompt(prompt)
                prompt = []
            piece = answer.feed(outputs)
            if piece:
                yield piece
            if answer.stopped:
                return
