"""A workload replayed against servers that run elsewhere: ours, and some that behave badly."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import fake_engine
import pytest
from typer.testing import CliRunner

from shoal.core.errors import ServeError
from shoal.ir import Arrival
from shoal.serve.bench.latencies import draw, measured_of, samples_of
from shoal.serve.bench.remote import RemoteServer, replay_remote, served_model

pytestmark = pytest.mark.multi


def event(text="a", **more):
    return b"data: " + json.dumps({"choices": [{"text": text}], **more}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}\n\n'
DONE = b"data: [DONE]\n\n"
CHAT = b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n' + b"".join(
    b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n' for _ in range(3)
)

# Name -> (status, body, what becomes of the request).
ANSWERS = {
    "good": (200, event() + event() + USAGE + DONE, None),
    "of another style": (
        200,
        b": hello\r\n\r\nevent: message\r\n"
        + (event() + event()).replace(b"data: ", b"data:").replace(b"\n", b"\r\n")
        + DONE,
        None,
    ),
    "error in the stream": (200, event() + b'data: {"error": {"message": "lost"}}\n\n', "failed"),
    "overloaded": (429, b'{"error": {"message": "later"}}', "refused"),
    "a page": (502, b"<html>bad gateway</html>", "refused"),
    "no JSON": (200, event() + b"data: {nonsense\n\n" + DONE, "broken"),
    "a list": (200, b"data: [1]\n\n" + DONE, "broken"),
    "odd choices": (200, b'data: {"choices": [3]}\n\n' + DONE, "broken"),
    "deep": (200, b"data: " + b"[" * 100_000 + b"\n\n" + DONE, "broken"),
    "no end": (200, event() + event(), "broken"),
    "no stream": (200, b'{"choices": [{"text": "ab"}]}', "broken"),
    "endless line": (200, b"data: " + b"x" * 3_000_000, "broken"),
    "nothing": (200, DONE, "empty"),
    "cut": (200, event(), "broken"),
    "hang": (200, event(), "hung"),
}


@contextmanager
def bad_server():
    """Answers request n, by the n-th of ``ANSWERS``: its first token id."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            """Nothing."""

        def do_GET(self):
            self.send_response(200)
            body = b'{"data": [{"id": "bad"}]}'
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            data = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "messages" in data:
                name, status, body = "chat", 200, CHAT + USAGE + DONE
            else:
                name = list(ANSWERS)[data["prompt"][0]]
                status, body, _ = ANSWERS[name]
            self.send_response(status)
            more = name in ("cut", "hang")
            self.send_header("Content-Length", str(len(body) + more))
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()
            if name == "hang":
                over.wait(30)
            self.close_connection = True

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            over.set()
            server.shutdown()


@pytest.mark.slow
def test_each_wrong_answer_ends_its_own_request():
    arrivals = [Arrival(0.0, (number, 1, 2), 5) for number in range(len(ANSWERS))]
    with bad_server() as url:
        result = replay_remote(RemoteServer(url=f"{url}/v1/", model="bad"), arrivals[:-1])
        # The last never ends its answer.
        result += replay_remote(RemoteServer(url=url, model="bad", timeout_s=1.0), arrivals[-1:])
        (chat,) = replay_remote(RemoteServer(url=url, model="bad", chat=True), arrivals[:1])
    assert {n: one.failure for n, one in zip(ANSWERS, result, strict=True)} == {
        name: failure for name, (_, _, failure) in ANSWERS.items()
    }
    assert all(one.reason for one in result if one.failure)
    good, other = result[0].served, result[1].served
    assert (good.n_prompt, good.n_output) == (7, 5)  # as the server says
    assert (other.n_prompt, other.n_output) == (3, 2)  # as they came
    assert (chat.failure, chat.served.n_output, len(chat.times)) == (None, 5, 3)
    assert 0 <= result[0].sent <= good.first <= good.finish
    served = [one.served for one in result]
    measured = measured_of(served, [0.5], targets=(60.0, 60.0))
    assert measured["slo_share"] == 2 / len(ANSWERS)
    assert measured["goodput_per_s"] == pytest.approx(2 / measured["total_s"])
    assert measured["requests_per_s"] == measured["goodput_per_s"]
    for name in ("ttft", "tpot", "itl", "e2e"):
        for which in ("mean", "p50", "p99"):
            assert measured[f"{name}_{which}_s"] >= 0
    assert draw(samples_of(served, [0.5]), "bad").count("<polyline") == 3


@pytest.mark.slow
def test_requests_are_sent_at_their_times_and_do_not_wait_for_each_other(serve_fake):
    prompt = (fake_engine.SLOW, 65, 66)
    arrivals = [Arrival(0.1 * number, prompt, 20) for number in range(4)]
    with serve_fake() as server:
        remote = RemoteServer(url=server.url)
        known = served_model(remote)
        assert (known.name, known.max_position) == ("bytes", fake_engine.MAX_POSITION)
        result = replay_remote(RemoteServer(url=server.url, model="bytes"), arrivals)
        with pytest.raises(ServeError, match=r"model = 'gpt': expected one that .* serves: bytes"):
            served_model(RemoteServer(url=server.url, model="gpt"))
    assert [one.failure for one in result] == [None] * 4
    assert [one.served.n_output for one in result] == [20] * 4
    assert all(one.sent >= one.served.arrival for one in result)
    # 20 tokens of 20 ms each: all are under way when the last comes.
    assert result[0].served.finish > result[-1].sent
    assert all(sum(one.gaps) == pytest.approx(one.times[-1] - one.times[0]) for one in result)


def test_the_command(serve_fake, tmp_path):
    from shoal.app.cli import app

    files = [tmp_path / "r.json", tmp_path / "r.svg"]
    shared = ["bench", "serve", "--workload", "chat", "--requests", "5", "--rate", "50", "-q"]
    shared += ["--vocab", "250", "--set", "max_position=64"]
    out = [word for file in files for word in ("--out", str(file))]
    with serve_fake() as server:
        shown = CliRunner().invoke(
            app, [*shared, "--url", server.url, "--slo", "ttft=60,tpot=60", *out]
        )
    assert shown.exit_code == 0, shown.output
    assert "E2E (latency of a whole request), mean" in shown.stdout
    assert "which met the targets" in shown.stdout
    data = json.loads(files[0].read_text())
    assert (data["requests"], data["failures"], data["measured"]["slo_share"]) == (5, {}, 1.0)
    assert len(data["samples"]["ttft"]) == 5
    assert files[1].read_text().count("<polyline") >= 3
    with closing(socket.create_server(("127.0.0.1", 0))) as one:
        port = one.getsockname()[1]
    gone = CliRunner().invoke(app, [*shared, "--url", f"http://127.0.0.1:{port}"])
    assert gone.exit_code != 0
    assert "is a server running there?" in str(gone.exception)


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://a", "http://", "http://a:b"])
def test_addresses(url):
    with pytest.raises(ServeError, match="expected an address such as"):
        RemoteServer(url=url)
