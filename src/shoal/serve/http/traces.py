"""Traces of requests for OpenTelemetry: one span each, in the words of its GenAI conventions.

A span begins when a request was understood and ends with its last answer. It has what was asked,
the numbers of tokens, and how long the request waited, had its prompt computed and generated;
never a word of prompt or answer. A request with the header ``traceparent`` belongs to the trace
of its sender.

Names: OpenTelemetry, Semantic conventions for generative AI, 1.37. Times of the parts of a request
have no name there; they have those that vLLM uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from shoal.core.errors import ServeError, install
from shoal.ir.serving import SamplingParams
from shoal.serve.http.metrics import Timer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

Operation = Literal["chat", "text_completion", "embeddings"]

# ms that what is left to send may take at the end.
_FLUSH_MS = 3000

_PARTS = {
    "queue_time": "gen_ai.latency.time_in_queue",
    "prefill_time": "gen_ai.latency.time_in_model_prefill",
    "decode_time": "gen_ai.latency.time_in_model_decode",
    "inference_time": "gen_ai.latency.time_in_model_inference",
}


def exporting(endpoint: str) -> TracerProvider:
    """What sends spans to a collector, in batches, by OTLP over HTTP; redirects are not followed.

    Args:
        endpoint: of the collector, as http://localhost:4318.

    Raises:
        ServeError: OpenTelemetry is not installed.
    """
    try:
        import requests
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as cause:
        raise ServeError(
            f"traces need OpenTelemetry ({cause}); install it with {install('traces')}"
        ) from cause
    provider = TracerProvider(resource=Resource.create({"service.name": "shoal"}))
    # A redirect would take the headers, which may hold a key, to a host that was not named.
    session = requests.Session()
    session.max_redirects = 0
    exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", session=session)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


class RequestSpan:
    """The span of one request; without a tracer, nothing.

    Args:
        span: what is recorded; None for no trace.
    """

    def __init__(self, span: Span | None = None) -> None:
        self._span = span

    @contextlib.contextmanager
    def watch(self, timers: Sequence[Timer] = (), finishes: Sequence[str] = ()) -> Iterator[None]:
        """The request is under way for as long as the block takes; see :meth:`end`."""
        error: BaseException | None = None
        try:
            yield
        except (Exception, asyncio.CancelledError) as cause:
            error = cause
            raise
        finally:
            self.end(timers, finishes, error)

    def end(
        self, timers: Sequence[Timer], finishes: Sequence[str], error: BaseException | None = None
    ) -> None:
        """The request ended.

        Args:
            timers: of its answers.
            finishes: why each ended.
            error: why it failed, if it did.
        """
        span = self._span
        if span is None or not span.is_recording():
            return
        span.set_attribute("gen_ai.usage.output_tokens", sum(t.num_tokens for t in timers))
        span.set_attribute("gen_ai.response.finish_reasons", list(finishes))
        firsts = [timer.first - timer.asked for timer in timers if timer.first is not None]
        if firsts:
            span.set_attribute("gen_ai.latency.time_to_first_token", min(firsts))
        if timers:
            span.set_attribute(
                "gen_ai.latency.e2e", max(timer.last - timer.asked for timer in timers)
            )
        parts = [timer.parts() for timer in timers]
        for part, name in _PARTS.items():
            known = [times[part] for times in parts if part in times]
            if known:  # of several answers, the slowest
                span.set_attribute(name, max(known))
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)[:200]))
        span.end()


class RequestTracer:
    """Begins the spans of requests.

    Args:
        provider: receives them; None for no traces.
    """

    def __init__(self, provider: TracerProvider | None, model: str) -> None:
        self._provider = provider
        self._model = model
        self._tracer: Tracer | None = None
        if provider is not None:
            self._tracer = provider.get_tracer("shoal.serve")

    def begin(
        self,
        operation: Operation,
        name: str,
        headers: Mapping[str, str],
        *,
        num_prompt: int,
        params: SamplingParams | None = None,
        n: int = 1,
    ) -> RequestSpan:
        """A request was understood.

        Args:
            operation: what it asks for.
            name: id of its answer.
            headers: of the request.
            num_prompt: tokens of all prompts.
            params: of the first answer.
            n: answers of each prompt.
        """
        if self._tracer is None:
            return RequestSpan()
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "shoal",
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "gen_ai.response.id": name,
            "gen_ai.usage.input_tokens": num_prompt,
        }
        if params is not None:
            attributes |= {
                "gen_ai.request.choice.count": n,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                "gen_ai.request.top_k": params.top_k,
                "gen_ai.request.frequency_penalty": params.frequency_penalty,
                "gen_ai.request.presence_penalty": params.presence_penalty,
            }
        return RequestSpan(
            self._tracer.start_span(
                f"{operation} {self._model}",
                context=TraceContextTextMapPropagator().extract(headers),
                kind=SpanKind.SERVER,
                attributes=attributes,
                start_time=time.time_ns(),
            )
        )

    def stop(self) -> None:
        """Send what is left; waits for the collector for a few seconds at most."""
        if self._provider is not None:
            self._provider.force_flush(_FLUSH_MS)
            self._provider.shutdown()
