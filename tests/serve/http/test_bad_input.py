"""Whatever a client sends: a 4xx in the one shape, no memory, and the next request is served."""

from __future__ import annotations

import json
import socket
import statistics
import time

import fake_engine
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.serve.http.body import parse_body
from shoal.serve.http.errors import ApiError
from shoal.serve.http.limits import HttpLimits

pytestmark = pytest.mark.multi

COMPLETION = {"model": "bytes", "prompt": "ab", "max_tokens": 2}
CHAT = {"model": "bytes", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
# A busy machine is slow; what is refused only after work was done for it takes longer still.
DEADLINE_S = 5.0


@pytest.fixture(autouse=True)
def still_serves(call):
    yield
    status, data = call("POST", "/v1/completions", COMPLETION)
    assert status == 200
    assert json.loads(data)["choices"][0]["text"] == "ab"


BAD_COMPLETIONS = {
    "n": {"n": 5_000_000},
    "n-zero": {"n": 0},
    "n-text": {"n": "2"},
    "n-true": {"n": True},
    "batch": {"prompt": ["a"] * 16, "n": 16},
    "logprobs": {"logprobs": 10**9},
    "logprobs-together": {"logprobs": 20, "n": 16, "max_tokens": 3900},
    "logprobs-true": {"logprobs": True},
    "max_tokens": {"max_tokens": 10**12},
    "max_tokens-zero": {"max_tokens": 0},
    "echo-zero": {"max_tokens": 0, "echo": False},
    "echo-much": {"prompt": [[1] * 3900] * 13, "echo": True, "logprobs": 20},
    "max_tokens-negative": {"max_tokens": -1},
    "max_tokens-fraction": {"max_tokens": 1.5},
    "stop-many": {"stop": ["a"] * 17},
    "stop-long": {"stop": "a" * 257},
    "stop-empty": {"stop": [""]},
    "stop-number": {"stop": [3]},
    "stop_token_ids": {"stop_token_ids": [10**9]},
    "token-high": {"prompt": [1, fake_engine.VOCAB]},
    "token-negative": {"prompt": [-1]},
    "token-fraction": {"prompt": [1, 2.5]},
    "token-true": {"prompt": [True]},
    "tokens-many": {"prompt": [1] * 1_000_000},
    "prompt-none": {"prompt": None},
    "prompt-empty": {"prompt": []},
    "prompt-nothing": {"prompt": ""},
    "prompt-object": {"prompt": {"a": 1}},
    "prompt-mixture": {"prompt": ["a", [1]]},
    "prompt-lists": {"prompt": [[1], []]},
    "prompts-many": {"prompt": [[1]] * 65},
    "prompt-long": {"prompt": "word " * 200_000},
    "prompt-and-answer": {"prompt": [1] * 3990, "max_tokens": 11},
    "temperature": {"temperature": 1e300},
    "temperature-negative": {"temperature": -0.1},
    "temperature-text": {"temperature": "hot"},
    "top_p": {"top_p": 0},
    "top_p-above": {"top_p": 1.01},
    "top_k": {"top_k": -2},
    "seed": {"seed": 2**64},
    "seed-fraction": {"seed": 0.5},
    "stream": {"stream": "yes"},
    "stream_options": {"stream": False, "stream_options": {"include_usage": True}},
    "stream_options-list": {"stream": True, "stream_options": [1]},
    "stream_options-text": {"stream": True, "stream_options": {"include_usage": "x"}},
    "echo": {"echo": 1},
    "best_of": {"n": 2, "best_of": 1},
    "best_of-many": {"best_of": 17},
    "best_of-batch": {"prompt": ["a"] * 5, "best_of": 16},
    "suffix": {"suffix": "end"},
    "logit_bias": {"logit_bias": {"5": 101}},
    "logit_bias-token": {"logit_bias": {str(fake_engine.VOCAB): 1}},
    "logit_bias-name": {"logit_bias": {"five": 1}},
    "logit_bias-long": {"logit_bias": {"1" * 5000: 1}},
    "logit_bias-true": {"logit_bias": {"5": True}},
    "logit_bias-list": {"logit_bias": [5]},
    "logit_bias-many": {"logit_bias": {str(token): 1 for token in range(301)}},
    "presence_penalty": {"presence_penalty": 2.5},
    "frequency_penalty": {"frequency_penalty": "-1"},
    "repetition_penalty": {"repetition_penalty": 0},
    "min_p": {"min_p": 1.1},
    "compute": {"compute": 0.5},
    "compute-text": {"compute": "half"},
    "min_tokens": {"min_tokens": 3},
    "include_stop": {"include_stop_str_in_output": "yes"},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "guided_regex": {"guided_regex": "(a+"},
    "guided_regex-list": {"guided_regex": ["a"]},
    "guided_regex-deep": {"guided_regex": "(" * 20_000},
    "guided_json": {"guided_json": {"type": "strin"}},
    "guided_json-text": {"guided_json": "{"},
    "guided_json-remote": {"guided_json": {"$ref": "http://127.0.0.1/schema"}},
    "guided_json-large": {"guided_json": {"enum": ["a" * 100_000]}},
    "guided_choice": {"guided_choice": []},
    "guided_choice-many": {"guided_choice": ["a"] * 1001},
    "guided_choice-number": {"guided_choice": [1]},
    "guided_grammar": {"guided_grammar": "start: 'a'"},
    "structured_outputs": {"structured_outputs": ["a"]},
    "structured_outputs-kind": {"structured_outputs": {"poem": "a"}},
    "two-forms": {"guided_choice": ["b"], "guided_regex": "a"},
    "form-min_tokens": {"guided_regex": "a", "min_tokens": 1},
    "form-ignore_eos": {"guided_regex": "a", "ignore_eos": True},
    "priority": {"priority": 2**40},
    "cache_salt": {"cache_salt": ""},
    "cache_salt-long": {"cache_salt": "a" * 257},
    "model-number": {"model": 3},
    "model-none": {"model": None},
}


@pytest.mark.parametrize("change", BAD_COMPLETIONS.values(), ids=BAD_COMPLETIONS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_completions(call, change, stream):
    began = time.monotonic()
    status, error = call.error(
        "POST", "/v1/completions", {**COMPLETION, "stream": stream, **change}
    )
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition(".")[0] in {*change, "prompt"}
    assert error["code"]
    assert len(error["message"]) < 600
    assert time.monotonic() - began < DEADLINE_S


TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BAD_CHATS = {
    "messages": {"messages": None},
    "messages-empty": {"messages": []},
    "messages-many": {"messages": [{}] * 10_000},
    "messages-text": {"messages": "hi"},
    "message-text": {"messages": ["hi"]},
    "role": {"messages": [{"role": "king", "content": "hi"}]},
    "role-function": {"messages": [{"role": "function", "content": "hi"}]},
    "content-none": {"messages": [{"role": "user", "content": None}]},
    "content-image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "content-part": {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
    "tool-calls": {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
    "tool-calls-user": {"messages": [{"role": "user", "content": "", "tool_calls": [CALL]}]},
    "tool-calls-text": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "x"}}]}
        ]
    },
    "tools": {"tools": [{"type": "function"}]},
    "tools-name": {"tools": [{"type": "function", "function": {"name": "a b"}}]},
    "tools-twice": {"tools": [TOOL, TOOL]},
    "tools-many": {"tools": [TOOL] * 129},
    "tools-schema": {"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]},
    "tools-parallel": {"tools": [TOOL], "parallel_tool_calls": 1},
    "tool_choice": {"tool_choice": "required"},
    "tool_choice-name": {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "g"}},
    },
    "tool_choice-form": {
        "tools": [TOOL],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
    },
    "functions": {"functions": [{}]},
    "response_format": {"response_format": {"type": "poem"}},
    "response_format-schema": {"response_format": {"type": "json_schema"}},
    "response_format-bad": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 3}}}
    },
    "modalities": {"modalities": ["audio"]},
    "top_logprobs": {"logprobs": True, "top_logprobs": 10**9},
    "top_logprobs-together": {
        "logprobs": True,
        "top_logprobs": 20,
        "n": 16,
        "max_tokens": 3900,
    },
    "top_logprobs-alone": {"top_logprobs": 2},
    "logprobs": {"logprobs": 3},
    "max_completion_tokens": {"max_completion_tokens": 10**9},
    "two-limits": {"max_tokens": 3, "max_completion_tokens": 4},
    "n": {"n": 5_000_000},
    "template": {"chat_template": "{{ 1 }}"},
    "template-values": {"chat_template_kwargs": {"messages": "x"}},
    "template-lists": {"chat_template_kwargs": {"x": [1]}},
    "long": {"messages": [{"role": "user", "content": "word " * 200_000}]},
}


