"""Drawn bad requests: each is refused by name, and the engine computes on as before."""

from __future__ import annotations

import copy
import http.client
import json
from urllib.parse import urlsplit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from drawn import LEAST, STEADY

pytest.importorskip("torch")

from shoal.ir import ServeJob
from shoal.serve.adapters.routes import ADAPTER_ROUTES
from shoal.serve.http.api import ROUTES
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.openapi import document
from shoal.serve.http.server import ServerOptions, running

pytestmark = pytest.mark.multi

KEY = "a-key-of-the-tests"
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SAMPLING = {
    "model": "tiny",
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["z"],
    "stop_token_ids": [3],
    "logit_bias": {"5": 1},
    "repetition_penalty": 1.1,
    "priority": 0,
    "stream": True,
}
CHAT = {
    **SAMPLING,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "s"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
    ],
    "max_tokens": 2,
    "tools": [TOOL],
    "tool_choice": "auto",
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"a": 1},
    "stream_options": {"include_usage": True},
}
PLAIN = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
RESPONSE = {
    "model": "tiny",
    "max_output_tokens": 2,
    "instructions": "i",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
    "tool_choice": {"type": "function", "name": "f"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
    "stream": True,
}
RERANK = {"model": "tiny", "query": "q", "documents": ["d", {"text": "e"}], "top_n": 1}
# Route -> bodies that are good.
GOOD = {
    "/v1/completions": [
        {**SAMPLING, "prompt": ["ab", "cd"], "max_tokens": 2, "logprobs": 1, "echo": True},
        {"model": "tiny", "prompt": [[1, 2], [3]], "max_tokens": 2, "guided_choice": ["a"]},
        {"model": "tiny", "prompt": "a", "max_tokens": 2, "n": 2, "best_of": 3},
    ],
    "/v1/chat/completions": [CHAT],
    "/v1/responses": [
        RESPONSE,
        {"model": "tiny", "input": "a", "text": {"format": {"type": "json_object"}}},
    ],
    "/v1/embeddings": [
        {"model": "tiny", "input": ["a", "b"], "dimensions": 4, "encoding_format": "base64"},
        {"model": "tiny", "input": [1, 2], "pooling": "last", "normalize": False},
    ],
    "/v1/rerank": [RERANK],
    "/rerank": [{**RERANK, "pooling": "mean", "return_documents": True}],
    "/tokenize": [
        {"model": "tiny", "prompt": "ab", "return_token_strs": True},
        {"messages": CHAT["messages"]},
    ],
    "/detokenize": [{"model": "tiny", "tokens": [1, 2]}],
}
DOCUMENT = document(ROUTES, HttpLimits(), "tiny")
SCHEMAS = {
    path: DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for path in GOOD
}
VALID = {path: Draft202012Validator(schema).is_valid for path, schema in SCHEMAS.items()}

FORMS = (
    {"guided_regex": "(a+"},
    {"guided_regex": "[z-a]"},
    {"guided_regex": "(?P<n>a)(?P=n)"},
    {"guided_regex": "a{1000000000}"},
    {"guided_regex": "(" * 500 + "a" + ")" * 500},
    {"guided_json": {"type": 3}},
    {"guided_json": {"$ref": "#/nowhere"}},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"allOf": 3}},
    {"guided_json": {"pattern": "("}},
    {"guided_json": "[" * 5000},
    {"guided_json": {"uniqueItems": True}},
    {"structured_outputs": {"grammar": "start: x"}},
    {"structured_outputs": {"regex": 3}},
    {"response_format": {"type": ["text"]}},
    {"response_format": {"type": "json_schema", "json_schema": [{"type": "object"}]}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
)
LOGIT_BIAS = (
    {"1" * 5000: 1},
    {"-1": 1},
    {"1.5": 1},
    {"٣": 1},
    {"": 1},
    {"257": 1},
    {"5": 10**400},
    {"5": None},
)
VALUES = (
    *({"logit_bias": one} for one in LOGIT_BIAS),
    *({"stop": one} for one in ({}, 0, [[]], [None], ["a", 1], "", ["x" * 257])),
    *({"n": one} for one in (10**9, -1, 0, 1.0, "1", [1], 10**30)),
    *({"seed": one} for one in (-(2**63) - 1, 2**63, 1.5, "1", 10**400)),
    *({"max_tokens": one} for one in (513, 10**9, -1, 0.5)),
    *(
        {"stream": True, "best_of": None, "stream_options": one}
        for one in ([], "x", {"include_usage": 1})
    ),
    {"stream_options": {}},
    {"stop_token_ids": [257]},
    {"stop_token_ids": [[]]},
    {"best_of": 3, "stream": True},
    {"top_k": 258},
    {"temperature": 10**400},
    {"min_tokens": 600},
    {"cache_salt": ["x"]},
    {"model": "x" * 100_000},
    {"model": ["tiny"]},
    {"suffix": "x"},
    {"bad_words": [["a"]]},
    {"prompt_logprobs": 1},
)
MESSAGES = (
    {"role": ["user"], "content": "a"},
    {"role": {}, "content": "a"},
    {"role": "user"},
    {"role": "user", "content": [["text"]]},
    {"role": "assistant", "content": "a", "tool_calls": {"function": {}}},
    {"role": "assistant", "content": "a", "tool_calls": [{**CALL, "function": []}]},
    {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}],
    },
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "1" * 5000}}]},
    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
    {"role": "user", "content": "a", "function_call": {"name": "f"}},
)


