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
``POST /v1/responses``       answer the items of a conversation
``POST /v1/embeddings``      vectors of texts
``POST /v1/rerank``          documents by how similar they are to a query; also ``/rerank``
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
from starlette.routing import compile_path

from shoal.core.errors import ServeError
from shoal.core.version import __version__
from shoal.corpora.chat.template import ChatTemplate
from shoal.serve.adapters.routes import ADAPTER_ROUTES, AdapterPlaces, AdapterRoutes
from shoal.serve.engine.client import EngineClient
from shoal.serve.engine.failure import RefusedError
from shoal.serve.http import openai
from shoal.serve.http.answer import ResponseDelta, pieces
from shoal.serve.http.body import read_body
from shoal.serve.http.concurrency import ConcurrencyLimit
from shoal.serve.http.draining import DrainState
from shoal.serve.http.embeddings import EmbeddingInputs, read_embeddings, written
from shoal.serve.http.errors import ApiError, as_api_error, error_response
from shoal.serve.http.guard import AccessControl, HttpGuard
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.metrics import Metrics
from shoal.serve.http.openai import ParsedRequest
from shoal.serve.http.openapi import document
from shoal.serve.http.preparing import RequestPreparer
from shoal.serve.http.rerank import ranked, read_rerank
from shoal.serve.http.response_items import ItemWriter
from shoal.serve.http.responses import read_response
from shoal.serve.http.stream import EventStream, events, gather, merge, until_gone
from shoal.serve.http.traces import RequestTracer
from shoal.serve.http.unknown import UnknownFields
from shoal.serve.http.writers import (
    ChatWriter,
    CompletionWriter,
    GenerationJob,
    PreparedPrompt,
    ResponseWriter,
)
from shoal.serve.text.grammar import GRAMMAR
from shoal.serve.text.grammar_check import GrammarCheck, bad_form
from shoal.serve.text.pieces import TextModel
from shoal.serve.text.template import TemplateRenderer
from shoal.serve.text.tokens import read_detokenize, read_tokenize

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

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
    ("POST", "/v1/responses"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/rerank"),
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
        limits: limits of the options of a request.
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
        ("POST", "/v1/responses"): service.responses,
        ("POST", "/v1/embeddings"): service.embeddings,
        ("POST", "/v1/rerank"): service.rerank,
        ("POST", "/rerank"): service.rerank,
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
    routes: Sequence[tuple[str, str]] = ROUTES,
    respond: Callable[[ApiError], Response] = error_response,
) -> None:
    """Give every error of an application the one shape, and put the guard before it.

    Args:
        app: with these routes.
        count: called with (route, status) of every request.
        access: who may call.
        limits: limits of the options of a request.
        drain: closed while the server drains.
        routes: (method, path) of every endpoint; those of adapters are known besides.
        respond: the answer that is an error.
    """
    paths = tuple(dict.fromkeys(path for _, path in routes))
    places = [(compile_path(path)[0], path) for path in (*paths, *ADAPTER_ROUTES)]

    async def http_error(request: Request, cause: Exception) -> Response:
        assert isinstance(cause, HTTPException)
        return respond(_http_error(request, cause, paths))

    async def serve_error(_: Request, cause: Exception) -> Response:
        assert isinstance(cause, ServeError)
        return respond(as_api_error(cause))

    def counted(path: str, status: int) -> None:
        # Paths that are not defined must not become labels without bound.
        count(next((route for form, route in places if form.match(path)), "other"), status)

    app.router.redirect_slashes = False
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ServeError, serve_error)
    app.add_exception_handler(ClientDisconnect, _nobody)
    app.add_middleware(
        HttpGuard,
        access=access or AccessControl(),
        limits=limits,
        count=counted,
        drain=drain or DrainState(),
        methods=sorted({method for method, _ in routes}),
        respond=respond,
    )


