"""Log probabilities of prompts, by engines: those of the model in one pass."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from thread_ranks import thread_engine  # noqa: E402

from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402


def prompts():
    source = random.Random(5)
    made = [[source.randrange(160) for _ in range(size)] for size in (1, 2, 7, 40, 40)]
    made[4][:33] = made[3][:33]  # one that starts like another
    return made


def served(engine, requests):
    """Id -> place -> log probabilities; the messages of each token agree."""
    for request in requests:
        engine.add(request)
    result = {request.id: {} for request in requests}
    while engine.busy:
        engine.step()
        for told in engine.drain_events():
            if told["kind"] == "began":
                continue
            assert told["kind"] == "prompt_logprobs", told
            for place, info in enumerate(told["infos"], told["first"]):
                known = result[told["id"]].setdefault(place, info)
                assert known[0] == pytest.approx(info[0], abs=1e-4)
    return result


def check(model, requests, result, best):
    for request in requests:
        prompt = request.tokens[: request.n_prompt]
        logs = model.logits(model.hidden(torch.tensor([prompt]))[0]).float().log_softmax(-1)
        places = result[request.id]
        assert sorted(places) == list(range(1, len(prompt)))
        for place, (logprob, top) in places.items():
            row = logs[place - 1]
            assert logprob == pytest.approx(float(row[prompt[place]]), abs=1e-4)
            assert [value for _, value in top] == pytest.approx(
                row.topk(best).values.tolist(), abs=1e-4
            )


@pytest.mark.parametrize(
    "fields",
    [
        {},
        # Few tokens a step and few blocks: in parts, and some are computed twice.
        {"max_step_tokens": 16, "kv_tokens": 64},
        {"speculative": {"name": "ngram"}},
    ],
    ids=["plain", "parts", "guesses"],
)
def test_they_are_those_of_one_pass(random_model, engine_for, fields):
    model = random_model()
    engine = engine_for(model, **fields)
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=0)
    requests = [
        Request(f"r{number}", list(prompt), len(prompt), params, salt=f"r{number}")
        for number, prompt in enumerate(prompts())
    ]
    engine.add(Request("words", [1, 2, 1, 2, 1, 2], 6, SamplingParams(max_tokens=9)))
    result = served(engine, requests)
    check(model, requests, result, 2)
    assert all(request.n_generated == 3 for request in requests)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_report_the_same(random_model, tp, pp):
    model = random_model()
    fields = {"model": "tiny", "kv_tokens": 4096, "threads": 1, "max_step_tokens": 24}
    job = ServeJob.model_validate({**fields, "parallel": {"tp": tp, "pp": pp}})
    engine, ranks = thread_engine(job, model)
    params = SamplingParams(max_tokens=2, prompt_logprobs=2)
    requests = [
        Request(f"r{number}", list(prompt), len(prompt), params, salt=f"r{number}")
        for number, prompt in enumerate(prompts())
    ]
    try:
        result = served(engine, requests)
    finally:
        ranks.close()
    check(model, requests, result, 2)


def test_beside_vectors_each_gets_its_own_rows(random_model, engine_for):
    model = random_model()
    engine = engine_for(model)
    prompt = prompts()[3]
    engine.add(Request("vector", list(prompt), 40, SamplingParams(max_tokens=1, pooling="mean")))
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = Request("scored", list(prompt), 40, asked, salt="scored")
    engine.add(scored)
    told = {}
    while engine.busy:
        engine.step()
        told |= {one["kind"]: one for one in engine.drain_events()}
    states = model.hidden(torch.tensor([prompt]))[0]
    assert torch.allclose(torch.tensor(told["vector"]["values"]), states.mean(0), atol=2e-5)
    check(model, [scored], {"scored": dict(enumerate(told["prompt_logprobs"]["infos"], 1))}, 0)


def test_scores_that_are_not_finite_end_the_request(random_model, engine_for):
    model = random_model("qwen3")
    engine = engine_for(model)
    with torch.no_grad():
        model.embed.weight[7] = float("nan")
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    engine.add(Request("bad", [1, 7, 2], 3, asked, salt="bad"))
    engine.add(Request("good", [1, 2], 2, SamplingParams(max_tokens=2)))
    kinds = {}
    while engine.busy:
        engine.step()
        kinds |= {(one["kind"], one.get("id")): one for one in engine.drain_events()}
    assert ("error", "bad") in kinds
    assert not {("error", "good"), ("prompt_logprobs", "bad")} & kinds.keys()
