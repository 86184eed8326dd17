"""The engine dies, hangs, or is left alone: nobody waits for ever, and it comes back."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from pathlib import Path

import fake_engine
import psutil
import pytest

import forked_children
from shoal.core.errors import ServeError

pytestmark = pytest.mark.multi

SLOW = {"model": "bytes", "prompt": [fake_engine.SLOW, 5, 6], "max_tokens": 3000}
SHORT = {"model": "bytes", "prompt": "ab", "max_tokens": 2}
WAIT_S = 30


def until(condition, what):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def open_stream(url, body, path="/v1/completions"):
    """A connection whose stream has begun, and its answer."""
    host, port = url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    raw = json.dumps({**body, "stream": True})
    connection.request("POST", path, raw, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    answer.readline()
    return connection, answer


def served_again(call):
    until(lambda: call("GET", "/health")[0] == 200, "the engine did not come back")
    status, data = call("POST", "/v1/completions", SHORT)
    assert status == 200
    assert json.loads(data)["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("how", ["kill", "exit", "crash", "hang"])
@pytest.mark.slow
def test_death_in_the_middle_of_a_stream(serve_fake, caller, how):
    with serve_fake(client={"hang_s": 1.0, "backoff_s": 1.0}) as server:
        call = caller(server.url)
        first = server.engine.pid
        connection, answer = open_stream(server.url, SLOW)
        trigger = {"exit": fake_engine.EXIT, "crash": fake_engine.CRASH, "hang": fake_engine.HANG}
        if how == "kill":
            os.kill(first, signal.SIGKILL)
        else:
            status, error = call.error(
                "POST", "/v1/completions", {**SHORT, "prompt": [trigger[how], 5], "max_tokens": 9}
            )
            assert status == 503
            assert error["code"] == "engine_unavailable"
        rest = answer.read().decode()
        connection.close()
        events = [line[6:] for line in rest.split("\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
        assert error["type"] == "server_error"
        assert error["code"] == "engine_unavailable"
        if how == "crash":
            assert "ValueError: a step that fails" in error["message"]
        if how == "hang":
            assert "hangs" in error["message"]
        # Until it is back, everything is refused at once, and says when to come again.
        status, error = call.error("POST", "/v1/completions", SHORT)
        assert (status, error["code"]) == (503, "engine_unavailable")
        assert int(call.headers["retry-after"]) >= 1
        status, error = call.error("GET", "/health")
        assert status == 503
        status, text = call("GET", "/metrics")
        assert status == 200
        assert b'shoal:engine_up{model_name="bytes"} 0.0' in text
        served_again(call)
        assert server.engine.pid != first
        assert not psutil.pid_exists(first)
        assert b'shoal:engine_restarts_total{model_name="bytes"} 1.0' in call("GET", "/metrics")[1]


def test_openai_client_sees_the_death(serve_fake):
    from openai import APIError, InternalServerError, OpenAI

    with (
        serve_fake(client={"backoff_s": 2.0}) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = client.completions.create(**SLOW, stream=True)
        next(stream)
        os.kill(server.engine.pid, signal.SIGKILL)
        with pytest.raises(APIError, match="engine"):
            list(stream)
        with pytest.raises(InternalServerError, match="engine"):
            client.completions.create(**SHORT)


def aborts(server):
    return server.engine.last_stats.get("aborts_total", 0)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("n", [1, 3])
def test_leaving_a_stream_aborts_it(server, path, n, caplog):
    body = {**SLOW, "n": n, "ignore_eos": True}
    if path == "/v1/chat/completions":
        del body["prompt"]
        body["messages"] = [{"role": "user", "content": "hi"}]
    body["max_tokens"] = 3900
    before = aborts(server)
    connection, answer = open_stream(server.url, body, path)
    answer.close()
    connection.close()
    # An echo without pauses may be through before it learns of the end.
    until(lambda: server.engine.num_open == 0, "the request goes on")
    until(lambda: server.engine.last_stats["requests_running"] == 0, "it goes on")
    if path == "/v1/completions":
        until(lambda: aborts(server) >= before + n, "the engine was not told")
    assert not caplog.records  # people leave; that is no error


def test_leaving_a_whole_answer_aborts_it(server, caplog):
    before = aborts(server)
    host, port = server.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    connection.request(
        "POST", "/v1/completions", json.dumps(SLOW), {"Content-Type": "application/json"}
    )
    until(lambda: server.engine.num_open == 1, "it did not begin")  # it takes a minute
    connection.close()
    until(lambda: server.engine.num_open == 0, "the request goes on")
    until(lambda: aborts(server) >= before + 1, "the engine was not told")
    assert not caplog.records
    until(lambda: server.engine.last_stats["requests_running"] == 0, "it goes on")


@pytest.mark.slow
def test_a_client_that_stops_reading(serve_fake, caller):
    from shoal.serve.http.limits import HttpLimits

    body = {"model": "bytes", "prompt": "abc", "max_tokens": 3900, "logprobs": 20, "n": 8}
    with serve_fake(
        client={"max_queued": 64}, limits=HttpLimits(write_s=0.5, read_s=0.5)
    ) as server:
        call = caller(server.url)
        host, port = server.url.removeprefix("http://").split(":")
        raw = json.dumps({**body, "stream": True}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(raw)
        )
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            connection.sendall(head + raw)
            until(lambda: aborts(server) > 0, "it was not aborted")
            until(lambda: server.engine.num_open == 0, "something is left")
            assert call("POST", "/v1/completions", SHORT)[0] == 200
        # Half a request is not waited for either.
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le")
            assert connection.recv(100) == b""
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
            connection.sendall(head + raw[:10])
            assert connection.recv(100) == b""


def test_too_many_at_once(serve_fake, caller):
    from shoal.serve.http.limits import HttpLimits

    with serve_fake(limits=HttpLimits(open_requests=4)) as server:
        call = caller(server.url)
        connection, answer = open_stream(server.url, {**SLOW, "n": 3})
        status, error = call.error("POST", "/v1/completions", {**SHORT, "n": 2})
        assert (status, error["code"]) == (429, "overloaded")
        assert error["type"] == "rate_limit_error"
        assert int(call.headers["retry-after"]) >= 1
        assert call("POST", "/v1/completions", SHORT)[0] == 200
        answer.close()
        connection.close()


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        ("fake_engine:build_nothing", "no weights; fetch them"),
        ("fake_engine:build_badly", "RuntimeError: the shelf is empty"),
        ("fake_engine:build_never", "did not load its model within"),
        ("no_such_module:build", "No module named 'no_such_module'"),
    ],
)
@pytest.mark.slow
def test_an_engine_that_does_not_start(serve_fake, factory, words):
    before = forked_children.descendants()
    patience = {"start_s": 3.0} if factory.endswith("never") else {}
    with pytest.raises(ServeError, match=words), serve_fake(factory, client=patience):
        pytest.fail("it started")
    assert forked_children.descendants() <= before


def test_nothing_is_left_behind(serve_fake):
    with serve_fake() as server:
        pid = server.engine.pid
        connection, answer = open_stream(server.url, SLOW)
    assert not psutil.pid_exists(pid)
    assert "the server is stopping" in answer.read().decode()
    answer.close()
    connection.close()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.slow
def test_a_killed_server_leaves_nothing(byte_model, fake_path, replicas):
    import subprocess
    import sys
    import tempfile

    code = (
        "from shoal.ir import ServeJob\n"
        "from shoal.serve.http.server import ServerOptions, running\n"
        "import signal\n"
        f"job = ServeJob(model={str(byte_model)!r}, replicas={replicas})\n"
        "with running(job, ServerOptions(port=0, factory='fake_engine:build')) as server:\n"
        "    print('ready', flush=True)\n"
        "    signal.pause()\n"
    )

    def gone(one):
        return not one.is_running() or one.status() == psutil.STATUS_ZOMBIE

    # A path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="s") as folder:
        environment = {**os.environ, "TMPDIR": folder}
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout.readline() == b"ready\n"
            family = psutil.Process(process.pid).children(recursive=True)
            assert len(family) >= replicas
            process.kill()
            until(lambda: all(map(gone, family)), "an engine lives on")
        until(
            lambda: not any(Path(folder).iterdir()), "something is left in the temporary directory"
        )


def test_the_api_process_has_no_torch(byte_model, fake_path):
    import subprocess
    import sys

    code = (
        "import sys\n"
        "import shoal.serve.http.api, shoal.serve.http.server, shoal.serve.http.connection\n"
        "import shoal.app.commands.serve\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