def _tool(**function):
    return {"type": "function", "function": {"name": "f", **function}}


CHATS = (
    *({"messages": [one]} for one in MESSAGES),
    *(
        {"tools": [_tool(parameters=one)], "tool_choice": "required"}
        for one in (
            {"type": 3},
            {"type": "object", "properties": 3},
            {"type": "object", "properties": {"a": {"pattern": "("}}},
            {"type": "object", "required": 3},
            {"$ref": "#/nowhere"},
            {"type": "string"},
        )
    ),
    {"tools": [_tool(name="")]},
    {"tools": [_tool(name={"a": 1})]},
    {"tools": {"type": "function"}},
    {"tools": [_tool()], "tool_choice": {"type": "function", "function": {"name": ["f"]}}},
    {"tools": [_tool()], "tool_choice": ["f"]},
    {"tools": [_tool()], "tool_choice": 3},
    {"tool_choice": {"type": "function"}},
    {"chat_template_kwargs": {"a b": 1}},
    {"chat_template_kwargs": {"tools": 1}},
    {"chat_template_kwargs": {str(n): 1 for n in range(17)}},
    {"workers": 2},
    {"logprobs": True, "top_logprobs": True},
    {"modalities": {"a": 1}},
    {"max_completion_tokens": 513},
)
RESPONSES = (
    *(
        {"input": one}
        for one in (
            [{"type": "message", "role": "tool", "content": "a"}],
            [{"type": ["message"], "role": "user", "content": "a"}],
            [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}],
            [{"role": "user", "content": [{"type": {}, "text": "x"}]}],
            [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "[1]"}],
            [{"type": "function_call", "call_id": 1, "name": "f", "arguments": "{}"}],
            [{"type": "function_call_output", "call_id": "1", "output": {"a": 1}}],
            [{"type": "reasoning"}],
            [{"type": "item_reference", "id": "x"}],
            [[]],
        )
    ),
    *(
        {"text": one}
        for one in (
            {"format": "x"},
            {"format": {"type": ["text"]}},
            {"format": {"type": "json_schema"}},
            {"format": {"type": "json_schema", "schema": {"type": 3}}},
            {"format": {"type": "json_schema", "schema": []}},
        )
    ),
    {"include": [["a"]]},
    {"include": ["everything"]},
    {"include": [{}]},
    {"tools": [{"type": "web_search"}]},
    {"tools": [{"type": {"a": 1}, "name": "f"}]},
    {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "function"}},
    {"tools": [{"type": "function", "name": "f"}], "tool_choice": {"type": "hosted"}},
    {"previous_response_id": ["x" * 1000]},
    {"truncation": ["auto"]},
    {"background": 1},
    {"conversation": {}},
    {"max_output_tokens": 513},
    {"metadata": ["a"]},
)
COMPLETIONS = (
    *FORMS,
    *VALUES,
    *(
        {"prompt": one}
        for one in ([[[1]]], [1, "a"], ["a", 1], [None], {}, [257], [-1], [[1], 2], [10**30], [""])
    ),
    {"prompt": ["a"] * 65},
    {"logprobs": 21},
    {"max_tokens": 0},
    {"max_tokens": 0, "echo": False},
)
WRONG = [
    *(("/v1/completions", one) for one in COMPLETIONS),
    *(("/v1/chat/completions", one) for one in (*FORMS, *VALUES, *CHATS)),
    *(("/v1/responses", one) for one in RESPONSES),
    ("/v1/embeddings", {"dimensions": 1000}),
    ("/v1/embeddings", {"input": "x" * 600}),
    ("/v1/embeddings", {"input": [""]}),
    ("/v1/embeddings", {"input": [257]}),
    ("/v1/rerank", {"documents": ["a"] * 257}),
    ("/v1/rerank", {"documents": [{"title": "a"}]}),
    ("/rerank", {"query": ["a"]}),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}),
    ("/tokenize", {"prompt": "x" * 100_000}),
    ("/detokenize", {"tokens": [257]}),
    ("/detokenize", {"tokens": [0] * 600}),
    *((path, {"lora_name": one}) for path in ADAPTER_ROUTES for one in (None, 3, "", ["a"], {})),
    *((path, {"lora_name": "nowhere"}) for path in ADAPTER_ROUTES[1:]),
    *((ADAPTER_ROUTES[0], {"lora_name": "a", "lora_path": one}) for one in (None, 3, "/etc", "\0")),
]

