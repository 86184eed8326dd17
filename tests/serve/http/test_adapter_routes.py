"""Adapters over HTTP: listed, chosen by name, loaded and unloaded, and kept over a restart."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("fastapi")

pytestmark = [pytest.mark.multi, pytest.mark.slow]


@pytest.fixture(scope="module")
def adapter(model_directory, tmp_path_factory):
    from shoal.core.parts import table
    from shoal.model import huggingface
    from shoal.train.peft import files

    model = huggingface.read(model_directory, torch.float32)
    handle = table("peft").build({"name": "lora", "r": 4}).inject(model)
    with torch.no_grad():
        for value in handle.trainable().values():
            value.add_(torch.randn(value.shape, generator=torch.Generator().manual_seed(1)))
    place = tmp_path_factory.mktemp("adapter") / "sql"
    files.write(place, handle, base="tiny")
    return place


KEY = "a-key-of-the-tests"


def call(url, path, body=None, key=KEY):
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def asked(url, model, **fields):
    ask = {"model": model, "prompt": "select ", "max_tokens": 12, "temperature": 0}
    status, body = call(url, "/v1/completions", {**ask, "ignore_eos": True, **fields})
    assert status == 200, body
    assert body["model"] == model
    return body["choices"][0]


def said(url, model):
    return asked(url, model)["text"]


def test_an_adapters_life(model_directory, adapter):
    from shoal.ir import ServeJob
    from shoal.serve.engine.client import ClientOptions
    from shoal.serve.http.server import ServerOptions, running

    job = ServeJob(model=str(model_directory), precision="fp32", threads=1, max_adapters=2)
    options = ServerOptions(
        port=0,
        key=KEY,
        adapter_routes=True,
        adapter_root=str(adapter.parent),
        client=ClientOptions(ping_s=0.1, backoff_s=0.1),
    )
    with running(job, options) as server:
        url, name = server.url, server.model
        plain = said(url, name)
        status, body = call(url, "/v1/completions", {"model": "sql", "prompt": "x"})
        assert status == 404 and body["error"]["code"] == "model_not_found"
        wanted = {"lora_name": "sql", "lora_path": str(adapter)}
        assert call(url, "/v1/load_lora_adapter", wanted)[0] == 200
        for wrong in (wanted, {"lora_name": name, "lora_path": str(adapter)}, {"lora_name": 3},
                      {"lora_name": "x", "lora_path": "/nowhere"}):  # fmt: skip
            status, body = call(url, "/v1/load_lora_adapter", wrong)
            assert status == 400 and body["error"]["message"]
        cards = call(url, "/v1/models")[1]["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [(name, None), ("sql", name)]
        assert call(url, "/v1/models/sql")[1]["parent"] == name
        adapted = said(url, "sql")
        assert adapted != plain and said(url, name) == plain
        os.kill(server.engine.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if call(url, "/health")[0] == 200 and server.engine.restarts:
                break
            time.sleep(0.05)
        assert said(url, "sql") == adapted, "the engine that came back has it"
        assert call(url, "/v1/unload_lora_adapter", {"lora_name": "sql"})[0] == 200
        assert call(url, "/v1/unload_lora_adapter", {"lora_name": "sql"})[0] == 400
        assert call(url, "/v1/completions", {"model": "sql", "prompt": "x"})[0] == 404


def test_merged_and_taken_out_again_while_it_answers(model_directory, adapter):
    from shoal.ir import ServeJob
    from shoal.serve.http.server import ServerOptions, running

    job = ServeJob(
        model=str(model_directory), precision="fp32", threads=1, adapters={"sql": str(adapter)}
    )
    merge, unmerge = "/v1/merge_lora_adapter", "/v1/unmerge_lora_adapter"
    sql = {"lora_name": "sql"}
    with running(job, ServerOptions(port=0, key=KEY, adapter_routes=True)) as server:
        url, name = server.url, server.model
        assert call(url, merge, sql, key="another-key")[0] == 401
        assert call(url, merge, {"lora_name": "x"})[0] == 400
        plain = asked(url, name, logprobs=2)
        apart = asked(url, "sql", logprobs=2)
        long = {"max_tokens": 150, "stop": None}
        whole = asked(url, "sql", **long)["text"]
        with ThreadPoolExecutor(1) as pool:
            # One answer goes on while the adapter is merged, taken out, and merged again.
            running_one = pool.submit(asked, url, "sql", **long)
            for route in (merge, unmerge, merge):
                assert call(url, route, sql) == (200, {"status": "ok", **sql})
            assert running_one.result()["text"] == whole
        merged = asked(url, "sql", logprobs=2)
        assert merged["text"] == apart["text"]
        near = pytest.approx(apart["logprobs"]["token_logprobs"], abs=1e-4)
        assert merged["logprobs"]["token_logprobs"] == near
        assert 'shoal:adapter_merged{model_name="' + name + '"} 1.0' in text(url, "/metrics")
        # Whoever asks for something else gets it, from weights that are what they were.
        assert asked(url, name, logprobs=2) == plain
        assert 'shoal:adapter_merged{model_name="' + name + '"} 0.0' in text(url, "/metrics")
        assert call(url, unmerge, sql)[0] == 400
        assert asked(url, "sql", logprobs=2) == apart


def text(url, path):
    request = urllib.request.Request(f"{url}{path}", headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def test_routes_that_change_models_want_a_key():
    from shoal.core.errors import ServeError
    from shoal.serve.http.server import ServerOptions

    with pytest.raises(ServeError, match="a key that callers must send"):
        ServerOptions(adapter_routes=True)


def test_the_routes_are_there_only_if_asked_for(model_directory, adapter):
    from shoal.ir import ServeJob
    from shoal.serve.adapters.routes import ADAPTER_ROUTES
    from shoal.serve.http.server import ServerOptions, running

    job = ServeJob(
        model=str(model_directory), precision="fp32", threads=1, adapters={"sql": str(adapter)}
    )
    with running(job, ServerOptions(port=0)) as server:
        assert said(server.url, "sql") != said(server.url, server.model)
        for path in ADAPTER_ROUTES:
            assert call(server.url, path, {"lora_name": "sql"})[0] == 404
