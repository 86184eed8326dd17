"""A server of two instances that lend each other memory, as its users and its keeper see it."""

from __future__ import annotations

import json
from urllib.parse import urlsplit

import pytest

torch = pytest.importorskip("torch")

from shoal.app.status import status  # noqa: E402
from shoal.core.errors import ServeError  # noqa: E402
from shoal.ir import ServeJob  # noqa: E402
from shoal.serve.engine.process import factory_of  # noqa: E402
from shoal.serve.http.server import ServerOptions, running  # noqa: E402

pytestmark = pytest.mark.multi


@pytest.mark.slow
def test_a_prompt_longer_than_an_instance_is_answered_and_loans_are_shown(
    model_directory, caller, capsys
):
    from shoal.model import huggingface
    from shoal.model.generate import generate

    prompt = [1 + number % 250 for number in range(100)]
    expected = generate(huggingface.read(model_directory).eval(), prompt, 12, eos=())
    kv = {"name": "distributed", "instances": 2, "block_size": 8, "watermark": 0.0}
    job = ServeJob.model_validate(
        {"model": str(model_directory), "threads": 1, "kv": kv, "kv_tokens": 64}
    )
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    body |= {"return_token_ids": True, "ignore_eos": True}
    with running(job, ServerOptions(port=0, factory=factory_of(job))) as server:
        call = caller(server.url)
        answered, data = call("POST", "/v1/completions", body)
        assert answered == 200, data
        assert json.loads(data)["choices"][0]["token_ids"] == expected
        refused, data = call("POST", "/v1/completions", {**body, "prompt": prompt + prompt[:40]})
        assert refused == 400
        assert b"blocks are missing" in data
        port = urlsplit(server.url).port
        assert port is not None
        status("127.0.0.1", port, None)
        shown = capsys.readouterr().out
        assert "loans" in shown
        assert "cache blocks" in shown
    with pytest.raises(ServeError, match="no server at"):
        status("127.0.0.1", port, None)
