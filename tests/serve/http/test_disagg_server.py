"""A server whose prompts and answers are computed apart: forms and vectors as by one engine."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("llguidance")

from shoal.ir import ServeJob
from shoal.serve.engine.process import factory_of
from shoal.serve.http.server import ServerOptions, running

pytestmark = [pytest.mark.multi, pytest.mark.slow]

COMPLETION = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 24, "temperature": 0}
ASKED = [
    ("/v1/completions", {**COMPLETION, "guided_choice": ["the first", "the second"]}),
    ("/v1/completions", {**COMPLETION, "guided_regex": "[0-9]{3}-[a-f]{2,8}", "n": 1}),
    ("/v1/completions", {**COMPLETION, "guided_json": {"enum": ["red", "green"]}}),
    ("/v1/completions", {**COMPLETION, "logprobs": 1, "echo": True, "guided_choice": None}),
    ("/v1/embeddings", {"model": "tiny", "input": [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3]]}),
    ("/v1/embeddings", {"model": "tiny", "input": "abc", "pooling": "last"}),
]


def test_forms_and_vectors(model_directory, caller):
    results = []
    for apart in (None, {"prefill": 1, "decode": 1}):
        job = ServeJob(
            model=str(model_directory), threads=1, kv_tokens=512, max_running=4, disagg=apart
        )
        with running(job, ServerOptions(port=0, name="tiny", factory=factory_of(job))) as server:
            call = caller(server.url)
            notes = [call("POST", path, body) for path, body in ASKED]
            assert {status for status, _ in notes} == {200}
            results.append([json.loads(data) for _, data in notes])
    one, several = results
    for alone, apart in zip(one[:4], several[:4], strict=True):
        assert alone["choices"][0]["text"] == apart["choices"][0]["text"]
        assert alone["usage"] == apart["usage"]
    scores = [answers[3]["choices"][0]["logprobs"]["token_logprobs"] for answers in results]
    assert scores[0][0] is scores[1][0] is None
    assert scores[0][1:] == pytest.approx(scores[1][1:], abs=1e-4)
    for alone, apart in zip(one[4:], several[4:], strict=True):
        for first, second in zip(alone["data"], apart["data"], strict=True):
            assert first["embedding"] == pytest.approx(second["embedding"], abs=1e-4)
