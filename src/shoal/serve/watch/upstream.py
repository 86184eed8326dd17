"""The running ``shoal serve`` behind the dashboard: how it is, and a chat with it.

The browser talks to the dashboard alone. The address and the key of the server stay
here, redirects are not followed, and what comes back is bounded.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx2

from shoal.core.errors import ServeError, require
from shoal.serve.watch.scrape import Scrape

MAX_ANSWER = 4 * 2**20
MAX_TOKENS = 512
# The longest event of an answer, B.
_EVENT_BYTES = 65536
# Tokens that might have stood in the place of each one.
ALTERNATIVES = 5

# Metric of the server -> what it means.
WORDS = {
    "num_requests_running": "running requests",
    "num_requests_waiting": "requests waiting",
    "generation_tokens_total": "generated tokens",
    "prompt_tokens_total": "prompt tokens",
    "num_preemptions_total": "preempted requests",
    "engine_restarts_total": "engine restarts",
}
# (part, whole, what their share means)
SHARES = (
    (
        "prefix_cache_hits_total",
        "prefix_cache_queries_total",
        "prefix cache hit rate",
    ),
)
# Shares as they are, 1 for all.
WHOLES = {"kv_cache_usage_perc": "cache utilization"}
# Histograms, reported by their mean.
MEANS = {
    "time_to_first_token_seconds": "TTFT (time to first token), mean",
    "inter_token_latency_seconds": "ITL (inter-token latency), mean",
    "e2e_request_latency_seconds": "E2E (latency of a whole request), mean",
}


@dataclass(frozen=True)
class ServerHealth:
    """How the server is.

    Args:
        answers: it answered at all.
        ready: it takes requests.
        message: its answer, or the reason for none.
        models: names of its models.
        metrics: (what, value, unit), in plain words.
    """

    answers: bool
    ready: bool
    message: str
    models: tuple[str, ...] = ()
    metrics: tuple[tuple[str, float, str], ...] = ()


@dataclass(frozen=True)
class Token:
    """A token of an answer.

    Args:
        text: what it spells; a part of a letter is a question mark in a diamond.
        share: its probability, 0 to 1.
        top: (text, probability) of the likeliest in its place, likeliest first.
    """

    text: str
    share: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class AnswerDelta:
    """What has come of an answer.

    Args:
        tokens: the tokens that they are; none if the server does not report them.
    """

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class Upstream:
    """One server.

    Args:
        url: such as ``http://127.0.0.1:8000``.
        key: its API key; empty for none.
    """

    url: str
    key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname)
            good = good and parts.port != 0 and not parts.username
            good = good and not parts.query and not parts.fragment
        except ValueError:
            good = False
        require(good, "--server", self.url, expected="an address such as http://127.0.0.1:8000")
        require(
            self.key.isascii() and self.key.isprintable(),
            "SHOAL_API_KEY",
            "(hidden)",
            expected="printable ASCII",
        )

    def health(self, timeout_s: float = 0.2) -> ServerHealth:
        """Whether it is ready; quick, for every page."""
        try:
            status, text = self._get("/health", timeout_s)
        except ServeError as cause:
            return ServerHealth(answers=False, ready=False, message=str(cause))
        if status == 200:
            return ServerHealth(answers=True, ready=True, message="ready")
        return ServerHealth(answers=True, ready=False, message=self._complaint(status, text))

    def state(self, timeout_s: float = 1.0) -> ServerHealth:
        """How it is, with its models."""
        health = self.health(timeout_s)
        if not health.answers:
            return health
        try:
            status, text = self._get("/v1/models", timeout_s)
        except ServeError as cause:
            return ServerHealth(answers=True, ready=False, message=str(cause))
        if status != 200:
            result = self._complaint(status, text)
            return ServerHealth(
                answers=True, ready=health.ready, message=f"{health.message}; {result}"
            )
        try:
            models = tuple(str(model["id"]) for model in json.loads(text)["data"])
        except (ValueError, KeyError, TypeError):
            return ServerHealth(
                answers=True, ready=False, message=f"{self.url} lists no models; is it shoal serve?"
            )
        return ServerHealth(True, health.ready, health.message, models)

    def numbers(self, timeout_s: float = 1.0) -> tuple[ServerHealth, Scrape | None]:
        """How it is, and its page of metrics; None if it gives none, and then it says why."""
        health = self.health(timeout_s)
        if not health.answers:
            return health, None
        try:
            status, text = self._get("/metrics", timeout_s)
        except ServeError as cause:
            return ServerHealth(answers=False, ready=False, message=str(cause)), None
        if status != 200:
            return ServerHealth(True, False, self._complaint(status, text)), None
        try:
            page = Scrape.of(text)
        except ServeError:
            page = None
        if page is None or not page.sums:
            result = f"{self.url} has no metrics of Shoal; is it shoal serve?"
            return ServerHealth(answers=True, ready=False, message=result), None
        return ServerHealth(True, health.ready, health.message, metrics=_in_words(page)), page

    def workers(self, timeout_s: float = 1.0) -> str:
        """What its concurrent workers see now, as it says it.

        Raises:
            ServeError: the server refuses or does not answer.
        """
        status, text = self._get("/v1/workers", timeout_s)
        if status != 200:
            raise ServeError(self._complaint(status, text))
        return text

    def stream(self, model: str, messages: list[dict[str, str]]) -> Iterator[AnswerDelta]:
        """Pieces of the answer as they come.

        What a model has no room for any more, the oldest messages, is left out.

        Raises:
            ServeError: the server refuses, does not answer or breaks off.
        """
        model, room = self._room(model)
        new = MAX_TOKENS if room is None else max(1, min(MAX_TOKENS, room // 4))
        body = {
            "model": model,
            "messages": messages if room is None else _newest(messages, 2 * (room - new)),
            "max_tokens": new,
            "stream": True,
            "logprobs": True,
            "top_logprobs": ALTERNATIVES,
        }
        try:
            with self._client.sse(
                self._path("/v1/chat/completions"),
                method="POST",
                json=body,
                timeout=60.0,
                max_event_size=_EVENT_BYTES,
            ) as source:  # leaving it closes the connection, and the server stops writing
                if source.response.status_code != 200:
                    text = self._text(source.response)
                    raise ServeError(self._complaint(source.response.status_code, text))
                yield from self._pieces(source)
        except (httpx2.HTTPError, httpx2.InvalidURL) as cause:
            raise self._silent(cause) from cause

    def _room(self, model: str) -> tuple[str, int | None]:
        """Name of the model, and tokens of one request of it, prompt and answer, if reported."""
        status, text = self._get("/v1/models", 5.0)
        if status != 200:
            raise ServeError(self._complaint(status, text))
        try:
            result = {entry["id"]: entry.get("max_model_len") for entry in json.loads(text)["data"]}
        except (ValueError, KeyError, TypeError, AttributeError) as cause:
            raise ServeError(f"{self.url} lists no models; is it shoal serve?") from cause
        model = model or next(iter(result), "")
        room = result.get(model)
        return model, room if isinstance(room, int) and room > 0 else None

    def _pieces(self, source: httpx2.EventSource) -> Iterator[AnswerDelta]:
        left = MAX_ANSWER
        for event in source:
            left -= len(event.data)
            if left <= 0:
                raise ServeError(f"{self.url}: the answer is longer than {MAX_ANSWER} bytes")
            if event.data == "[DONE]":
                return
            try:
                data = json.loads(event.data)
                if "error" in data:
                    raise ServeError(str(data["error"]["message"]))
                for choice in data["choices"]:
                    piece = AnswerDelta(str(choice["delta"].get("content") or ""), _tokens(choice))
                    if piece.text or piece.tokens:
                        yield piece
            except (ValueError, KeyError, TypeError, AttributeError) as cause:
                raise ServeError(f"{self.url}: sent an invalid response") from cause
        raise ServeError(f"{self.url}: the answer broke off")

    def _get(self, path: str, timeout_s: float) -> tuple[int, str]:
        try:
            with self._client.stream("GET", self._path(path), timeout=timeout_s) as answer:
                return answer.status_code, self._text(answer)
        except (httpx2.HTTPError, httpx2.InvalidURL) as cause:
            raise self._silent(cause) from cause

    @functools.cached_property
    def _client(self) -> httpx2.Client:
        """Asks the server directly, each time on a connection of its own."""
        key = {"authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx2.Client(
            headers={"accept-encoding": "identity", **key},
            limits=httpx2.Limits(max_keepalive_connections=0),
            follow_redirects=False,
            trust_env=False,
        )

    def _text(self, answer: httpx2.Response) -> str:
        """A body, or its beginning where it is longer than it may be."""
        data = bytearray()
        for piece in answer.iter_raw():
            data += piece
            if len(data) > MAX_ANSWER:
                break
        return data[:MAX_ANSWER].decode(errors="replace")

    def _path(self, path: str) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + path

    def _complaint(self, status: int, text: str) -> str:
        """What a refusal says: the message of the one error shape, or its status."""
        if status == 401:
            if self.key:
                return (
                    "the server rejects the key in SHOAL_API_KEY; start the dashboard with the "
                    "key of the server"
                )
            return "the server requires its API key; start the dashboard with SHOAL_API_KEY set"
        try:
            message: Any = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = ""
        if message:
            return f"{message} (status {status})"
        return f"the server answers with status {status}"

    def _silent(self, cause: Exception) -> ServeError:
        why = str(cause) or type(cause).__name__
        return ServeError(f"{self.url}: does not answer ({why}); is `shoal serve` running there?")


def _newest(messages: list[dict[str, str]], letters: int) -> list[dict[str, str]]:
    """The newest messages of so many letters, from a user's on; the last one in any case."""
    first = len(messages) - 1
    left = letters - len(messages[first]["content"])
    for index in range(first - 1, -1, -1):
        left -= len(messages[index]["content"])
        if left < 0:
            break
        if messages[index]["role"] == "user":
            first = index
    return messages[first:]


def _tokens(choice: Any) -> tuple[Token, ...]:
    """The tokens of a choice with their probabilities; none if it has no log probabilities."""
    value = choice.get("logprobs") or {}
    return tuple(
        Token(
            str(one["token"]),
            _share(one["logprob"]),
            tuple((str(o["token"]), _share(o["logprob"])) for o in one.get("top_logprobs") or ()),
        )
        for one in value.get("content") or ()
    )


def _share(logprob: float) -> float:
    return math.exp(min(0.0, float(logprob)))


def _in_words(page: Scrape) -> tuple[tuple[str, float, str], ...]:
    """What people want to know of a page of metrics; values of several labels are added."""
    sums = page.sums
    results = [(words, sums[name], "") for name, words in WORDS.items() if name in sums]
    for name, words in WHOLES.items():
        if name in sums:
            results.append((words, 100 * page.mean(name), "%"))
    for part, whole, words in SHARES:
        if part in sums and sums.get(whole):
            results.append((words, 100 * sums[part] / sums[whole], "%"))
    for name, words in MEANS.items():
        if sums.get(f"{name}_count"):
            results.append((words, sums[f"{name}_sum"] / sums[f"{name}_count"], "s"))
    return tuple(results)
