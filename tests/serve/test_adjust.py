"""Penalties, bias and bans of a batch are those of the reference, one row at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from shoal.core.errors import ServeError  # noqa: E402
from shoal.ir import Request, SamplingParams  # noqa: E402
from shoal.model.generate import adjust, sample  # noqa: E402
from shoal.serve.engine import adjust as module  # noqa: E402
from shoal.serve.engine.adjust import Adjuster  # noqa: E402
from shoal.serve.engine.sampler import choose  # noqa: E402

VOCAB = 40
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(50),
    temperature=st.sampled_from([0.0, 0.8]),
    seed=st.integers(0, 2**40),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -1.5]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.2]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    min_tokens=st.sampled_from([0, 3]),
    stop_ids=st.sampled_from([frozenset(), frozenset({0, 7})]),
)


def reference(logits_V, request):
    one = request.params
    return adjust(
        logits_V,
        request.tokens[: request.n_prompt],
        request.tokens[request.n_prompt :],
        repetition_penalty=one.repetition_penalty,
        frequency_penalty=one.frequency_penalty,
        presence_penalty=one.presence_penalty,
        logit_bias=one.logit_bias,
        banned=one.stop_ids if request.n_generated < one.min_tokens else (),
    )


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(TOKENS, PARAMS), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_a_batch_is_its_rows(rows, seed):
    source = torch.Generator().manual_seed(seed)
    adjuster = Adjuster()
    requests = [
        Request(f"r{number}", list(tokens), len(tokens), params)
        for number, (tokens, params) in enumerate(rows)
    ]
    for _ in range(6):
        logits = torch.randn(len(rows), VOCAB, generator=source) * 3
        before = logits.clone()
        scores, _ = adjuster(logits, requests)
        expected = torch.stack(
            [reference(row, one) for row, one in zip(logits, requests, strict=True)]
        )
        assert torch.equal(scores, expected)
        assert torch.equal(logits, before)  # log probabilities are those of the model
        tokens, _, _ = choose(logits, requests, scores)
        for row, request, token in zip(expected, requests, tokens, strict=True):
            one = request.params
            uniform = module_uniform(request)
            assert token == sample(
                row, temperature=one.temperature, min_p=one.min_p, uniform=uniform
            )
            request.tokens.append(token)


def module_uniform(request):
    from shoal.core.random import generator

    return float(
        generator(request.params.seed, purpose="generate", step=request.n_generated).random()
    )


def test_rows_that_want_nothing_cost_nothing():
    logits = torch.randn(2, VOCAB)
    plain = [Request(str(row), [1], 1, SamplingParams(max_tokens=9)) for row in range(2)]
    assert Adjuster()(logits, plain)[0] is logits


def test_what_was_forgotten_is_counted_again(monkeypatch):
    monkeypatch.setattr(module, "_REMEMBERED", 0)
    params = SamplingParams(max_tokens=9, frequency_penalty=0.5, repetition_penalty=1.2)
    requests = [Request(f"r{row}", [1, 2, row], 3, params) for row in range(3)]
    adjuster = Adjuster()
    for step in range(5):
        logits = torch.randn(1, VOCAB)
        request = requests[step % 2]
        assert torch.equal(adjuster(logits, [request])[0][0], reference(logits[0], request))
        for one in requests:
            one.tokens += [step, 2]
    # Another request of the same name is another request.
    again = Request("r0", [5, 6], 2, params)
    logits = torch.randn(1, VOCAB)
    assert torch.equal(adjuster(logits, [again])[0][0], reference(logits[0], again))


def test_banned_tokens_are_never_drawn():
    logits = torch.full((1, 5), -1e4)
    logits[0, 3] = 50.0
    params = SamplingParams(max_tokens=9, temperature=1.0, stop_ids=frozenset({3, 4}), min_tokens=9)
    request = Request("r", [1], 1, params)
    scores, _ = Adjuster()(logits, [request])
    for uniform in (0.0, 0.5, 1 - 2**-53):
        assert sample(scores[0], temperature=1.0, uniform=uniform) in (0, 1, 2)
    for seed in range(20):
        drawn = Request("r", [1], 1, SamplingParams(max_tokens=9, temperature=1.0, seed=seed))
        assert choose(logits, [drawn], scores)[0][0] in (0, 1, 2)


def test_an_engine_keeps_to_them(random_model, engine_for, serve_all):
    model = random_model()
    prompt = [3, 5, 8, 13]
    (free,) = serve_all(engine_for(model), [prompt], max_tokens=24)
    options = {"max_tokens": 24, "repetition_penalty": 1.4, "presence_penalty": 0.3}
    tokens = list(prompt)
    for _ in range(24):
        with torch.no_grad():
            hidden = model.hidden(torch.tensor([tokens]))[0, -1]
        scores = adjust(
            hidden @ model.output_weight.T,
            prompt,
            tokens[4:],
            repetition_penalty=1.4,
            presence_penalty=0.3,
        )
        tokens.append(sample(scores))
    (result,) = serve_all(engine_for(model), [prompt], **options)
    assert result == tokens[4:] != free
    # In company of requests that want nothing of it, or something else.
    others = [SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, logit_bias=((9, 50.0),))]
    beside = serve_all(engine_for(model), [prompt] * 3, [SamplingParams(**options), *others])
    assert beside == [result, free, [9] * 24]


def test_stop_and_biased_tokens_are_of_the_model(random_model, engine_for):
    engine = engine_for(random_model())
    for bad in ({"stop_ids": frozenset({160})}, {"logit_bias": ((160, 1.0),)}):
        with pytest.raises(ServeError, match="below vocab_size"):
            engine.add(Request("r", [1], 1, SamplingParams(max_tokens=2, **bad)))
