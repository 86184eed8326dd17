"""Replicas that a pool of actors starts, as on the machines of a Ray cluster."""

from __future__ import annotations

import json
import os
import signal
import time

import fake_engine
import psutil
import pytest

import forked_children
from shoal.serve.cluster.upstream import Tcp

pytest.importorskip("ray")

pytestmark = [pytest.mark.multi, pytest.mark.slow]

WAIT_S = 60
SLOW = {"model": "bytes", "prompt": [fake_engine.SLOW, 65, 66, 67], "max_tokens": 100}


def until(condition, what):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_replicas_on_ray_are_replaced_and_leave_nothing(serve_fake, caller, openai_of):
    before = forked_children.descendants()
    with serve_fake(replicas=2, launcher="ray") as router:
        replicas = router.backend
        call = caller(router.url)
        status, data = call("POST", "/v1/completions", {**SLOW, "max_tokens": 8})
        assert status == 200
        assert json.loads(data)["choices"][0]["text"] == "abcabc"
        # Each listens for other machines, and answers nobody but its router.
        for replica in replicas.all:
            server = replica._hosted.server
            assert isinstance(server, Tcp)
            stranger = caller(f"http://{server.host}:{server.port}")
            assert stranger.error("GET", "/v1/models")[0] == 401
        stream = openai_of(router.url).completions.create(**SLOW, stream=True)
        text = next(stream).choices[0].text
        busy = next(one for one in replicas.all if one.num_open)
        # A replica is killed: its answer goes on at the other.
        os.kill(busy.pid, signal.SIGKILL)
        text += "".join(piece.choices[0].text for piece in stream)
        assert text == "abc" * 25
        until(lambda: busy.ready and busy.restarts == 1, "the replica did not come back")
        # The actor that started it is killed: the replica ends with it.
        pid = busy.pid
        busy._hosted.kill()
        until(lambda: not psutil.pid_exists(pid), "the replica outlives its actor")
        until(lambda: busy.ready and busy.restarts == 2, "the replica did not come back")
        assert call("POST", "/v1/completions", {**SLOW, "max_tokens": 4})[0] == 200
    until(lambda: forked_children.descendants() <= before, "a process is left behind")
