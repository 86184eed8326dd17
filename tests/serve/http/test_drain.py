"""SIGTERM: those inside end, the others hear that they must go elsewhere, and the status is 0."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import time

import fake_engine
import pytest

pytestmark = pytest.mark.multi

WAIT_S = 30
BODY = {"model": "bytes", "prompt": [fake_engine.SLOW, 65, 66], "max_tokens": 90}
CODE = """
from shoal.ir import ServeJob
from shoal.serve.http.server import ServerOptions, serve
job = ServeJob(model={model!r}, replicas={replicas})
options = ServerOptions(port=0, factory="fake_engine:build", grace_s={grace})
serve(job, options, ready=lambda server: print(server.url, flush=True))
"""


@pytest.fixture
def start(byte_model, fake_path):
    """Grace and replicas -> a server's process and where it listens."""
    started = []

    def make(grace, replicas=1):
        code = CODE.format(model=str(byte_model), replicas=replicas, grace=grace)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(process)
        place = process.stdout.readline().strip().removeprefix("http://")
        return process, place

    yield make
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def post(place, body):
    connection = http.client.HTTPConnection(place, timeout=WAIT_S)
    raw = json.dumps(body)
    connection.request("POST", "/v1/completions", raw, {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def until_closed(place):
    """The first answer to a question for health that is not 200."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        connection = http.client.HTTPConnection(place, timeout=WAIT_S)
        connection.request("GET", "/health")
        answer = connection.getresponse()
        status, data = answer.status, answer.read()
        connection.close()
        if status != 200:
            return status, json.loads(data)["error"]["code"]
        time.sleep(0.005)
    raise AssertionError("it takes requests still")


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_running_requests_end_and_new_ones_get_503(start, replicas):
    process, place = start(30, replicas)
    connection, stream = post(place, {**BODY, "stream": True})
    assert stream.status == 200
    stream.readline()
    process.send_signal(signal.SIGTERM)
    assert until_closed(place) == (503, "draining")
    refused, answer = post(place, BODY)
    assert answer.status == 503
    assert json.loads(answer.read())["error"]["code"] == "draining"
    assert int(answer.getheader("retry-after")) >= 1
    refused.close()
    events = stream.read().split(b"\n\n")
    assert events[-2] == b"data: [DONE]"
    assert b'"finish_reason":"length"' in events[-3]
    connection.close()
    assert process.wait(WAIT_S) == 0


@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True], ids=["in vain", "told twice"])
def test_what_does_not_end_in_time(start, again):
    process, place = start(30 if again else 0.2)
    connection, stream = post(place, {**BODY, "max_tokens": 3000, "stream": True})
    stream.readline()
    process.send_signal(signal.SIGTERM)
    if again:
        until_closed(place)
        process.send_signal(signal.SIGTERM)
    rest = stream.read()
    assert b"the server is stopping" in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    connection.close()
    assert process.wait(WAIT_S) == 0