def _http_error(request: Request, cause: HTTPException, paths: Sequence[str]) -> ApiError:
    """404 and 405 of the router, in the one shape."""
    messages = {
        404: f"{request.url.path[:80]}: unknown endpoint; see {', '.join(paths)}",
        405: f"{request.method} {request.url.path[:80]}: expected another method, "
        f"{(cause.headers or {}).get('Allow', 'GET or POST')}",
    }
    codes = {404: "not_found", 405: "method_not_allowed"}
    return ApiError(
        messages.get(cause.status_code, str(cause.detail)),
        status=cause.status_code,
        code=codes.get(cause.status_code),
        headers=cause.headers,
    )


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
        self._unknown = UnknownFields(limits)
        self._created = int(time.time())
        self._prepare = RequestPreparer(text, client.model, limits)

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
        """List of models."""
        cards = [self._card(), *(self._card(name) for name in self._client.job.adapters)]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, model: str) -> Response:
        """One model."""
        if model not in self._served:
            raise ApiError(
                f"model = {model[:80]!r}: unknown model; this server has {', '.join(self._served)}",
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

    async def _body(self, request: Request) -> dict[str, Any]:
        """The body of a request; the answer names its unknown fields."""
        body = await read_body(request, self._limits)
        self._unknown.note(request, body)
        return body

    async def embeddings(self, request: Request) -> Response:
        """Embeddings."""
        body = await self._body(request)
        asked = read_embeddings(body, self._limits, self._client.model, (self._name,))
        vectors, total = await self._vectors(request, asked, ["input"] * len(asked.texts))
        return JSONResponse(written(vectors, asked, self._name, total))

    async def rerank(self, request: Request) -> Response:
        """Reranking: documents sorted by similarity to a query."""
        asked = read_rerank(await self._body(request), self._limits, (self._name,))
        vectors, total = await self._vectors(request, asked.texts, asked.names)
        return JSONResponse(ranked(vectors, asked, self._name, total))

    async def _vectors(
        self, request: Request, embeddings: EmbeddingInputs, names: Sequence[str]
    ) -> tuple[list[list[float]], int]:
        """Vectors of texts, each given by the field named so, and the number of their tokens."""
        prompts: list[Sequence[int]] = []
        for text, field in zip(embeddings.texts, names, strict=True):
            tokens: Sequence[int]
            if isinstance(text, str):
                tokens = await asyncio.to_thread(self._prepare.encode, text, field)
            else:
                tokens = text
            self._prepare.check_prompt(tokens, 1, field)
            prompts.append(tokens)
        slot = self._answers.take(len(prompts))
        name = f"embd-{secrets.token_hex(12)}"

        async def one(place: int, tokens: Sequence[int]) -> list[float]:
            return await self._client.embed(embeddings.request(f"{name}-{place}", tokens))

        async def together() -> list[list[float]]:
            return await asyncio.gather(*(one(place, p) for place, p in enumerate(prompts)))

        total = sum(map(len, prompts))
        trace = self._traces.begin("embeddings", name, request.headers, num_prompt=total)
        with slot, trace.watch():
            return await until_gone(request.receive, together()), total

    async def tokenize(self, request: Request) -> Response:
        """Tokenize a text or a chat."""
        body = await self._body(request)
        given, special, texts = read_tokenize(body, self._limits, (self._name,))
        if isinstance(given, str):
            tokens = await asyncio.to_thread(self._prepare.encode, given, "prompt", special=special)
        else:
            tokens = list((await self._rendered(given, {}, "messages")).tokens)
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
        """Detokenize."""
        body = await self._body(request)
        tokens = read_detokenize(body, self._client.model, (self._name,))
        return JSONResponse({"prompt": await asyncio.to_thread(self._text.decode, tokens)})

    # Completions

    async def completions(self, request: Request) -> Response:
        """Completions of texts or token ids."""
        body = await self._body(request)
        ask = openai.read_completion(body, self._limits, self._client.model, self._served)
        prompts = []
        for prompt in ask.prompts:
            if isinstance(prompt, str):
                tokens = await asyncio.to_thread(self._prepare.encode, prompt, "prompt")
                prompts.append(PreparedPrompt(tokens, prompt))
            else:
                wanted = ask.echo or ask.logprobs is not None
                shown = await asyncio.to_thread(self._text.decode, prompt) if wanted else None
                prompts.append(PreparedPrompt(prompt, shown))
        job = self._prepare.job("cmpl-", await self._formed(ask), prompts)
        return await self._answer(request, job, CompletionWriter(job, ask.model))

    async def chat_completions(self, request: Request) -> Response:
        """Chat completions."""
        body = await self._body(request)
        ask = openai.read_chat(body, self._limits, self._client.model, self._served)
        job = await self._chat("chatcmpl-", ask)
        return await self._answer(request, job, ChatWriter(job, ask.model))

    async def responses(self, request: Request) -> Response:
        """Responses."""
        body = await self._body(request)
        ask, shown = read_response(body, self._limits, self._client.model, self._served)
        job = await self._chat("resp_", ask)
        return await self._answer(request, job, ItemWriter(job, ask.model, shown))

    async def _chat(self, prefix: str, ask: ParsedRequest) -> GenerationJob:
        prompt = await self._render(ask)
        stops = self._template.template.stops
        return self._prepare.job(prefix, await self._formed(ask), [prompt], stops)

    async def _formed(self, ask: ParsedRequest) -> ParsedRequest:
        """With the grammar of the answer's form."""
        if ask.form is None:
            return ask
        param, form = ask.form
        self._prepare.check_end(param, ask)
        grammar = await self._grammars.grammar(form, param)
        return replace(ask, sampling=replace(ask.sampling, grammar=grammar))

    async def _render(self, ask: ParsedRequest) -> PreparedPrompt:
        tools = None if ask.tools is None else [dict(tool) for tool in ask.tools.given]
        values = {**ask.template_values, "tools": tools}
        return await self._rendered(ask.messages, values, ask.given)

    async def _rendered(
        self, messages: Sequence[dict[str, Any]], values: dict[str, Any], param: str
    ) -> PreparedPrompt:
        text = await self._template.render(messages, **values)
        special = self._template.template.special
        tokens = await asyncio.to_thread(self._prepare.encode, text, param, special=special)
        return PreparedPrompt(tokens, None)

    async def _answer(
        self, request: Request, job: GenerationJob, writer: ResponseWriter
    ) -> Response:
        slot = self._answers.take(len(job.params))
        run = self._run(job, request.headers)
        if job.ask.stream:
            return EventStream(events(run, writer), ended=slot.leave)
        with slot:
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
            timer = timers[index]
            request = job.request(
                index, adapter=None if job.ask.model == self._name else job.ask.model
            )
            source = pieces(self._client, request, job.answers[index], timer.began)
            try:
                async with contextlib.aclosing(source):
                    async for piece in source:
                        timer.tokens(len(piece.tokens))
                        finishes[index] = piece.finish or finishes[index]
                        yield index, piece
            except RefusedError as cause:
                finishes[index] = "error"
                if job.ask.form is None or not str(cause).startswith(GRAMMAR):
                    raise
                raise bad_form(job.ask.form[0], str(cause)) from None
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
