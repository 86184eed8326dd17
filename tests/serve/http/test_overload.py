"""More than a server takes: what it took it answers, and the rest hears so at once."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import fake_engine
import pytest

from shoal.serve.http.concurrency import ConcurrencyLimit
from shoal.serve.http.errors import ApiError

pytestmark = pytest.mark.multi


def test_seats_are_taken_together_or_not_at_all():
    seats = ConcurrencyLimit(4)
    first = seats.take(3)
    with pytest.raises(ApiError) as caught:
        seats.take(2)
    assert caught.value.status == 429
    assert caught.value.headers["retry-after"] == "1"
    assert seats.used == 3
    with seats.take(1):
        assert seats.used == 4
    first.leave()
    first.leave()
    assert seats.used == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_bound_holds_and_nothing_accepted_is_lost(
    serve_fake, caller, monkeypatch, stream, record_property
):
    from shoal.serve.engine.client import EngineClient
    from shoal.serve.http.limits import HttpLimits

    most = []
    opened = EngineClient._open

    def watched(self, *arguments, **options):
        result = opened(self, *arguments, **options)
        most.append(self.num_open)
        return result

    monkeypatch.setattr(EngineClient, "_open", watched)
    body = {"model": "bytes", "prompt": [fake_engine.SLOW, 65], "max_tokens": 6, "stream": stream}

    def one(number):
        call = caller(server.url)
        status, data = call("POST", "/v1/completions", {**body, "n": 1 + number % 2})
        return status, data, call.headers

    with serve_fake(limits=HttpLimits(open_requests=6)) as server:
        with ThreadPoolExecutor(48) as pool:
            answers = list(pool.map(one, range(96)))
        assert caller(server.url)("POST", "/v1/completions", body)[0] == 200
    assert max(most) <= 6
    statuses = [status for status, _, _ in answers]
    assert set(statuses) == {200, 429}
    for number, (status, data, headers) in enumerate(answers):
        if status == 429:
            assert int(headers["Retry-After" if "Retry-After" in headers else "retry-after"]) >= 1
            assert json.loads(data)["error"]["code"] == "overloaded"
        elif stream:
            assert data.endswith(b"data: [DONE]\n\n")
            assert data.count(b'"finish_reason":"length"') == 1 + number % 2
        else:
            choices = json.loads(data)["choices"]
            assert [choice["finish_reason"] for choice in choices] == ["length"] * (1 + number % 2)
    refused = statuses.count(429)
    text = f"96 at once: {96 - refused} answered whole, {refused} refused, 0 lost"
    record_property("figure", text)


def test_a_seat_is_free_again_whoever_leaves():
    """Even a stream whose client had gone before its first event."""
    from shoal.serve.http.stream import EventStream

    seats = ConcurrencyLimit(1)

    async def never():
        await asyncio.sleep(600)
        yield b""

    async def gone():
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError("nobody is there")

    async def run():
        response = EventStream(never(), ended=seats.take(1).leave)
        await response({"type": "http"}, gone, send)

    asyncio.run(run())
    assert seats.used == 0


@pytest.mark.slow
def test_a_thousand_half_open_connections_stop_nobody(serve_fake, caller):
    """Each has sent a part of its head, or of its body, and nothing more."""
    import socket

    parts = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
    )
    body = {"model": "bytes", "prompt": "ab", "max_tokens": 2}
    with serve_fake() as server:
        host, port = server.url.removeprefix("http://").split(":")
        held = []
        try:
            for number in range(1000):
                connection = socket.create_connection((host, int(port)), timeout=20)
                connection.sendall(parts[number % 2])
                held.append(connection)
            call = caller(server.url)
            for _ in range(5):
                status, data = call("POST", "/v1/completions", body)
                assert status == 200
                assert json.loads(data)["choices"][0]["text"] == "ab"
        finally:
            for connection in held:
                connection.close()