junk = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-3, 3),
        st.sampled_from([10**9, 2**31, 2**63, 2**64, 10**30, -1, 1.5, -0.0, 1e308, 5e-324]),
        st.sampled_from(["", " ", "x", "1", "null", "\0", "𝕏", "%s{}", "x" * 3000, "<|im_end|>"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "role", "text", "", "1"]), inner, max_size=3),
    ),
    max_leaves=4,
)


def _places(value, *before):
    """Where something is in a JSON value: keys and indices that lead to it."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*before, key)
        if isinstance(inner, (dict, list)):
            yield from _places(inner, *before, key)


@st.composite
def changed_bodies(draw):
    """A good body with something else in one place, or nothing; invalid by its schema."""
    path = draw(st.sampled_from(sorted(GOOD)))
    body = copy.deepcopy(draw(st.sampled_from(GOOD[path])))
    fields = [(name,) for name in SCHEMAS[path]["properties"]]
    place = draw(st.sampled_from([*_places(body), *fields]))
    inside = body
    for key in place[:-1]:
        inside = inside[key]
    if isinstance(inside, dict) and place[-1] in inside and draw(st.integers(0, 9)) == 0:
        del inside[place[-1]]
    else:
        inside[place[-1]] = draw(junk)
    return path, place[0], body


@st.composite
def broken_bodies(draw):
    """A route, and bytes that are no JSON object."""
    path = draw(st.sampled_from([*sorted(GOOD), *ADAPTER_ROUTES]))
    good = json.dumps(draw(st.sampled_from(GOOD.get(path, [{"lora_name": "a"}])))).encode()
    at = draw(st.integers(0, len(good) - 1))
    deep = draw(st.sampled_from([65, 1000, 10_000]))
    token = draw(st.sampled_from([b"NaN", b"-Infinity", b"Infinity", b"undefined", b"'x'", b"01"]))
    return path, draw(
        st.sampled_from(
            [
                good[:at],
                good[:at] + b"\xff" + good[at:],
                good[:-1] + b', "a": ' + token + b"}",
                good[:-1] + b', "a": "\\ud800"}',
                good[:-1] + b', "a": ' + b"[" * deep + b"]" * deep + b"}",
                b"[" * deep,
                b'{"a":' * deep,
                b"[" + good + b"]",
                good + good,
                good.decode().encode("utf-16"),
                b"\0" * 100,
                b"",
                token,
            ]
        )
    )


class Server:
    """A server with one connection, and what it answers to a good request."""

    def __init__(self, running):
        self.running = running
        address = urlsplit(running.url)
        self.connection = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        self.before = self.good()
        self.pid = running.engine.pid
        self.refusals = 0

    def ask(self, method, path, body=None, **headers):
        headers = {"Authorization": f"Bearer {KEY}", **headers}
        if body is not None:
            headers.setdefault("Content-Type", "application/json")
        self.connection.request(method, path, body, headers)
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def good(self):
        body = {"model": "tiny", "prompt": "plain", "max_tokens": 6, "temperature": 0}
        body |= {"return_token_ids": True, "ignore_eos": True}
        status, data = self.ask("POST", "/v1/completions", json.dumps(body).encode())
        assert status == 200, data
        return json.loads(data)["choices"][0]["token_ids"]

    def refused(self, method, path, body=None, **headers):
        """Status and error of a request that must be refused."""
        status, data = self.ask(method, path, body, **headers)
        assert 400 <= status < 500, (status, data[:500])
        answer = json.loads(data)
        assert set(answer) == {"error"}
        error = answer["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] and error["code"]
        assert 0 < len(error["message"]) < 600
        assert "Traceback" not in error["message"] and "Error:" not in error["message"]
        self.refusals += 1
        assert self.good() == self.before
        assert (self.running.engine.pid, self.running.engine.restarts) == (self.pid, 0)
        return status, error


@pytest.fixture(scope="module")
def server(write_model):
    job = ServeJob(model=str(write_model(512)), threads=1, precision="fp32", max_adapters=1)
    options = ServerOptions(port=0, key=KEY, adapter_routes=True)
    with running(job, options) as at:
        server = Server(at)
        try:
            yield server
        finally:
            server.connection.close()


def named(error, fields):
    """Whether an error names one of the fields, in ``param`` and in its message."""
    param = error["param"]
    first = param.partition(".")[0].partition("[")[0]
    return first in fields and error["message"].startswith((param, first, "adapter"))


def test_the_bodies_that_are_changed_are_good(server):
    for path, bodies in GOOD.items():
        for body in bodies:
            assert VALID[path](body), (path, body)
            status, data = server.ask("POST", path, json.dumps(body).encode())
            assert status == 200, (path, data)


@settings(max_examples=120, **STEADY)
@given(changed_bodies().filter(lambda drawn: not VALID[drawn[0]](drawn[2])))
def forbidden(server, drawn):
    """What the server's own schema forbids."""
    path, field, body = drawn
    status, error = server.refused("POST", path, json.dumps(body).encode())
    assert status == (404 if error["code"] == "model_not_found" else 400)
    assert named(error, {field, "prompt"} if path == "/tokenize" else {field}), error


