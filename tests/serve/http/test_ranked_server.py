"""A server whose model is shared by ranks, and what becomes of it when one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import shoal_command

torch = pytest.importorskip("torch")

from shoal.ir import ServeJob  # noqa: E402
from shoal.serve.engine.client import ClientOptions  # noqa: E402
from shoal.serve.engine.process import factory_of  # noqa: E402
from shoal.serve.http.server import ServerOptions, running  # noqa: E402

pytestmark = pytest.mark.multi

WAIT_S = 30


def until(condition, what):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def ranks_of(server):
    """Processes of the ranks, which are the children of the engine's."""
    children = psutil.Process(server.engine.pid).children()
    return [one for one in children if "shoal.parallel.comm.processes" in one.cmdline()]


@pytest.mark.slow
def test_a_killed_rank_fails_all_requests_with_one_error_and_the_server_comes_back(
    model_directory, caller
):
    from shoal.model import huggingface
    from shoal.model.generate import generate

    prompt = [5, 6, 7, 8]
    model = huggingface.read(model_directory).eval()
    expected = generate(model, prompt, 12, eos=())
    job = ServeJob(model=str(model_directory), threads=1, parallel={"tp": 2})
    options = ServerOptions(
        port=0, factory=factory_of(job), client=ClientOptions(backoff_s=0.1, ping_s=0.2)
    )
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    with running(job, options) as server:
        call = caller(server.url)

        def served():
            status, data = call("POST", "/v1/completions", body)
            assert status == 200
            return json.loads(data)["choices"][0]["token_ids"]

        assert served() == expected
        ranks = ranks_of(server)
        assert len(ranks) == 2
        ranks[1].suspend()  # so that the requests below are under way
        with ThreadPoolExecutor(3) as pool:
            pending = [
                pool.submit(caller(server.url).error, "POST", "/v1/completions", body)
                for _ in range(3)
            ]
            until(lambda: server.engine.num_open == 3, "three requests are open")
            began = time.monotonic()
            os.kill(ranks[1].pid, signal.SIGKILL)
            for status, error in (one.result(WAIT_S) for one in pending):
                assert (status, error["code"]) == (503, "engine_unavailable")
                assert "rank 1 of 2" in error["message"]
                assert "killed by SIGKILL" in error["message"]
            assert time.monotonic() - began < 5
        until(lambda: call("GET", "/health")[0] == 200, "the engine did not come back")
        assert served() == expected
        fresh = ranks_of(server)
        assert not {one.pid for one in fresh} & {one.pid for one in ranks}
    until(lambda: not any(one.is_running() for one in fresh), "a rank outlived the server")


@pytest.mark.slow
def test_flags_and_what_they_refuse(model_directory):
    shown = shoal_command.shoal("serve", model_directory, "--tp", "2", "--dry-run")
    assert shown.returncode == 0
    assert "parallel.tp" in shown.stdout
    refused = shoal_command.shoal("serve", model_directory, "--pp", "3", "--port", "0", "-q")
    assert refused.returncode == 2
    assert "parallel.pp = 3: expected at most 2, the layers of model" in refused.stderr
