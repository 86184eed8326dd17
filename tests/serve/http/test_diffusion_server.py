"""A model of masked diffusion behind the HTTP API: the tokens of an engine in this process."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import pytest

pytest.importorskip("torch")

from shoal.core.errors import ServeError
from shoal.ir import Request, SamplingParams, ServeJob
from shoal.serve.http.server import ServerOptions, running

DECODE = {
    "name": "diffusion",
    "unmask": {"name": "credit", "tau": 0.6},
    "refresh": {"name": "vicinity", "a": 16, "b": 16},
    "block": 8,
}
PROMPTS = [[(7 * place + first) % 200 + 1 for place in range(9 + first)] for first in range(4)]


@pytest.fixture(scope="module")
def mdlm_directory(tmp_path_factory):
    from shoal.corpora.tokenizer import train
    from shoal.model import huggingface
    from shoal.model.config import ModelConfig
    from shoal.model.initialise import init_weights
    from shoal.model.transformer import Transformer

    directory = tmp_path_factory.mktemp("served") / "tiny"
    config = ModelConfig(
        family="mdlm", vocab_size=258, hidden=32, num_layers=2, num_heads=2, num_kv_heads=2,
        head_dim=16, ffn_hidden=64, initializer_range=0.2, eos_token_id=0, mask_token_id=257,
        max_position=128, qk_norm=True,
    )  # fmt: skip
    model = Transformer(config)
    init_weights(model, seed=3)
    huggingface.write(directory, model)
    train([""], 257).save(str(directory / "tokenizer.json"))
    return directory


def job_of(directory, **fields):
    return ServeJob.model_validate(
        {"model": str(directory), "threads": 1, "kv_tokens": 1024, "decode": DECODE, **fields}
    )


def decoded(directory):
    from shoal.serve.engine.build import build_engine

    engine, _ = build_engine(job_of(directory))
    requests = [
        Request(str(number), list(prompt), len(prompt), SamplingParams(max_tokens=20))
        for number, prompt in enumerate(PROMPTS)
    ]
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    return [request.tokens[request.n_prompt :] for request in requests]


@pytest.mark.slow
def test_answers_are_those_of_the_engine(mdlm_directory, caller):
    wanted = decoded(mdlm_directory)
    body = {"model": "tiny", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    with running(job_of(mdlm_directory), ServerOptions(port=0)) as server:
        call = caller(server.url)

        def ask(prompt):
            status, data = caller(server.url)("POST", "/v1/completions", {**body, "prompt": prompt})
            assert status == 200, data
            return json.loads(data)["choices"][0]["token_ids"]

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(ask, PROMPTS)) == wanted

        status, data = call(
            "POST", "/v1/completions", {**body, "prompt": PROMPTS[0], "stream": True}
        )
        assert status == 200
        events = [
            json.loads(line.removeprefix("data: "))
            for line in data.decode().splitlines()
            if line.startswith("data: {")
        ]
        sizes = [len(event["choices"][0].get("token_ids", ())) for event in events]
        # A block at a time; blocks that waited for their reader go together.
        assert set(accumulate(sizes)) - {0} <= {8, 16, 20} and sum(sizes) == 20

        chat = {"model": "tiny", "max_tokens": 8, "temperature": 0.7, "seed": 3}
        chat["messages"] = [{"role": "user", "content": "sort 3 1 2"}]
        status, data = call("POST", "/v1/chat/completions", chat)
        assert status == 200, data
        again = call("POST", "/v1/chat/completions", chat)
        assert json.loads(again[1])["choices"] == json.loads(data)["choices"]

        for extra, message in (
            ({"prompt": [5, 257]}, "mask token"),
            ({"prompt": [5], "logprobs": 2}, "decoded by diffusion"),
            ({"prompt": [5], "top_p": 0.5}, "top_p = 0.5"),
        ):
            status, error = call.error("POST", "/v1/completions", {**body, **extra})
            assert status == 400
            assert message in error["message"]

        _, data = call("GET", "/metrics")
        result = {
            line.split("{")[0].removeprefix("shoal:"): float(line.split()[-1])
            for line in data.decode().splitlines()
            if line.startswith("shoal:diffusion")
        }
        assert result["diffusion_unmasked_tokens_total"] >= 5 * 20
        assert result["diffusion_forwards_total"] <= result["diffusion_request_forwards_total"]


@pytest.mark.slow
def test_a_server_refuses_the_other_kind(mdlm_directory, model_directory):
    job = ServeJob(model=str(mdlm_directory), threads=1, kv_tokens=512)
    with (
        pytest.raises(ServeError, match="expected diffusion for tiny"),
        running(job, ServerOptions(port=0)),
    ):
        pass
    with (
        pytest.raises(ServeError, match="expected autoregressive for tiny"),
        running(job_of(model_directory), ServerOptions(port=0)),
    ):
        pass
