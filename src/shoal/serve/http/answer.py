"""One answer: the engine's tokens as pieces of text, with stop strings and log probabilities."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from shoal.ir.serving import FinishReason, Output, Request
from shoal.serve.engine.client import EngineClient
from shoal.serve.text.pieces import StopStrings, TextModel

__all__ = ["LogprobEntry", "ResponseBuilder", "ResponseDelta", "pieces"]


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
        min_tokens: no string ends the answer before so many tokens.
    """

    def __init__(
        self,
        model: TextModel,
        stops: Sequence[str],
        stop_ids: frozenset[int],
        *,
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._model = model
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

    def feed(self, outputs: Sequence[Output]) -> ResponseDelta:
        """Take in what the engine gave; outputs after a stop string are left out."""
        piece = ResponseDelta()
        text: list[str] = []
        for output in outputs:
            if not self.num_tokens:
                self.num_cached = output.cached
            for place, token in enumerate(output.tokens):
                self.num_tokens += 1
                piece.tokens.append(token)
                if output.finish == "stop" and token in self._stop_ids:
                    continue  # it ends the text and is not in it
                if place < len(output.infos):
                    info = output.infos[place]
                    top = tuple((self._model.token_bytes(t), value) for t, value in info.top)
                    raw = self._model.token_bytes(token)
                    self._held.append(LogprobEntry(raw, info.logprob, top, self._decoded))
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
    batches = client.batches(request, {"began": lambda message: began(message["at"])})
    async with contextlib.aclosing(batches):
        async for outputs in batches:
            piece = answer.feed(outputs)
            if piece:
                yield piece
            if answer.stopped:
                return
