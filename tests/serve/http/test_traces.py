"""One span a request, in the words of the GenAI conventions."""

from __future__ import annotations

import asyncio
import json

import pytest

pytest.importorskip("opentelemetry.sdk")

import fake_engine
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (
    InMemorySpanExporter,
)
from opentelemetry.trace import SpanKind, StatusCode

from shoal.core.errors import ServeError
from shoal.serve.http.traces import RequestTracer, exporting

pytestmark = pytest.mark.multi

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def spans():
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def server(serve_fake, spans):
    """The server runs in a thread of this process, and so do its spans."""
    from shoal.serve.http import traces

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "exporting", lambda endpoint: provider)
        with serve_fake(traces="http://collector:4318") as running:
            yield running


@pytest.fixture
def one_span(spans):
    spans.clear()

    def only():
        (span,) = spans.get_finished_spans()
        return span

    return only


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion(call, one_span, stream):
    body = {"model": "bytes", "prompt": "secret", "max_tokens": 4, "n": 2, "temperature": 0.5}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    status, data = call("POST", "/v1/completions", {**body, "stream": stream}, headers)
    assert status == 200
    span = one_span()
    assert (span.name, span.kind) == ("text_completion bytes", SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT
    result = dict(span.attributes)
    times = {name: result.pop(name) for name in list(result) if "latency" in name}
    identity = result.pop("gen_ai.response.id")
    assert stream or identity == json.loads(data)["id"]
    assert result == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "shoal",
        "gen_ai.request.model": "bytes",
        "gen_ai.response.model": "bytes",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.top_k": 0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.usage.input_tokens": 6,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.response.finish_reasons": ("length", "length"),
    }
    assert {name.rpartition(".")[2] for name in times} == {
        "time_in_queue",
        "time_in_model_prefill",
        "time_in_model_decode",
        "time_in_model_inference",
        "time_to_first_token",
        "e2e",
    }
    assert all(value >= 0 for value in times.values())
    assert "secret" not in span.to_json()


def test_a_chat_and_a_text(call, one_span, spans):
    chat = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert call("POST", "/v1/chat/completions", chat)[0] == 200
    assert one_span().name == "chat bytes"
    spans.clear()
    assert call("POST", "/v1/embeddings", {"model": "bytes", "input": "abc"})[0] == 200
    assert one_span().name == "embeddings bytes"
    assert one_span().attributes["gen_ai.usage.input_tokens"] == 3


def test_an_error(call, one_span):
    body = {"model": "bytes", "prompt": [fake_engine.REFUSE], "max_tokens": 4}
    assert call("POST", "/v1/completions", body)[0] == 400
    span = one_span()
    assert span.status.status_code == StatusCode.ERROR
    assert span.attributes["error.type"] == "RefusedError"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("error",)


def test_what_is_no_request_has_no_span(call, spans):
    spans.clear()
    call("GET", "/health")
    call("POST", "/v1/completions", {"model": "bytes", "prompt": 3})
    assert not spans.get_finished_spans()


def test_without_the_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ServeError, match=r"shoal-ml\[traces\]"):
        exporting("http://localhost:4318")


def exported(answer):
    """What a collector gets that answers so, of one span: heads and bodies.

    Args:
        answer: of its port and the number of the request, from 0.
    """
    got = []

    async def run():
        async def take(reader, writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            got.append((head, await reader.readexactly(int(length or 0))))
            writer.write(answer(port, len(got) - 1))
            await writer.drain()
            writer.close()

        collector = await asyncio.start_server(take, "127.0.0.1", 0)
        port = collector.sockets[0].getsockname()[1]
        traces = RequestTracer(exporting(f"http://127.0.0.1:{port}"), "tiny")
        traces.begin("embeddings", "id-of-it", {}, num_prompt=1).end((), ())
        await asyncio.to_thread(traces.stop)
        collector.close()
        await collector.wait_closed()

    asyncio.run(run())
    return got


FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def test_spans_leave_by_otlp():
    """A collector that is none: what arrives is what the exporter sends."""
    ((head, body),) = exported(lambda port, number: FINE)
    assert head.startswith(b"POST /v1/traces ")
    assert b"id-of-it" in body or body[:2] == b"\x1f\x8b"


def test_a_redirect_of_the_collector_is_not_followed(monkeypatch):
    """The other host would have the headers, and the key in them."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret")

    def answer(port, number):
        target = b"Location: http://localhost:%d/elsewhere\r\n" % port
        moved = b"HTTP/1.1 307 Temporary Redirect\r\n" + target + b"Content-Length: 0\r\n\r\n"
        return FINE if number else moved

    ((head, _),) = exported(answer)
    assert head.startswith(b"POST /v1/traces ") and b"secret" in head
