"""A server over a fake engine, on a real port."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("fastapi")

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]


@pytest.fixture(scope="session")
def fake_path():
    """Engine processes find ``fake_engine``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        yield HERE


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory, fake_path):
    """A model directory whose tokenizer has one token a byte; 0 ends a text."""
    from shoal.corpora.tokenizer import train

    directory = tmp_path_factory.mktemp("models") / "bytes"
    directory.mkdir()
    train([""], 257).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="session")
def write_model(tmp_path_factory):
    """Positions -> directory of a tiny real model with a tokenizer."""
    pytest.importorskip("torch")
    from shoal.corpora.tokenizer import train
    from shoal.model import huggingface
    from shoal.model.config import ModelConfig
    from shoal.model.initialise import init_weights
    from shoal.model.transformer import Transformer

    def write(max_position):
        directory = tmp_path_factory.mktemp("served") / "tiny"
        model = Transformer(ModelConfig(**fields, max_position=max_position))
        init_weights(model, seed=3)
        huggingface.write(directory, model)
        train([""], 257).save(str(directory / "tokenizer.json"))
        return directory

    fields = {
        "vocab_size": 257,
        "hidden": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "ffn_hidden": 64,
        "initializer_range": 0.2,
        "eos_token_id": 0,
    }
    return write


@pytest.fixture(scope="session")
def model_directory(write_model):
    return write_model(256)


@pytest.fixture(scope="session")
def serve_fake(byte_model):
    """Options of a server -> a context with the running server."""
    from shoal.ir import ServeJob
    from shoal.serve.engine.client import ClientOptions
    from shoal.serve.http.server import ServerOptions, running

    def make(factory="fake_engine:build", client=None, replicas=1, launcher="local", **options):
        client = ClientOptions(**{"ping_s": 0.1, "backoff_s": 0.1, **(client or {})})
        job = ServeJob(model=str(byte_model), replicas=replicas, launcher=launcher)
        options = {"port": 0, "grace_s": 0.5, **options}
        return running(job, ServerOptions(factory=factory, client=client, **options))

    return make


@pytest.fixture(scope="module")
def server(serve_fake):
    with serve_fake() as running:
        yield running


class Caller:
    """Requests as they are, for what no client library would send."""

    def __init__(self, url):
        self.address = urlsplit(url)

    def __call__(self, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection(
            self.address.hostname, self.address.port, timeout=30
        )
        try:
            raw = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
            headers = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, raw, headers)
            answer = connection.getresponse()
            data = answer.read()
            self.headers = dict(answer.getheaders())
            return answer.status, data
        finally:
            connection.close()

    def error(self, *arguments, **options):
        """(status, error object); the body must have the one shape."""
        status, data = self(*arguments, **options)
        body = json.loads(data)
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert isinstance(body["error"]["message"], str)
        assert body["error"]["message"]
        assert "Traceback" not in body["error"]["message"]
        return status, body["error"]


@pytest.fixture
def call(server):
    return Caller(server.url)


@pytest.fixture
def caller():
    return Caller


@pytest.fixture
def openai_of():
    """Address of a server -> the client of OpenAI for it."""
    from openai import OpenAI

    with contextlib.ExitStack() as stack:

        def make(url):
            client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
            return stack.enter_context(client)

        yield make


@pytest.fixture
def openai_client(server, openai_of):
    return openai_of(server.url)
