"""Concurrent workers over HTTP: choices of one answer, tagged by their workers, and their views."""

from __future__ import annotations

import json
import threading

import pytest

pytest.importorskip("torch")

from shoal.ir import ServeJob
from shoal.serve.engine.process import factory_of
from shoal.serve.http.server import ServerOptions, running

pytestmark = pytest.mark.multi


def events(data):
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.slow
def test_workers_of_a_chat(write_model, caller):
    decode = {"name": "hogwild", "workers": 3, "rules": "Together:", "early_answer": ""}
    job = ServeJob.model_validate({"model": str(write_model(1024)), "threads": 1, "decode": decode})
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 20,
        "temperature": 1.0,
        "seed": 4,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with running(job, ServerOptions(port=0, factory=factory_of(job))) as server:
        call = caller(server.url)

        def ask(**more):
            status, data = call("POST", "/v1/chat/completions", {**body, **more})
            assert status == 200, data
            return data

        answer = json.loads(ask(workers=2))
        choices = answer["choices"]
        assert [one["worker"] for one in choices] == [one["index"] for one in choices] == [0, 1]
        tokens = [one["token_ids"] for one in choices]
        assert all(len(one) == 20 for one in tokens) and tokens[0] != tokens[1]
        assert answer["usage"]["completion_tokens"] == 40

        streamed = {0: [], 1: []}
        for event in events(ask(workers=2, stream=True)):
            for choice in event["choices"]:
                if "worker" in choice:
                    streamed[choice["worker"]] += choice["token_ids"]
        assert list(streamed.values()) == tokens

        assert len(json.loads(ask())["choices"]) == 3  # those of the job
        alone = json.loads(ask(workers=1))["choices"]
        assert len(alone) == 1 and "worker" not in alone[0]
        _, data = call(
            "POST", "/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 3}
        )
        assert len(json.loads(data)["choices"]) == 1

        for bad, param in (
            ({"workers": 4}, "workers"),
            ({"workers": 2, "n": 2}, "workers"),
            ({"workers": 2, "response_format": {"type": "json_object"}}, "response_format"),
            ({"workers": 3, "max_tokens": 400}, "messages"),
        ):
            status, error = call.error("POST", "/v1/chat/completions", {**body, **bad})
            assert (status, error["param"]) == (400, param), error
    plain = ServeJob(model=job.model, threads=1)
    with running(plain, ServerOptions(port=0)) as server:
        call = caller(server.url)
        status, error = call.error("POST", "/v1/chat/completions", {**body, "workers": 2})
        assert (status, error["param"]) == (400, "workers")


@pytest.mark.slow
def test_views_of_workers(write_model, caller):
    from shoal.app.dash.workers import inspect, read
    from shoal.serve.watch.upstream import Upstream

    decode = {"name": "hogwild", "workers": 2, "rules": "Together:", "early_answer": ""}
    job = ServeJob.model_validate({"model": str(write_model(1024)), "threads": 1, "decode": decode})
    with running(job, ServerOptions(port=0, factory=factory_of(job))) as server:
        call = caller(server.url)

        def views():
            status, data = call("GET", "/v1/workers")
            assert status == 200
            return json.loads(data)["data"]

        assert views() == []
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": True,
        }
        asking = threading.Thread(target=call, args=("POST", "/v1/chat/completions", body))
        asking.start()
        results = []
        while [len(session["workers"]) for session in results] != [2]:
            assert asking.is_alive()
            results = views()
        upstream = Upstream(server.url)
        result = inspect(upstream)
        asking.join()
        assert views() == []
        (session,) = results
        for worker in session["workers"]:
            kinds = [block["what"] for block in worker["blocks"]]
            assert kinds[0] == "prompt" and set(kinds) <= {"prompt", "header", "work", "step"}
            # One behind the other, up to the length of the view.
            ends = [block["offset"] + block["length"] for block in worker["blocks"]]
            assert [0, *ends[:-1]] == [block["offset"] for block in worker["blocks"]]
            assert ends[-1] == worker["length"]
            assert worker["blocks"][0]["shared"] and worker["blocks"][0]["owner"] is None
        assert [w["name"] for w in session["workers"]] == ["Alice", "Bob"]
        assert not result["error"] and read(upstream.workers()) == ()
