"""Models that differ from their family's: the engine gives the tokens of plain generation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from thread_ranks import thread_engine  # noqa: E402

from conftest import FAMILY_CONFIGS  # noqa: E402
from shoal.core.errors import ServeError  # noqa: E402
from shoal.core.random import generator  # noqa: E402
from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.generate import generate  # noqa: E402
from shoal.model.parscale import use  # noqa: E402


def changed(family="llama", **architecture):
    return ModelConfig(**{**dict(FAMILY_CONFIGS[family]), "architecture": architecture})


def job(**changes):
    fields = {"model": "tiny", "kv_tokens": 4096, "threads": 1, "max_step_tokens": 48}
    return ServeJob.model_validate({**fields, **changes})


def prompts(count=6):
    """Some longer than a step has room for."""
    made = []
    for number in range(count):
        source = generator(3, purpose="prompts", index=number)
        made.append(source.integers(0, 160, int(source.integers(1, 80))).tolist())
    return made


STREAMS = {"num": 3, "prefix": 5}
OPTIONS = (
    {"streams": STREAMS},
    *({"ffn": {"name": "duo", "router": router}} for router in ("linear", "random", "fixed")),
    *(
        {"residual": one}
        for one in (
            {"name": "ladder"},
            {"name": "ladder", "layers": "upper_half"},
            {"name": "ladder", "layers": (0,)},
            {"name": "desync", "every": 3},
        )
    ),
)


@pytest.mark.parametrize("option", OPTIONS)
def test_an_engine_gives_the_tokens_of_plain_generation(
    option, random_model, engine_for, serve_all
):
    model = random_model(changed(**option))
    want = [generate(random_model(changed(**option)), one, 12) for one in prompts()]
    assert serve_all(engine_for(model, max_step_tokens=48), prompts(), max_tokens=12) == want
    plain = [generate(random_model(), one, 12) for one in prompts()]
    assert plain != want


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("llama", {"residual": "ladder"}),
        ("qwen3", {"residual": "ladder"}),
        ("mixtral", {"residual": "ladder"}),
        ("qwen3", {"residual": {"name": "desync", "every": 3}}),
        ("qwen3", {"streams": STREAMS}),
    ],
)
def test_two_ranks_give_the_tokens_of_one(family, option, random_model, engine_for, serve_all):
    config = changed(family, **option)
    want = serve_all(engine_for(random_model(config)), prompts(), max_tokens=12)
    engine, ranks = thread_engine(job(parallel={"tp": 2}), random_model(config))
    assert serve_all(engine, prompts(), max_tokens=12) == want
    ranks.close()


@pytest.mark.parametrize("bias", [False, True])
def test_branches_that_read_the_same_are_one_sum(bias, random_model, engine_for, serve_all):
    biases = dict.fromkeys(("attention_bias", "output_bias", "ffn_bias"), bias)
    config = ModelConfig(**{**dict(FAMILY_CONFIGS["llama"]), "family": "parallel", **biases})
    want = serve_all(engine_for(random_model(config)), prompts(), max_tokens=12)
    engine, ranks = thread_engine(job(parallel={"tp": 2}), random_model(config))
    assert serve_all(engine, prompts(), max_tokens=12) == want
    ranks.close()


@pytest.mark.parametrize(
    ("option", "parallel"),
    [
        ({"residual": "ladder"}, {"pp": 2}),
        ({"streams": 2}, {"pp": 2}),
        ({"ffn": "duo"}, {"tp": 2}),
        ({"residual": "desync"}, {"tp": 4}),
    ],
)
def test_what_ranks_cannot_share_is_refused(option, parallel, random_model):
    with pytest.raises(ServeError, match=r"parallel\."):
        thread_engine(job(parallel=parallel), random_model(changed(**option)))


def test_streams_in_slots(random_model, engine_for, serve_all):
    config = changed("qwen3", streams=STREAMS)
    want = [generate(random_model(config), one, 9) for one in prompts()]
    engine = engine_for(
        random_model(config), kv={"name": "slots", "max_len": 128}, max_step_tokens=32
    )
    assert serve_all(engine, prompts(), max_tokens=9) == want


@pytest.mark.parametrize("kv", [{"name": "paged"}, {"name": "slots", "max_len": 128}])
def test_requests_of_different_streams_in_one_batch(kv, random_model, engine_for):
    config = changed("qwen3", streams=STREAMS)
    numbers = (1, 2, 3, None, 1, 2)
    want = []
    for number, prompt in zip(numbers, prompts(), strict=True):
        alone = random_model(config)
        use(alone, number or 3)
        want.append(generate(alone, prompt, 9))
    engine = engine_for(random_model(config), kv=kv, max_step_tokens=48)
    # The second time their prompts are in the cache, for each number of streams its own.
    for turn in ("a", "b"):
        for place, (number, prompt) in enumerate(zip(numbers, prompts(), strict=True)):
            params = SamplingParams(max_tokens=9, streams=number)
            engine.add(Request(f"{turn}{place}", [*prompt], len(prompt), params))
        result = {}
        while engine.busy:
            for output in engine.step():
                result.setdefault(output.request_id, []).extend(output.tokens)
        assert [result[f"{turn}{place}"] for place in range(len(numbers))] == want


def test_the_same_prompt_with_other_streams_is_not_found_in_the_cache(random_model, engine_for):
    config = changed(streams=STREAMS)
    engine = engine_for(random_model(config), max_step_tokens=96)
    prompt = prompts(9)[-1] * 3
    results = []
    for place, number in enumerate((3, 2, 1, 2)):
        request = Request(
            f"{place}", [*prompt], len(prompt), SamplingParams(max_tokens=9, streams=number)
        )
        engine.add(request)
        while engine.busy:
            engine.step()
        results.append((request.n_cached > 0, request.tokens[len(prompt) :]))
    assert [cached for cached, _ in results] == [False, False, False, True]
    assert results[1][1] == results[3][1]


def test_more_streams_than_the_model_has_are_refused(random_model, engine_for):
    for option, number, text in ((STREAMS, 4, "1 to 3"), (1, 2, "no parallel streams")):
        engine = engine_for(random_model(changed(streams=option)))
        with pytest.raises(ServeError, match=text):
            engine.add(Request("x", [1, 2], 2, SamplingParams(max_tokens=2, streams=number)))


def test_adapters_do_not_go_with_several_rows_a_token(random_model, engine_for):
    with pytest.raises(ServeError, match="adapters"):
        engine_for(random_model(changed(streams=2)), max_adapters=1)


def test_streams_refuse_a_kernel_that_reads_no_prefix(random_model, engine_for):
    with pytest.raises(ServeError, match="paged_attention"):
        engine_for(random_model(changed(streams=2)), kernel={"paged_attention": "cpp"})
