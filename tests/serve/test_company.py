"""Two hundred mixed requests: each gets what it gets alone, however the others are served."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.random import generator  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.serve.engine.build import engine_of, prepare  # noqa: E402

MIXED = [
    {},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.3},
    {"temperature": 0.7, "min_p": 0.05, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"repetition_penalty": 1.2, "min_tokens": 5, "stop_ids": frozenset({3, 5, 8})},
    {"temperature": 1.0, "logit_bias": ((7, 3.0), (9, -4.0)), "stop_ids": frozenset({7})},
]


def requests(count):
    """Prompts of 1 to 120 tokens, some of which begin alike, and ways to sample by turns."""
    stems = [generator(1, purpose="stems", index=n).integers(0, 160, 90) for n in range(5)]
    made = []
    for number in range(count):
        draw = generator(1, purpose="company", index=number)
        own = draw.integers(0, 160, draw.integers(1, 31)).tolist()
        stem = stems[draw.integers(5)][: draw.integers(90)].tolist() if number % 3 else []
        params = SamplingParams(
            **{"max_tokens": int(draw.integers(5, 17)), "seed": number, "logprobs": 1}
            | MIXED[number % len(MIXED)]
        )
        made.append(Request(f"r{number}", [*stem, *own], len(stem) + len(own), params))
    return made


def served(engine, asked):
    """Of each request its tokens, and with each its log probability and the best one's."""
    result = {request.id: [] for request in asked}
    for request in asked:
        engine.add(request)
    while engine.busy:
        for output in engine.step():
            result[output.request_id] += zip(output.tokens, output.infos, strict=True)
    return list(result.values())


def engine(model, **fields):
    job = ServeJob.model_validate({"model": "tiny", "threads": 1, "kv_tokens": 16384, **fields})
    return engine_of(job, prepare(job, model))[0]


WHOLE = {"scheduler": {"name": "fcfs", "chunked": False}, "max_step_tokens": 512}
TIGHT = {"kv_tokens": 240, "kv": {"name": "paged", "block_size": 4}}
# Name -> fields of the job, and how somebody is preempted.
COMPANY = {
    "chunked": ({"max_step_tokens": 64}, None),
    "whole": (WHOLE, None),
    "swapped": ({**TIGHT, "preempt": "swap", "max_step_tokens": 100}, "swap"),
    "recomputed-whole": ({**TIGHT, **WHOLE}, "recompute"),
}


def in_company(random_model, family, count, names, **fields):
    alone = engine(random_model(family), max_running=1, **fields, kv={
        "name": "paged", "prefix_reuse": False
    })  # fmt: skip
    want = served(alone, requests(count))
    assert alone.stats()["prefix_hit_tokens"] == alone.stats()["preemptions_total"] == 0
    for name in names:
        changes, preempt = COMPANY[name]
        together = engine(random_model(family), **{**fields, **changes})
        hits = 0
        for warm in (False, True):
            result = served(together, requests(count))
            if fields.get("exact"):
                assert result == want, (name, warm)
            else:
                for one, other in zip(result, want, strict=True):
                    assert [token for token, _ in one] == [token for token, _ in other]
            stats = together.stats()
            assert stats["blocks_used"] == 0
            assert (stats["preemptions_total"] > 9) == bool(preempt)
            assert (stats.get("swap_in_blocks_total", 0) > 9) == (preempt == "swap")
            new, hits = stats["prefix_hit_tokens"] - hits, stats["prefix_hit_tokens"]
            # Whoever comes to a cache that holds all of them finds nearly all of its prompt.
            prompts = sum(request.n_prompt for request in requests(count))
            assert new > (0.6 if warm and not preempt else 0.1) * prompts, (name, warm)


def test_twenty_requests_get_the_same_bits(random_model):
    in_company(random_model, "qwen3", 20, ["chunked"], exact=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "exact"),
    [("llama", False), ("llama", True), ("qwen2", True), ("qwen3", True), ("mixtral", True)],
)
def test_two_hundred_requests_get_what_they_get_alone(family, exact, random_model, record_property):
    in_company(random_model, family, 200, COMPANY, exact=exact)
    text = f"200 requests, cold and warm, {len(COMPANY)} ways to schedule: equal"
    record_property("figure", text)
