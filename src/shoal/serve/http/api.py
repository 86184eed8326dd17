"""The HTTP application: OpenAI's endpoints over an engine client.

===========================  =================================================
``GET /health``              whether requests are taken; the only one without a key
``GET /version``             version of Shoal
``GET /metrics``             numbers for Prometheus
``GET /openapi.json``        this list with every field and status
``GET /v1/models``           what is served
``GET /v1/models/{model}``   the same of one model
``POST /v1/completions``     continue texts or tokens
``POST /v1/chat/completions``  answer the messages of a chat
``POST /v1/embeddings``      vectors of texts
``POST /tokenize``           the tokens of a text or of a chat
``POST /detokenize``         the text of tokens
===========================  =================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from shoal import __version__
from shoal.core.errors import ServeError
from shoal.ir.serving import Request as Asked
from shoal.ir.serving import SamplingParams
from shoal.serve.adapters.routes import ADAPTER_ROUTES, AdapterPlaces, AdapterRoutes
from shoal.serve.engine.client import EngineClient
from shoal.serve.http import openai
from shoal.serve.http.answer import ResponseBuilder, ResponseDelta, pieces
from shoal.serve.http.body import read_body
from shoal.serve.http.concurrency import ConcurrencyLimit
from shoal.serve.http.draining import DrainState
from shoal.serve.http.embeddings import read_embeddings, written
from shoal.serve.http.errors import ApiError, as_api_error, error_response
from shoal.serve.http.guard import AccessControl, HttpGuard
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.metrics import Metrics
from shoal.serve.http.openai import ParsedRequest
from shoal.serve.http.openapi import document
from shoal.serve.http.stream import EventStream, events, gather, merge, until_gone
from shoal.serve.http.traces import RequestTracer
from shoal.serve.http.writers import (
    ChatWriter,
    CompletionWriter,
    GenerationJob,
    PreparedPrompt,
    ResponseWriter,
)
from shoal.serve.text.grammar_check import GrammarCheck
from shoal.serve.text.pieces import READ_WHOLE, TextModel
from shoal.serve.text.template import ChatTemplate, TemplateRenderer
from shoal.serve.text.tokens import read_detokenize, read_tokenize

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["ROUTES", "create_app", "protect"]

ROUTES: tuple[tuple[str, str], ...] = (
    ("GET", "/health"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/workers"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)
"""Every endpoint: method and path."""


def create_app(
    client: EngineClient,
    text: TextModel,
    template: ChatTemplate,
    *,
    name: str,
    access: AccessControl | None = None,
    limits: HttpLimits | None = None,
    drain: DrainState | None = None,
    provider: TracerProvider | None = None,
    adapter_places: AdapterPlaces | None = None,
) -> FastAPI:
    """The application.

    Args:
        client: a started engine client.
        text: tokenizer of the model.
        template: how chats become prompts.
        name: what the model is called in requests.
        access: who may call.
        limits: what a request may ask for.
        drain: closed while the server drains.
        provider: receives traces of requests; None for no traces.
        adapter_places: callers may load adapters from there, unload and merge them.
    """
    limits = limits or HttpLimits()
    metrics = Metrics(client, name)
    traces = RequestTracer(provider, name)
    service = _Service(client, text, template, name, limits, metrics, traces)
    app = FastAPI(
        title="Shoal", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    handlers: dict[tuple[str, str], Callable[..., Coroutine[Any, Any, Response]]] = {
        ("GET", "/health"): service.health,
        ("GET", "/version"): service.version,
        ("GET", "/metrics"): service.metrics_text,
        ("GET", "/openapi.json"): service.openapi,
        ("GET", "/v1/models"): service.models,
        ("GET", "/v1/models/{model}"): service.model,
        ("GET", "/v1/workers"): service.workers,
        ("POST", "/v1/completions"): service.completions,
        ("POST", "/v1/chat/completions"): service.chat_completions,
        ("POST", "/v1/embeddings"): service.embeddings,
        ("POST", "/tokenize"): service.tokenize,
        ("POST", "/detokenize"): service.detokenize,
    }
    for method, path in ROUTES:
        app.add_api_route(path, handlers[method, path], methods=[method], response_model=None)
    if adapter_places is not None:
        AdapterRoutes(client, limits, name, adapter_places).add_to(app)
    app.state.stop = service.stop
    protect(app, metrics.http, access=access, limits=limits, drain=drain)
    return app


def protect(
    app: FastAPI,
    count: Callable[[str, int], None],
    *,
    access: AccessControl | None,
    limits: HttpLimits,
    drain: DrainState | None,
) -> None:
    """Give every error of an application the one shape, and put the guard before it.

    Args:
        app: with the routes of :data:`ROUTES`.
        count: called with (route, status) of every request.
        access: who may call.
        limits: what a request may ask for.
        drain: closed while the server drains.
    """
    app.router.redirect_slashes = False
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ServeError, _serve_error)
    app.add_exception_handler(ClientDisconnect, _nobody)
    known = frozenset((*(path for _, path in ROUTES), *ADAPTER_ROUTES))

    def counted(path: str, status: int) -> None:
        route = "/v1/models/{model}" if path.startswith("/v1/models/") else path
        # Paths that are not defined must not become labels without bound.
        count(route if route in known else "other", status)

    app.add_middleware(
        HttpGuard,
        access=access or AccessControl(),
        limits=limits,
        count=counted,
        drain=drain or DrainState(),
    )


async def _http_error(request: Request, cause: Exception) -> Response:
    """404 and 405 of the router, in the one shape."""
    assert isinstance(cause, HTTPException)
    messages = {
        404: f"{request.url.path[:80]}: no such endpoint; see "
        f"{', '.join(path for _, path in ROUTES)}",
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
    """For the count of requests only: the client has gone."""
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
        traces: RequestTracer,
    ) -> None:
        self._traces = traces
        self._client = client
        self._text = text
        self._template = TemplateRenderer(template)
        self._name = name
        self._limits = limits
        self._metrics = metrics
        self._answers = ConcurrencyLimit(limits.open_requests)
        self._grammars = GrammarCheck(limits)
        self._created = int(time.time())
        self._eos = client.model.eos_ids | {
            token for token in text.eos_ids() if token < client.model.vocab_size
        }

    async def stop(self) -> None:
        """End what was started for requests."""
        await self._grammars.stop()
        await self._template.stop()
        await asyncio.to_thread(self._traces.stop)

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

    async def openapi(self) -> Response:
        """What can be asked, for programs."""
        return JSONResponse(document(ROUTES, self._limits, self._name))

    async def models(self) -> Response:
        """What is served."""
        cards = [self._card(), *(self._card(name) for name in self._client.job.adapters)]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, model: str) -> Response:
        """What is served under a name."""
        if model not in self._served:
            raise ApiError(
                f"model = {model[:80]!r}: no such model; this server has {', '.join(self._served)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return JSONResponse(self._card(model))

    async def workers(self) -> Response:
        """What the concurrent workers of each request see now; nothing where there are none."""
        views = await self._client.ask("views", otherwise=[])
        return JSONResponse({"object": "list", "data": views})

    @property
    def _served(self) -> tuple[str, ...]:
        """What requests may call: the model, and its adapters."""
        return (self._name, *self._client.job.adapters)

    def _card(self, name: str | None = None) -> dict[str, Any]:
        adapter = None if name == self._name else name
        return {
            "id": name or self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "shoal",
            "max_model_len": self._client.model.max_position,
            **({} if adapter is None else {"parent": self._name}),
        }

    async def embeddings(self, request: Request) -> Response:
        """Vectors of texts."""
        body = await read_body(request, self._limits)
        embeddings = read_embeddings(body, self._limits, self._client.model, (self._name,))
        prompts = [
            await asyncio.to_thread(self._encode, text, "input") if isinstance(text, str) else text
            for text in embeddings.texts
        ]
        for tokens in prompts:
            self._check_prompt(tokens, 1, "input")
        seat = self._answers.take(len(prompts))
        name = f"embd-{secrets.token_hex(12)}"
        params = SamplingParams(max_tokens=1, pooling=embeddings.pooling)

        async def one(place: int, tokens: Sequence[int]) -> list[float]:
            # The mean needs every token's state, so nothing of it may be found in the cache.
            own = f"{name}-{place}"
            salt = own if embeddings.pooling == "mean" else ""
            priority = embeddings.priority
            return await self._client.embed(
                Asked(own, [*tokens], len(tokens), params, priority=priority, salt=salt)
            )

        async def together() -> list[list[float]]:
            return await asyncio.gather(*(one(place, p) for place, p in enumerate(prompts)))

        total = sum(map(len, prompts))
        trace = self._traces.begin("embeddings", name, request.headers, num_prompt=total)
        with seat, trace.watch():
            vectors = await until_gone(request.receive, together())
        return JSONResponse(written(vectors, embeddings, self._name, total))

    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a chat."""
        body = await read_body(request, self._limits)
        given, special, texts = read_tokenize(body, self._limits, (self._name,))
        if isinstance(given, str):
            tokens = await asyncio.to_thread(self._encode, given, "prompt", special=special)
        else:
            tokens = list((await self._rendered(given, {})).tokens)
        longest = self._client.model.max_position
        if len(tokens) > longest:
            raise openai.too_long(len(tokens), 0, self._client.model)
        answer: dict[str, Any] = {"count": len(tokens), "max_model_len": longest}
        answer |= {"tokens": list(tokens), "token_strs": None}
        if texts:
            raw = map(self._text.token_bytes, tokens)
            answer["token_strs"] = [one.decode(errors="replace") for one in raw]
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        body = await read_body(request, self._limits)
        tokens = read_detokenize(body, self._client.model, (self._name,))
        return JSONResponse({"prompt": await asyncio.to_thread(self._text.decode, tokens)})

    # Completions

    async def completions(self, request: Request) -> Response:
        """Continue texts or tokens."""
        body = await read_body(request, self._limits)
        ask = openai.read_completion(body, self._limits, self._client.model, self._served)
        prompts = []
        for prompt in ask.prompts:
            if isinstance(prompt, str):
                tokens = await asyncio.to_thread(self._encode, prompt, "prompt")
                prompts.append(PreparedPrompt(tokens, prompt))
            else:
                wanted = ask.echo or ask.logprobs is not None
                shown = await asyncio.to_thread(self._text.decode, prompt) if wanted else None
                prompts.append(PreparedPrompt(prompt, shown))
        job = self._job("cmpl-", await self._formed(ask), prompts)
        return await self._answer(request, job, CompletionWriter(job, ask.model))

    async def chat_completions(self, request: Request) -> Response:
        """Answer the messages of a chat."""
        body = await read_body(request, self._limits)
        ask = openai.read_chat(body, self._limits, self._client.model, self._served)
        prompt = await self._render(ask)
        stops = self._template.template.stops
        job = self._job("chatcmpl-", await self._formed(ask), [prompt], stops)
        return await self._answer(request, job, ChatWriter(job, ask.model))

    async def _formed(self, ask: ParsedRequest) -> ParsedRequest:
        """With the grammar of the answer's form."""
        if ask.form is None:
            return ask
        param, form = ask.form
        if not self._eos and not ask.sampling.stop_ids:
            raise ApiError(
                f"{param}: this model has no token that ends a text; give stop_token_ids",
                param=param,
                code="unsupported_parameter",
            )
        grammar = await self._grammars.grammar(form, param)
        return replace(ask, sampling=replace(ask.sampling, grammar=grammar))

    async def _render(self, ask: ParsedRequest) -> PreparedPrompt:
        tools = None if ask.tools is None else [dict(tool) for tool in ask.tools.given]
        return await self._rendered(ask.messages, {**ask.template_values, "tools": tools})

    async def _rendered(
        self, messages: Sequence[dict[str, Any]], values: dict[str, Any]
    ) -> PreparedPrompt:
        text = await self._template.render(messages, **values)
        special = self._template.template.special
        tokens = await asyncio.to_thread(self._encode, text, "messages", special=special)
        return PreparedPrompt(tokens, None)

    def _encode(self, text: str, param: str, *, special: bool = True) -> list[int]:
        limit = self._client.model.max_position
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
            raise openai.too_long(count, 0, self._client.model, param=param, estimated=True)
        return tokens

    def _job(
        self,
        prefix: str,
        ask: ParsedRequest,
        prompts: list[PreparedPrompt],
        stops: Sequence[str] = (),
    ) -> GenerationJob:
        stop_ids = ask.sampling.stop_ids | (frozenset() if ask.ignore_eos else self._eos)
        # The choice requires how likely each answer is.
        choosing = ask.best_of > ask.n and ask.logprobs is None
        params = []
        for place, prompt in enumerate(prompts):
            room = min(self._check_length(prompt, ask), self._check_logprobs(len(prompts), ask))
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
            )
            for _ in params
        ]
        return GenerationJob(
            prefix + secrets.token_hex(12), int(time.time()), ask, prompts, params, answers
        )

    def _check_logprobs(self, num_prompts: int, ask: ParsedRequest) -> int:
        """Tokens of an answer whose log probabilities, with those of the others, stay in bounds."""
        if ask.logprobs is None:
            return self._client.model.max_position
        values = num_prompts * ask.best_of * (1 + ask.logprobs)
        most = self._limits.logprob_values // values
        if most < (ask.max_tokens or max(1, ask.sampling.min_tokens)):
            raise ApiError(
                f"max_tokens = {ask.max_tokens} with {values} log probabilities at each: expected "
                f"at most {self._limits.logprob_values} together; ask for fewer of either",
                param="logprobs",
                code="invalid_value",
            )
        return most

    def _check_length(self, prompt: PreparedPrompt, ask: ParsedRequest) -> int:
        """Room for new tokens behind a prompt."""
        wanted = ask.max_tokens or max(1, ask.sampling.min_tokens)
        wanted *= ask.sampling.workers  # whose tokens stand in each other's contexts
        return self._check_prompt(prompt.tokens, wanted, "messages" if ask.messages else "prompt")

    def _check_prompt(self, tokens: Sequence[int], wanted: int, param: str) -> int:
        model = self._client.model
        if not tokens:
            raise ApiError(
                f"{param}: no tokens: expected at least one; give some text",
                param=param,
                code="invalid_value",
            )
        room = model.max_position - len(tokens)
        if room < wanted:
            raise openai.too_long(len(tokens), wanted, model, param=param)
        for token in tokens:
            if token >= model.vocab_size:
                raise ApiError(
                    f"{param}: token {token}: expected ids below {model.vocab_size}; the tokenizer "
                    "does not belong to the model",
                    param=param,
                    code="invalid_value",
                )
        return room

    async def _answer(
        self, request: Request, job: GenerationJob, writer: ResponseWriter
    ) -> Response:
        seat = self._answers.take(len(job.params))
        run = self._run(job, request.headers)
        if job.ask.stream:
            source = events(run, writer, usage=job.ask.include_usage)
            return EventStream(source, ended=seat.leave)
        with seat:
            gathered = gather(run, writer, len(job.answers))
            return JSONResponse(await until_gone(request.receive, gathered))

    async def _run(
        self, job: GenerationJob, headers: Mapping[str, str]
    ) -> AsyncGenerator[tuple[int, ResponseDelta], None]:
        """(index of the answer, piece) of all answers of a job, as they come."""
        timers = [
            self._metrics.begin(len(job.prompt_of(index).tokens), params.max_tokens, job.ask.n)
            for index, params in enumerate(job.params)
        ]
        finishes = ["abort"] * len(timers)
        trace = self._traces.begin(
            "chat" if job.ask.messages else "text_completion",
            job.id,
            headers,
            num_prompt=sum(len(prompt.tokens) for prompt in job.prompts),
            params=job.params[0],
            n=job.ask.n,
        )

        async def one(index: int) -> AsyncGenerator[tuple[int, ResponseDelta], None]:
            timer, choice = timers[index], index % job.ask.best_of
            prompt = list(job.prompt_of(index).tokens)
            request = Asked(
                f"{job.id}-{index}",
                prompt,
                len(prompt),
                job.params[index],
                priority=job.ask.priority,
                adapter=None if job.ask.model == self._name else job.ask.model,
                salt=job.ask.salt,
                # Other answers to the same prompt begin with the cache of the first.
                fork_of=f"{job.id}-{index - choice}" if choice else None,
            )
            source = pieces(self._client, request, job.answers[index], timer.began)
            try:
                async with contextlib.aclosing(source):
                    async for piece in source:
                        timer.tokens(len(piece.tokens))
                        finishes[index] = piece.finish or finishes[index]
                        yield index, piece
            except ServeError:
                finishes[index] = "error"
                raise
            finally:
                timer.end(finishes[index])

        if len(job.params) == 1:
            merged = one(0)
        else:
            merged = merge([one(index) for index in range(len(job.params))])
        with trace.watch(timers, finishes):
            async with contextlib.aclosing(merged):
                async for item in merged:
                    yield item
