"""Log probabilities of prompts: ``echo`` with ``logprobs``, in the shapes that evaluators send."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.multi


def test_an_echoed_prompt_has_log_probabilities(openai_client):
    answer = openai_client.completions.create(
        model="bytes", prompt="é!b", max_tokens=2, logprobs=1, echo=True
    )
    choice = answer.choices[0]
    assert choice.text == "é!bé"
    result = choice.logprobs
    assert result.tokens == ["bytes:\\xc3", "bytes:\\xa9", "!", "b", "bytes:\\xc3", "bytes:\\xa9"]
    assert result.token_logprobs == [None, -0.25, -0.5, -0.75, -0.5, -0.5]
    assert result.text_offset == [0, 0, 1, 2, 3, 3]
    assert result.top_logprobs[0] is None
    assert result.top_logprobs[3] == {"<|endoftext|>": -1.0, "b": -0.75}
    assert answer.usage.completion_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_alone(openai_client, stream):
    asked = {"model": "bytes", "prompt": ["ab", "xyz"], "max_tokens": 0, "echo": True}
    answer = openai_client.completions.create(**asked, logprobs=0, n=2, stream=stream)
    texts, scores, ends = [""] * 4, [[] for _ in range(4)], [None] * 4
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
            scores[choice.index] += choice.logprobs.token_logprobs
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == ["ab", "ab", "xyz", "xyz"]
    assert scores == [[None, -0.25]] * 2 + [[None, -0.25, -0.5]] * 2
    assert ends == ["length"] * 4
    if not stream:
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 0)
    plain = openai_client.completions.create(**asked)
    assert [choice.text for choice in plain.choices] == ["ab", "xyz"]
    assert plain.choices[0].logprobs is None


def test_the_token_that_ends_the_text_is_counted_behind_an_echo(openai_client):
    """Evaluators leave out the last entry: it must be that of the new token, whatever it is."""
    answer = openai_client.completions.create(
        model="bytes", prompt=[0, 5], max_tokens=1, logprobs=1, echo=True
    )
    assert answer.choices[0].finish_reason == "stop"
    assert len(answer.choices[0].logprobs.token_logprobs) == 3


def test_what_is_too_much_is_refused(call):
    body = {"model": "bytes", "prompt": [[1] * 3900] * 16, "max_tokens": 1, "echo": True}
    status, error = call.error("POST", "/v1/completions", {**body, "logprobs": 20})
    assert (status, error["param"]) == (400, "logprobs")
