"""Tokens, names of requests, salts and priorities."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.multi


def ok(call, path, body):
    status, data = call("POST", path, body)
    assert status == 200, data
    return json.loads(data)


def test_texts_to_tokens_and_back(call):
    answer = ok(call, "/tokenize", {"model": "bytes", "prompt": "grüße", "return_token_strs": True})
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 7
    assert answer["max_model_len"] == 4000
    assert answer["token_strs"][:2] == ["g", "r"]
    assert ok(call, "/detokenize", {"tokens": answer["tokens"]}) == {"prompt": "grüße"}
    assert ok(call, "/detokenize", {"tokens": []}) == {"prompt": ""}
    chat = ok(call, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    shown = ok(call, "/detokenize", {"tokens": chat["tokens"]})["prompt"]
    assert shown == "User: hi\n\nAssistant:"
    assert chat["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "word " * 200_000}, "prompt"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 5000}, "tokens"),
    ],
)
def test_bad_tokens(call, path, body, param):
    status, error = call.error("POST", path, body)
    assert status == 400
    assert error["param"] == param


def test_another_model_has_other_tokens(call):
    for path in ("/tokenize", "/detokenize"):
        status, error = call.error("POST", path, {"model": "other", "prompt": "a", "tokens": [1]})
        assert (status, error["code"]) == (404, "model_not_found")


def test_every_answer_has_the_name_of_its_request(call):
    call("GET", "/health", headers={"X-Request-Id": "mine-1.a:b_c"})
    assert call.headers["x-request-id"] == "mine-1.a:b_c"
    names = set()
    for bad in ("", "a b", "x" * 129, "é"):
        call("GET", "/nowhere", headers={"X-Request-Id": bad.encode("latin-1")})
        names.add(call.headers["x-request-id"])
    assert len(names) == 4
    assert all(len(name) == 32 for name in names)
    body = {"model": "bytes", "prompt": "ab", "max_tokens": 2, "stream": True}
    call("POST", "/v1/completions", body, {"X-Request-Id": "stream-1"})
    assert call.headers["x-request-id"] == "stream-1"


def test_stop_strings_that_stay(call):
    body = {"model": "bytes", "prompt": "abcdef", "max_tokens": 12, "stop": ["de"]}
    assert ok(call, "/v1/completions", body)["choices"][0]["text"] == "abc"
    kept = {**body, "include_stop_str_in_output": True}
    assert ok(call, "/v1/completions", kept)["choices"][0]["text"] == "abcde"
    # Not before so many tokens: the second time counts.
    late = {**body, "min_tokens": 6}
    assert ok(call, "/v1/completions", late)["choices"][0]["text"] == "abcdefabc"
    assert ok(call, "/v1/completions", {**body, "priority": -3, "cache_salt": "mine"})
