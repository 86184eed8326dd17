"""Nobody who asks a server with a key goes where that server sends him."""

from __future__ import annotations

import contextlib
import http.server
import threading

import pytest

from shoal.core.errors import ServeError
from shoal.ir import Arrival
from shoal.serve.bench.remote import RemoteServer, replay_remote, served_model
from shoal.serve.watch.upstream import Upstream

KEY = "key-for-the-first-server-only"


@contextlib.contextmanager
def server(answer):
    """A real server of this machine; what it was asked is noted."""
    requests = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self):
            requests.append((self.command, self.path, self.headers.get("authorization")))
            length = int(self.headers.get("content-length") or 0)
            self.rfile.read(length)
            answer(self)

        def log_message(self, *_):
            pass

    Handler.do_GET = Handler.do_POST = Handler.answer
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}", requests
        finally:
            listening.shutdown()
            thread.join(10)


def models(handler):
    body = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
    handler.send_response(200)
    handler.send_header("content-type", "application/json")
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.fixture(params=[301, 302, 303, 307, 308])
def hosts(request):
    """(address of a server that sends elsewhere, what it was asked, what elsewhere was asked)."""

    def away(handler):
        handler.send_response(request.param)
        # Another name of this machine is another host.
        handler.send_header("location", there.replace("127.0.0.1", "localhost") + handler.path)
        handler.send_header("content-length", "0")
        handler.end_headers()

    with server(models) as (there, second), server(away) as (here, first):
        yield here, first, second


def test_bench_does_not_follow(hosts):
    here, first, second = hosts
    remote = RemoteServer(url=here, model="m", key=KEY, timeout_s=20)
    with pytest.raises(ServeError, match="status 30"):
        served_model(remote)
    (replayed,) = replay_remote(remote, [Arrival(0.0, (1, 2), 2)])
    assert replayed.failure == "refused" and "status 30" in replayed.reason
    assert [key for _, _, key in first] == [f"Bearer {KEY}"] * 2
    assert second == []


def test_the_dashboard_does_not_follow(hosts):
    here, first, second = hosts
    upstream = Upstream(here, KEY)
    assert not upstream.state().ready and not upstream.numbers()[0].ready
    talk = [{"role": "user", "content": "a"}]
    for ask in (upstream.workers, lambda: list(upstream.stream("m", talk))):
        with pytest.raises(ServeError, match="status 30"):
            ask()
    assert len(first) >= 4 and second == []


def test_the_status_of_a_server_does_not_follow(hosts):
    from shoal.app.status import status

    here, first, second = hosts
    with pytest.raises(ServeError, match="answered 30"):
        status("127.0.0.1", int(here.rpartition(":")[2]), KEY)
    assert len(first) == 1 and second == []


def test_the_other_server_answers_who_asks_it():
    """So that silence above means that nobody asked."""
    with server(models) as (there, request):
        assert served_model(RemoteServer(url=there)).name == "m"
    assert [path for _, path, _ in request] == ["/v1/models"]