@pytest.mark.parametrize("change", BAD_CHATS.values(), ids=BAD_CHATS)
def test_bad_chats(call, change):
    status, error = call.error("POST", "/v1/chat/completions", {**CHAT, **change})
    assert status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"]


HARMLESS = {
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "logit_bias": {},
    "presence_penalty": 0.0,
    "suffix": None,
    "best_of": 1,
    "something_new": [1, 2],
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_nothing_is_ignored(call, name):
    status, _ = call("POST", "/v1/completions", {**COMPLETION, name: HARMLESS[name]})
    assert status == 200
    status, _ = call("POST", "/v1/chat/completions", {**CHAT, name: HARMLESS[name]})
    assert status == 200


def test_unknown_model(call):
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        status, error = call.error("POST", path, {**body, "model": "gpt-9"})
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    status, error = call.error("GET", "/v1/models/gpt-9")
    assert (status, error["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"[1]",
        b'"text"',
        b"null",
        b'{"model": NaN}',
        b'{"prompt": "\\ud800"}',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"a":' * 70 + b"1" + b"}" * 70,
        b'{"a":' * 150 + b"1" + b"}" * 150,
        b'{"a": [' + b"[]," * 1_000_000 + b"1]}",
        b'{"a": "' + b'\\"' * 1_000_000,
        b'{"prompt": [' + b'"\\\\",' * 400_000 + b'"a"]}',
        b'{"logit_bias": {' + b'"1": 1,' * 100_000 + b'"1": 1}}',
        b'{"max_tokens": ' + b"9" * 100_000 + b"}",
    ],
)
def test_bad_json(call, body):
    status, error = call.error("POST", "/v1/completions", body)
    assert (status, error["code"]) == (400, "invalid_json")


def test_a_number_with_a_large_exponent(call):
    status, error = call.error(
        "POST", "/v1/completions", b'{"model": "bytes", "prompt": "a", "temperature": 1e999}'
    )
    assert (status, error["param"]) == (400, "temperature")


def test_other_media_types(call):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        status, error = call.error(
            "POST", "/v1/completions", COMPLETION, headers={"Content-Type": kind}
        )
        assert (status, error["code"]) == (415, "unsupported_media_type")


def test_unknown_paths_and_methods(call):
    for path in (
        "/",
        "/v1",
        "/v1/completions/",
        "/docs",
        "/v1/audio",
        "/%ff",
    ):
        status, error = call.error("GET", path)
        assert (status, error["code"]) == (404, "not_found"), path
    for method, path in (
        ("GET", "/v1/completions"),
        ("DELETE", "/v1/models"),
        ("POST", "/health"),
        ("PUT", "/metrics"),
        ("OPTIONS", "/v1/models"),
    ):
        status, error = call.error(method, path)
        assert (status, error["code"]) == (405, "method_not_allowed"), (method, path)
        assert call.headers["allow"]


def test_a_large_body_is_not_taken_in(call):
    status, error = call.error("POST", "/v1/completions", b" " * (4 * 2**20 + 1))
    assert (status, error["code"]) == (413, "body_too_large")


def raw(server, data, *, more=b"", pieces=1):
    """What the server answers to bytes, until it closes or has said all."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(data)
        for _ in range(pieces if more else 0):
            try:
                connection.sendall(more)
            except OSError:
                break  # refused already
        connection.settimeout(5)
        answer = b""
        while b"\r\n\r\n" not in answer or not answer.rstrip().endswith(b"}"):
            part = connection.recv(65536)
            if not part:
                break
            answer += part
        return answer


def shape(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["code"]


def test_a_body_without_length_is_cut_off_too(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    assert shape(raw(server, head, more=chunk, pieces=80)) == (413, "body_too_large")


@pytest.mark.parametrize(
    "headers",
    [
        b"X-Long: " + b"a" * 17_000 + b"\r\n",
        b"".join(b"X-%d: a\r\n" % number for number in range(150)),
    ],
    ids=["long", "many"],
)
def test_large_headers(server, headers):
    answer = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n")
    assert shape(answer) == (431, "headers_too_large")


def test_headers_without_end(server):
    answer = raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ", more=b"a" * 65536)
    assert shape(answer) == (431, "headers_too_large")


def test_what_is_no_http(server):
    assert shape(raw(server, b"\x16\x03\x01 hello\r\n\r\n")) == (400, "invalid_http")


def test_absurd_numbers_take_no_memory(call, server, record_property):
    process = psutil.Process()  # the server runs in a thread of this process
    for _ in range(3):
        call("POST", "/v1/completions", COMPLETION)
    before = process.memory_info().rss
    bad = [{"n": 5_000_000}, {"logprobs": 10**9}, {"max_tokens": 10**15}, {"prompt": [2**31]}]
    cases = [("/v1/completions", {**COMPLETION, **change}) for change in bad]
    cases.append(("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 10**9}))
    took = []
    for path, body in cases * 20:
        began = time.perf_counter()
        assert call.error("POST", path, body)[0] == 400
        took.append(time.perf_counter() - began)
    grown = process.memory_info().rss - before
    assert grown < 50 * 2**20
    assert call("POST", "/v1/completions", COMPLETION)[0] == 200
    median_s = statistics.median(took)
    assert median_s < 0.1
    took_ms = f"{1e3 * median_s:.1f} ms in the median"
    record_property("figure", f"{len(took)} refused, {took_ms}; {grown / 2**20:.1f} MiB grown")


def test_idle_connections_stop_nobody(call, server):
    host, port = server.url.removeprefix("http://").split(":")
    held = []
    try:
        for _ in range(400):  # both ends of each are in this process
            held.append(socket.create_connection((host, int(port)), timeout=20))
        status, _ = call("POST", "/v1/completions", COMPLETION)
        assert status == 200
    finally:
        for connection in held:
            connection.close()


def test_brackets_in_strings_are_text(call):
    prompt = '["\\{[' * 300
    status, data = call("POST", "/v1/completions", {**COMPLETION, "prompt": prompt, "echo": True})
    assert status == 200
    assert json.loads(data)["choices"][0]["text"].startswith(prompt)


# Text that is hard to tell from the end of a string, and that never lacks a part.
_TEXT = st.lists(st.sampled_from(['"', "\\", "\\\\", "a", "[", ":", "é"]), max_size=8).map("".join)


@given(st.lists(_TEXT, max_size=5), st.integers(1, 6))
def test_strings_are_counted(texts, most):
    body = json.dumps({"a": texts}).encode()
    limits = HttpLimits(json_strings=most)
    if len(texts) + 1 <= most:
        assert parse_body(body, limits) == {"a": texts}
    else:
        with pytest.raises(ApiError, match=f"at most {most} strings"):
            parse_body(body, limits)
