"""The HTTP application: OpenAI's endpoints over an engine client.

===========================  =================================================
``GET /health``              whether requests are taken; the only one without a key
``GET /version``             version of Shoal
``GET /metrics``             numbers for Prometheus
``GET /v1/models``           what is served
``GET /v1/models/{model}``   the same of one model
``POST /v1/completions``     continue texts or tokens
``POST /v1/chat/completions``  answer the messages of a chat
===========================  =================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from shoal import __version__
from shoal.core.errors import ServeError
from shoal.serve import openai
from shoal.serve.answer import Answer, Piece, pieces
from shoal.serve.body import read_body
from shoal.serve.client import EngineClient
from shoal.serve.errors import ApiError, as_api_error, error_response
from shoal.serve.guard import Access, Guard
from shoal.serve.limits import HttpLimits
from shoal.serve.metrics import Metrics
from shoal.serve.openai import Ask
from shoal.serve.stream import EventStream, events, gather, merge, until_gone
from shoal.serve.template import ChatTemplate
from shoal.serve.text import TextModel
from shoal.serve.writers import ChatWriter, CompletionWriter, Job, Prompt, Writer

__all__ = ["ROUTES", "create_app"]

ROUTES: tuple[tuple[str, str], ...] = (
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
)
"""Every endpoint: method and path."""


def create_app(
    client: EngineClient,
    text: TextModel,
    template: ChatTemplate,
    *,
    name: str,
    access: Access | None = None,
    limits: HttpLimits | None = None,
) -> FastAPI:
    """The application.

    Args:
        client: a started engine client.
        text: tokenizer of the model.
        template: how chats become prompts.
        name: what the model is called in requests.
        access: who may call.
        limits: what a request may ask for.
    """
    limits = limits or HttpLimits()
    metrics = Metrics(client, name)
    service = _Service(client, text, template, name, limits, metrics)
    app = FastAPI(
        title="Shoal", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    handlers: dict[tuple[str, str], Callable[..., Coroutine[Any, Any, Response]]] = {
        ("GET", "/health"): service.health,
        ("GET", "/version"): service.version,
        ("GET", "/metrics"): service.metrics_text,
        ("GET", "/v1/models"): service.models,
        ("GET", "/v1/models/{model}"): service.model,
        ("POST", "/v1/completions"): service.completions,
        ("POST", "/v1/chat/completions"): service.chat_completions,
    }
    for method, path in ROUTES:
        app.add_api_route(path, handlers[method, path], methods=[method], response_model=None)
    app.router.redirect_slashes = False
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ServeError, _serve_error)
    app.add_exception_handler(ClientDisconnect, _nobody)
    known = frozenset(path for _, path in ROUTES)

    def count(path: str, status: int) -> None:
        route = "/v1/models/{model}" if path.startswith("/v1/models/") else path
        # Paths that nobody defined must not become labels without bound.
        metrics.http(route if route in known else "other", status)

    app.add_middleware(Guard, access=access or Access(), limits=limits, count=count)
    return app


async def _http_error(request: Request, cause: Exception) -> Response:
    """404 and 405 of the router, in the one shape."""
    assert isinstance(cause, HTTPException)
    messages = {
        404: f"{request.url.path[:80]}: no such endpoint; see /v1/models, /v1/completions, "
        "/v1/chat/completions, /health, /metrics and /version",
        405: f"{request.method} {request.url.path[:80]}: expected another method, "
        f"{(cause.headers or {}).get('Allow', 'GET or POST')}",
    }
    codes = {404: "not_found", 405: "method_not_allowed"}
    return error_response(
        ApiError(
            messages.get(cause.status_code, str(cause.detail)),
            status=cause.status_code,
            code=codes.get(cause.status_code),
            headers=cause.headers,
        )
    )


async def _serve_error(_: Request, cause: Exception) -> Response:
    assert isinstance(cause, ServeError)
    return error_response(as_api_error(cause))


async def _nobody(_: Request, __: Exception) -> Response:
    """For the count of requests only: whoever asked has gone."""
    return Response(status_code=499)


class _Service:
    """The handlers of the routes."""

    def __init__(
        self,
        client: EngineClient,
        text: TextModel,
        template: ChatTemplate,
        name: str,
        limits: HttpLimits,
        metrics: Metrics,
    ) -> None:
        self._client = client
        self._text = text
        self._template = template
        self._name = name
        self._limits = limits
        self._metrics = metrics
        self._created = int(time.time())
        self._eos = client.model.eos_ids | {
            token for token in text.eos_ids() if token < client.model.vocab_size
        }

    # Small endpoints

    async def health(self) -> Response:
        """200 while requests are taken."""
        if not self._client.ready:
            raise ApiError(
                "the engine is being started again",
                status=503,
                code="engine_unavailable",
                retry_after_s=1,
            )
        return JSONResponse({"status": "ok"})

    async def version(self) -> Response:
        """Version of Shoal."""
        return JSONResponse({"version": __version__})

    async def metrics_text(self) -> Response:
        """Numbers for Prometheus, with what the engine says now."""
        with contextlib.suppress(ServeError):  # without an engine: engine_up 0 and the last ones
            await self._client.stats()
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self) -> Response:
        """What is served."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, model: str) -> Response:
        """What is served under a name."""
        if model != self._name:
            raise ApiError(
                f"model = {model[:80]!r}: no such model; this server has {self._name}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "shoal",
            "max_model_len": self._client.model.max_position,
        }

    # Completions

    async def completions(self, request: Request) -> Response:
        """Continue texts or tokens."""
        body = await read_body(request, self._limits)
        ask = openai.read_completion(body, self._limits, self._client.model, (self._name,))
        prompts = []
        for prompt in ask.prompts:
            if isinstance(prompt, str):
                tokens = await asyncio.to_thread(self._encode, prompt, "prompt")
                prompts.append(Prompt(tokens, prompt))
            else:
                shown = self._text.decode(prompt) if ask.echo else None
                prompts.append(Prompt(prompt, shown))
        job = self._job("cmpl-", ask, prompts)
        return await self._answer(request, job, CompletionWriter(job, self._name))

    async def chat_completions(self, request: Request) -> Response:
        """Answer the messages of a chat."""
        body = await read_body(request, self._limits)
        ask = openai.read_chat(body, self._limits, self._client.model, (self._name,))
        prompt = await asyncio.to_thread(self._render, ask)
        job = self._job("chatcmpl-", ask, [prompt], self._template.stops)
        return await self._answer(request, job, ChatWriter(job, self._name))

    def _render(self, ask: Ask) -> Prompt:
        text = self._template.render(ask.messages, **ask.template_values)
        return Prompt(self._encode(text, "messages", special=self._template.special), None)

    def _encode(self, text: str, param: str, *, special: bool = True) -> list[int]:
        limit = self._client.model.max_position
        most = limit * self._text.longest
        # Some tokenizers make nothing of blanks, and would read megabytes of them to the end.
        if len(text) > most:
            raise ApiError(
                f"{param} of {len(text)} characters: expected at most {most}, for the model has "
                f"{limit} positions; shorten it",
                param=param,
                code="context_length_exceeded",
            )
        return self._text.encode_within(text, limit, special=special)

    def _job(self, prefix: str, ask: Ask, prompts: list[Prompt], stops: Sequence[str] = ()) -> Job:
        stop_ids = ask.sampling.stop_ids | (frozenset() if ask.ignore_eos else self._eos)
        params = []
        for place, prompt in enumerate(prompts):
            room = min(self._check_length(prompt, ask), self._check_logprobs(len(prompts), ask))
            params += [
                replace(
                    ask.sampling,
                    max_tokens=ask.max_tokens or room,
                    seed=(ask.sampling.seed + place * ask.n + choice) % 2**63,
                    stop_ids=stop_ids,
                )
                for choice in range(ask.n)
            ]
        if self._client.num_open + len(params) > self._limits.open_requests:
            raise ApiError(
                f"{self._client.num_open} answers are under way: expected at most "
                f"{self._limits.open_requests}; try again",
                status=429,
                code="overloaded",
                retry_after_s=1,
            )
        answers = [
            Answer(
                self._text,
                (*ask.stops, *stops),
                stop_ids,
                keep_stop=ask.keep_stop,
                min_tokens=ask.sampling.min_tokens,
            )
            for _ in params
        ]
        return Job(prefix + secrets.token_hex(12), int(time.time()), ask, prompts, params, answers)

    def _check_logprobs(self, num_prompts: int, ask: Ask) -> int:
        """Tokens of an answer whose log probabilities, with those of the others, stay in bounds."""
        if ask.logprobs is None:
            return self._client.model.max_position
        values = num_prompts * ask.n * (1 + ask.logprobs)
        most = self._limits.logprob_values // values
        if most < (ask.max_tokens or max(1, ask.sampling.min_tokens)):
            raise ApiError(
                f"max_tokens = {ask.max_tokens} with {values} log probabilities at each: expected "
                f"at most {self._limits.logprob_values} together; ask for fewer of either",
                param="logprobs",
                code="invalid_value",
            )
        return most

    def _check_length(self, prompt: Prompt, ask: Ask) -> int:
        """Room for new tokens behind a prompt."""
        model = self._client.model
        num = len(prompt.tokens)
        if num == 0:
            raise ApiError(
                "prompt: no tokens: expected at least one; give some text",
                param="prompt",
                code="invalid_value",
            )
        room = model.max_position - num
        wanted = ask.max_tokens or max(1, ask.sampling.min_tokens)
        if room < wanted:
            param = "messages" if ask.messages else "prompt"
            raise openai.too_long(num, wanted, model, param=param)
        for token in prompt.tokens:
            if token >= model.vocab_size:
                raise ApiError(
                    f"prompt: token {token}: expected ids below {model.vocab_size}; the tokenizer "
                    "does not belong to the model",
                    param="prompt",
                    code="invalid_value",
                )
        return room

    async def _answer(self, request: Request, job: Job, writer: Writer) -> Response:
        run = self._run(job)
        if job.ask.stream:
            return EventStream(events(run, writer, usage=job.ask.include_usage))
        gathered = gather(run, writer, len(job.answers))
        return JSONResponse(await until_gone(request.receive, gathered))

    async def _run(self, job: Job) -> AsyncGenerator[tuple[int, Piece], None]:
        """(index of the answer, piece) of all answers of a job, as they come."""

        async def one(index: int) -> AsyncGenerator[tuple[int, Piece], None]:
            prompt = job.prompt_of(index).tokens
            timer = self._metrics.begin(len(prompt))
            finish = "abort"
            source = pieces(
                self._client, f"{job.id}-{index}", prompt, job.params[index], job.answers[index]
            )
            try:
                async with contextlib.aclosing(source):
                    async for piece in source:
                        timer.tokens(len(piece.tokens))
                        finish = piece.finish or finish
                        yield index, piece
            except ServeError:
                finish = "error"
                raise
            finally:
                timer.end(finish)

        if len(job.params) == 1:
            merged = one(0)
        else:
            merged = merge([one(index) for index in range(len(job.params))])
        async with contextlib.aclosing(merged):
            async for item in merged:
                yield item
