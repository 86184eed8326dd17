"""A batch of rows chooses what one row at a time would choose."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ServeError  # noqa: E402
from shoal.ir import Request, SamplingParams  # noqa: E402
from shoal.model.generate import sample  # noqa: E402
from shoal.serve.engine.loop import check_params  # noqa: E402
from shoal.serve.engine.sampler import choose, sample_rows  # noqa: E402


@pytest.mark.parametrize("vocab_size", [1, 40, 1000])
@pytest.mark.parametrize("spread", [0.05, 1.0, 8.0])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_the_reference(vocab_size, spread, ties):
    source = random.Random(vocab_size)
    torch.manual_seed(vocab_size)
    rows = 60
    logits = torch.randn(rows, vocab_size) * spread
    if ties:
        logits = (logits * 2).round() / 2
    params = [
        SamplingParams(
            max_tokens=1,
            temperature=source.choice([0.3, 1.0, 2.5]),
            top_k=source.choice([0, 1, 5, 300, 5000]),
            top_p=source.choice([1.0, 0.999, 0.9, 0.3, 1e-6]),
            min_p=source.choice([0.0, 0.0, 1e-5, 0.1, 1.0]),
        )
        for _ in range(rows)
    ]
    uniforms = [source.choice([0.0, source.random(), 1 - 2**-53]) for _ in range(rows)]
    values = sample_rows(logits, params, uniforms).tolist()
    expected = [
        sample(
            row, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, min_p=p.min_p, uniform=u
        )
        for row, p, u in zip(logits, params, uniforms, strict=True)
    ]
    assert values == expected


def test_shares_follow_the_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -50.0]]).repeat(4000, 1)
    requests = [
        Request(str(row), [0], 1, SamplingParams(max_tokens=1, temperature=1.0, seed=row))
        for row in range(len(logits))
    ]
    tokens, _, _ = choose(logits, requests)
    shares = torch.bincount(torch.tensor(tokens), minlength=4) / len(tokens)
    assert (shares - torch.softmax(logits[0], 0)).abs().max() < 0.03


def test_greedy_beside_sampled_and_log_probabilities():
    torch.manual_seed(2)
    logits = torch.randn(4, 50)
    kinds = [
        SamplingParams(max_tokens=1, logprobs=3),
        SamplingParams(max_tokens=1, temperature=0.9, seed=5),
        SamplingParams(max_tokens=1, logprobs=0),
        SamplingParams(max_tokens=1, temperature=3.0, seed=1, logprobs=20),
    ]
    requests = [Request(f"r{row}", [1, 2], 2, kind) for row, kind in enumerate(kinds)]
    tokens, infos, _ = choose(logits, requests)
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[2] == int(logits[2].argmax())
    assert set(infos) == {"r0", "r2", "r3"}
    expected = torch.log_softmax(logits.double(), -1)
    for row, count in ((0, 3), (2, 0), (3, 20)):
        (info,) = infos[f"r{row}"]
        assert info.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-5)
        best = expected[row].topk(count)
        assert [token for token, _ in info.top] == best.indices.tolist()
        assert [value for _, value in info.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    # The row of a request decides, not the rows beside it.
    alone, _, _ = choose(logits[3:], requests[3:])
    assert alone[0] == tokens[3]


@pytest.mark.parametrize(
    ("bad", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"logprobs": 21}, "logprobs"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": -11.0}, "frequency_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"logit_bias": ((3, float("inf")),)}, "logit_bias"),
        ({"min_tokens": 2}, "min_tokens"),
    ],
)
def test_parameters_out_of_range(bad, name):
    with pytest.raises(ServeError, match=name):
        check_params(SamplingParams(**{"max_tokens": 1, **bad}))
