"""Adapters over HTTP: listed, chosen by name, loaded and unloaded, and kept over a restart."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request

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


def call(url, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def said(url, model):
    status, body = call(
        url,
        "/v1/completions",
        {
            "model": model,
            "prompt": "select ",
            "max_tokens": 12,
            "ignore_eos": True,
            "temperature": 0,
        },
    )
    assert status == 200, body
    assert body["model"] == model
    return body["choices"][0]["text"]


def test_an_adapters_life(model_directory, adapter):
    from shoal.ir import ServeJob
    from shoal.serve.client import ClientOptions
    from shoal.serve.server import ServerOptions, running

    job = ServeJob(model=str(model_directory), precision="fp32", threads=1, max_adapters=2)
    options = ServerOptions(
        port=0, adapter_routes=True, client=ClientOptions(ping_s=0.1, backoff_s=0.1)
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


def test_the_routes_are_there_only_if_asked_for(model_directory, adapter):
    from shoal.ir import ServeJob
    from shoal.serve.server import ServerOptions, running

    job = ServeJob(
        model=str(model_directory), precision="fp32", threads=1, adapters={"sql": str(adapter)}
    )
    with running(job, ServerOptions(port=0)) as server:
        assert said(server.url, "sql") != said(server.url, server.model)
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            assert call(server.url, path, {"lora_name": "sql"})[0] == 404