@pytest.mark.parametrize(("path", "change"), WRONG)
def test_what_no_schema_can_say_is_refused(server, path, change):
    base = PLAIN if path == "/v1/chat/completions" else GOOD.get(path, [{}])[-1]
    status, error = server.refused("POST", path, json.dumps({**base, **change}).encode())
    assert status == (404 if error["code"] == "model_not_found" else 400)
    assert named(error, {*change, "tools"}), error


@settings(max_examples=40, **STEADY)
@given(broken_bodies())
def unread(server, drawn):
    """What is no JSON object."""
    path, body = drawn
    status, error = server.refused("POST", path, body)
    assert (status, error["code"]) == (400, "invalid_json")


@st.composite
def foreign_requests(draw):
    """Method, path and headers of a request that no route takes."""
    good = sorted([*GOOD, *ADAPTER_ROUTES])
    odd = ["/", "/v1", "/v1/", "/v1/chat", "/v2/completions", "//v1/completions", "/%00", "/%ff"]
    odd += ["/v1/completions/", "/V1/Completions", "/v1/../etc/passwd", "/x" * 2000, "/docs"]
    kinds = ["", "text/plain", "text/json", "application/jsonx", "application/x-ndjson", "json"]
    kinds += ["multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "x" * 5000]
    keys = ["", "Bearer", "Bearer ", f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer \xff", "x" * 99]
    return draw(
        st.one_of(
            st.tuples(
                st.sampled_from(["GET", "PUT", "DELETE", "PATCH", "BREW"]),
                st.sampled_from(good),
                st.just({}),
                st.just(405),
            ),
            st.tuples(
                st.sampled_from(["GET", "POST", "OPTIONS", "BREW"]),
                st.sampled_from(odd),
                st.just({}),
                st.just(404),
            ),
            st.tuples(
                st.just("POST"),
                st.sampled_from(good),
                st.sampled_from(kinds).map(lambda kind: {"Content-Type": kind}),
                st.just(415),
            ),
            st.tuples(
                st.just("POST"),
                st.sampled_from(good),
                st.sampled_from(keys).map(lambda key: {"Authorization": key}),
                st.just(401),
            ),
        )
    )


@settings(max_examples=40, **STEADY)
@given(foreign_requests())
def foreign(server, drawn):
    """What no route takes."""
    method, path, headers, expected = drawn
    status, _ = server.refused(method, path, b"{}", **headers)
    assert status == expected


def test_drawn_requests_are_refused(server):
    server.refusals = 0
    for draw in (forbidden, unread, foreign):
        draw(server)
    assert server.refusals >= LEAST["HTTP"]
