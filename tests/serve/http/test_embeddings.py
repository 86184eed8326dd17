"""Embeddings."""

from __future__ import annotations

import json
import random

import pytest

torch = pytest.importorskip("torch")

from shoal.ir import Request, SamplingParams  # noqa: E402

pytestmark = pytest.mark.multi


def test_vectors_by_the_client(openai_client, call):
    for form in ({}, {"encoding_format": "float"}):  # the client asks for base64 by itself
        answer = openai_client.embeddings.create(model="bytes", input=["ab", "xyz"], **form)
        assert [one.index for one in answer.data] == [0, 1]
        for one in answer.data:
            assert sum(value**2 for value in one.embedding) == pytest.approx(1, abs=1e-6)
            assert one.embedding[0] > 0 > one.embedding[2]
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == 5
    body = {"model": "bytes", "input": [[1, 2]], "normalize": False, "pooling": "last"}
    status, data = call("POST", "/v1/embeddings", body)
    assert status == 200
    assert json.loads(data)["data"][0]["embedding"] == [3.0, 0.0, -1.0]
    few = openai_client.embeddings.create(model="bytes", input=[[1, 2]], dimensions=2)
    assert few.data[0].embedding == [1.0, 0.0]  # shortened first, then of length 1


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [[1]] * 65}, "input"),
        ({"input": [1] * 4000}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"pooling": "max"}, "pooling"),
        ({"normalize": 1}, "normalize"),
        ({"dimensions": 4}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "3"}, "dimensions"),
    ],
)
def test_bad_embeddings(call, change, param):
    status, error = call.error("POST", "/v1/embeddings", {"model": "bytes", "input": "a", **change})
    assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_an_engine_gives_the_states_of_the_model(random_model, engine_for, pooling):
    model = random_model()
    source = random.Random(3)
    prompts = [[source.randrange(160) for _ in range(size)] for size in (1, 7, 40, 40)]
    prompts[3][:33] = prompts[2][:33]  # and one that starts like another
    # Few tokens a step and few blocks: in parts, and some are computed twice.
    engine = engine_for(model, max_step_tokens=16, kv_tokens=64)
    for number, prompt in enumerate(prompts):
        name = f"r{number}"
        params = SamplingParams(max_tokens=1, pooling=pooling)
        salt = name if pooling == "mean" else ""
        engine.add(Request(name, list(prompt), len(prompt), params, salt=salt))
    engine.add(Request("words", [1, 2], 2, SamplingParams(max_tokens=9)))
    vectors = {}
    while engine.busy:
        engine.step()
        for result in engine.drain_events():
            if result["kind"] == "began":
                continue
            assert result["kind"] == "vector"
            vectors[result["id"]] = torch.tensor(result["values"])
    assert len(vectors) == len(prompts)
    for number, prompt in enumerate(prompts):
        states = model.hidden(torch.tensor([prompt]))[0]
        expected = states.mean(0) if pooling == "mean" else states[-1]
        assert torch.allclose(vectors[f"r{number}"], expected, atol=2e-5, rtol=1e-4)


def test_a_mean_over_cached_tokens_is_refused(random_model, engine_for):
    engine = engine_for(random_model())
    params = SamplingParams(max_tokens=1, pooling="mean")
    for name in ("first", "second"):
        engine.add(Request(name, [1] * 40, 40, params))
        while engine.busy:
            engine.step()
    first, second = (told for told in engine.drain_events() if told["kind"] != "began")
    assert first["kind"] == "vector"
    assert second["kind"] == "refused"
    assert "salt" in second["message"]
