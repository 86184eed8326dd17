"""Fields that nothing knows: the answer is that without them, and says so."""

from __future__ import annotations

import json

import pytest

from shoal.serve.http.unknown import WARNING

pytestmark = pytest.mark.multi

COMPLETION = {"model": "bytes", "prompt": "ab", "max_tokens": 2}
CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def warning(call, path, body, expect=200):
    status, data = call("POST", path, body)
    assert status == expect, data
    return call.headers.get(WARNING), json.loads(data) if data.startswith(b"{") else data


@pytest.mark.parametrize("stream", [False, True])
def test_a_misspelled_field_is_named(call, stream, caplog):
    body = {**CHAT, "tempratur": 0.1, "stream": stream}
    for _ in range(2):
        said, _ = warning(call, "/v1/chat/completions", body)
        assert said == "unknown field 'tempratur'; did you mean 'temperature'?"
    body = {**COMPLETION, "max_token": 1, "stream": stream}
    with caplog.at_level("WARNING", "shoal.serve"):
        for _ in range(3):
            warning(call, "/v1/completions", {**body, f"odd_{stream}": 1})
    (line,) = [one.message for one in caplog.records if f"odd_{stream}" in one.message]
    assert line.startswith("/v1/completions: unknown field")


def test_what_is_known_is_not_named(call):
    harmless = {"user": "me", "metadata": {}, "store": False, "service_tier": "auto"}
    unused = {"suffix": None, "use_beam_search": False, "n": 1, "best_of": 1, "guided_regex": None}
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        said, _ = warning(call, path, {**body, **harmless, **unused})
        assert said is None
    for path, body in (
        ("/v1/embeddings", {"model": "bytes", "input": "a", "user": "me"}),
        ("/v1/responses", {"model": "bytes", "input": "a", "store": True, "reasoning": None}),
        ("/v1/rerank", {"model": "bytes", "query": "a", "documents": ["b"]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ):
        said, _ = warning(call, path, body)
        assert said is None


def test_names_are_a_clients_and_the_header_is_not(call):
    odd = {f"x{number}\r\nset-cookie: a\u00e9": 1 for number in range(7)}
    said, _ = warning(call, "/v1/completions", {**COMPLETION, **odd, "y" * 5000: 1})
    assert said.count("unknown field") == 4
    assert said.endswith(", 4 more")
    assert len(said) < 800
    assert said.isascii()
    assert "set-cookie" not in {name.lower() for name in call.headers}


def test_an_error_names_them_too(call):
    said, body = warning(call, "/v1/completions", {**COMPLETION, "n": 0, "promt": "a"}, 400)
    assert body["error"]["param"] == "n"
    assert said == "unknown field 'promt'; did you mean 'prompt'?"


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "bad_words", ["a"]),
        ("/v1/completions", "skip_special_tokens", False),
        ("/v1/completions", "truncate_prompt_tokens", 3),
        ("/v1/completions", "add_special_tokens", False),
        ("/v1/chat/completions", "allowed_token_ids", [1]),
        ("/v1/chat/completions", "continue_final_message", True),
        ("/v1/chat/completions", "add_generation_prompt", False),
    ],
)
def test_what_would_change_the_answer_is_refused(call, path, field, value):
    body = COMPLETION if path == "/v1/completions" else CHAT
    status, error = call.error("POST", path, {**body, field: value})
    assert (status, error["param"], error["code"]) == (400, field, "unsupported_parameter")
