"""The OpenAPI document of the server: every endpoint, field and status.

It is written by hand beside the readers of bodies, since these say in one error what is wrong
and what would be right, which a generated model does not; tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.version import __version__
from shoal.ir.serving import MIN_REPETITION_PENALTY, MIN_TEMPERATURE
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.responses import SHARED

_Schema = dict[str, Any]

_STATUSES = {
    400: "A field of the request is wrong; `param` names it.",
    401: "No key, or a wrong one.",
    403: "An unknown `Host`, or a web page of another origin.",
    404: "No such model, or no such path.",
    405: "The path does not support this method.",
    413: "The body is too large.",
    415: "The body is not `application/json`.",
    429: "Too many requests; see `Retry-After`.",
    431: "Headers are too large.",
    500: "An error of the server.",
    503: "The engine is being started again; see `Retry-After`.",
}
_ALWAYS = (400, 403, 405, 431, 500)
_READ = (401, 404, 503)
_WRITTEN = (*_READ, 413, 415, 429)


def _integer(low: int, high: int) -> _Schema:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}


def _number(low: float, high: float) -> _Schema:
    return {"type": ["number", "null"], "minimum": low, "maximum": high}


def _text(longest: int) -> _Schema:
    return {"type": ["string", "null"], "minLength": 1, "maxLength": longest}


_FLAG: _Schema = {"type": ["boolean", "null"]}
_OBJECT: _Schema = {"type": ["object", "null"]}
_IDS: _Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _texts(limits: HttpLimits) -> _Schema:
    """A text, several, or their tokens."""
    some = {"minItems": 1, "maxItems": limits.batch}
    return {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}, **some},
            _IDS,
            {"type": "array", "items": _IDS, **some},
        ]
    }


def _common(limits: HttpLimits, name: str) -> dict[str, _Schema]:
    stop = {"type": "string", "minLength": 1, "maxLength": limits.stop_chars}
    return {
        "model": {"const": name},
        "max_tokens": {"type": ["integer", "null"], "minimum": 1},
        "temperature": {"anyOf": [{"const": 0}, _number(MIN_TEMPERATURE, 2)]},
        "top_p": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
        "top_k": {"type": ["integer", "null"], "minimum": -1},
        "min_p": _number(0, 1),
        "repetition_penalty": {
            "type": ["number", "null"],
            "minimum": MIN_REPETITION_PENALTY,
            "maximum": 10,
        },
        "frequency_penalty": _number(-2, 2),
        "presence_penalty": _number(-2, 2),
        "logit_bias": {
            "type": ["object", "null"],
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": limits.biases,
        },
        "n": _integer(1, limits.choices),
        "best_of": _integer(1, limits.choices),
        "seed": _integer(-(2**63), 2**63 - 1),
        "stop": {
            "anyOf": [
                {"type": "null"},
                stop,
                {"type": "array", "items": stop, "maxItems": limits.stops},
            ]
        },
        "stop_token_ids": {
            "type": ["array", "null"],
            "items": {"type": "integer", "minimum": 0},
            "maxItems": limits.stops,
        },
        "include_stop_str_in_output": _FLAG,
        "min_tokens": {"type": ["integer", "null"], "minimum": 0},
        "streams": {"type": ["integer", "null"], "minimum": 1},
        "compute": {"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1},
        "ignore_eos": _FLAG,
        "response_format": _OBJECT,
        "structured_outputs": _OBJECT,
        "guided_json": {"type": ["object", "string", "null"]},
        "guided_regex": {"type": ["string", "null"], "minLength": 1},
        "guided_choice": {
            "type": ["array", "null"],
            "items": {"type": "string", "minLength": 1},
            "minItems": 1,
            "maxItems": 1000,
        },
        "priority": _integer(-(2**31), 2**31 - 1),
        "cache_salt": _text(256),
        "stream": _FLAG,
        "stream_options": {
            "type": ["object", "null"],
            "properties": {"include_usage": _FLAG},
        },
        "return_token_ids": _FLAG,
    }


def _completion(limits: HttpLimits, name: str) -> _Schema:
    fields = {
        "prompt": _texts(limits),
        "logprobs": _integer(0, limits.logprobs),
        "echo": _FLAG,
        "max_tokens": {"type": ["integer", "null"], "minimum": 0},
    }
    return _object({**_common(limits, name), **fields}, "model", "prompt")


def _message() -> _Schema:
    part = _object({"type": {"const": "text"}, "text": {"type": "string"}}, "type", "text")
    roles = ["system", "developer", "user", "assistant", "tool"]
    return _object(
        {
            "role": {"enum": roles},
            "content": {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": part}]},
            "name": {"type": ["string", "null"]},
            "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
            "tool_call_id": {"type": ["string", "null"]},
        },
        "role",
    )


def _messages(limits: HttpLimits) -> _Schema:
    return {
        "type": "array",
        "items": _message(),
        "minItems": 1,
        "maxItems": limits.messages,
    }


def _chat(limits: HttpLimits, name: str) -> _Schema:
    function = _object(
        {
            "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
            "description": {"type": "string"},
            "parameters": {"type": "object"},
        },
        "name",
    )
    tool = _object({"type": {"const": "function"}, "function": function}, "type", "function")
    fields = {
        "messages": _messages(limits),
        "max_completion_tokens": {"type": ["integer", "null"], "minimum": 1},
        "logprobs": _FLAG,
        "top_logprobs": _integer(0, limits.logprobs),
        "tools": {"type": ["array", "null"], "items": tool, "maxItems": limits.tools},
        "tool_choice": {"type": ["string", "object", "null"]},
        "parallel_tool_calls": _FLAG,
        "chat_template_kwargs": _OBJECT,
        "workers": _integer(1, limits.choices),
    }
    return _object({**_common(limits, name), **fields}, "model", "messages")


def _embeddings(limits: HttpLimits, name: str) -> _Schema:
    fields = {
        "model": {"const": name},
        "input": _texts(limits),
        "encoding_format": {"enum": ["float", "base64", None]},
        "pooling": {"enum": ["mean", "last", None]},
        "normalize": _FLAG,
        "dimensions": _integer(1, 2**20),
        "priority": _integer(-(2**31), 2**31 - 1),
    }
    return _object(fields, "model", "input")


def _tokenize(limits: HttpLimits, name: str) -> _Schema:
    fields: dict[str, _Schema] = {
        "model": {"enum": [name, None]},
        "prompt": {"type": "string"},
        "messages": _messages(limits),
        "add_special_tokens": _FLAG,
        "return_token_strs": _FLAG,
    }
    return _object(fields)


def _detokenize(_: HttpLimits, name: str) -> _Schema:
    tokens = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    return _object({"model": {"enum": [name, None]}, "tokens": tokens}, "tokens")


def _object(fields: Mapping[str, _Schema], *required: str) -> _Schema:
    made: _Schema = {"type": "object", "properties": dict(fields)}
    return {**made, "required": list(required)} if required else made


def _response(limits: HttpLimits, name: str) -> _Schema:
    item = _object(
        {
            "type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
            "role": {"enum": ["system", "developer", "user", "assistant"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _OBJECT}]},
            "call_id": {"type": "string"},
            "name": {"type": "string"},
            "arguments": {"type": "string"},
            "output": {"anyOf": [{"type": "string"}, {"type": "array", "items": _OBJECT}]},
        }
    )
    items = {"type": "array", "items": item, "minItems": 1, "maxItems": limits.messages}
    common = _common(limits, name)
    fields: dict[str, _Schema] = {
        "input": {"anyOf": [{"type": "string"}, items]},
        "instructions": {"type": ["string", "null"]},
        "max_output_tokens": {"type": ["integer", "null"], "minimum": 1},
        "text": _OBJECT,
        "tools": {"type": ["array", "null"], "items": _OBJECT, "maxItems": limits.tools},
        "tool_choice": {"type": ["string", "object", "null"]},
        "parallel_tool_calls": _FLAG,
        "top_logprobs": _integer(0, limits.logprobs),
        "include": {"type": ["array", "null"], "items": {"type": "string"}},
        "previous_response_id": {"type": "null"},
        "metadata": _OBJECT,
        "chat_template_kwargs": _OBJECT,
        "stream_options": _OBJECT,
    }
    return _object({**{n: common[n] for n in SHARED if n in common}, **fields}, "model", "input")


def _rerank(limits: HttpLimits, name: str) -> _Schema:
    text = {"type": "string", "minLength": 1}
    document = {"anyOf": [text, _object({"text": text}, "text")]}
    documents = {"type": "array", "items": document, "minItems": 1, "maxItems": limits.documents}
    fields: dict[str, _Schema] = {
        "model": {"const": name},
        "query": text,
        "documents": documents,
        "top_n": {"type": ["integer", "null"], "minimum": 0},
        "return_documents": _FLAG,
        "pooling": {"enum": ["mean", "last", None]},
        "priority": _integer(-(2**31), 2**31 - 1),
    }
    return _object(fields, "model", "query", "documents")


_BODIES = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/v1/responses": _response,
    "/v1/embeddings": _embeddings,
    "/v1/rerank": _rerank,
    "/rerank": _rerank,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}
_SUMMARIES = {
    "/health": "Health check: whether requests are accepted.",
    "/version": "Version of Shoal.",
    "/metrics": "Metrics in the Prometheus format.",
    "/openapi.json": "This document.",
    "/v1/models": "List of models.",
    "/v1/models/{model}": "One model.",
    "/v1/workers": "Current views of concurrent workers.",
    "/v1/completions": "Completions of texts or token ids.",
    "/v1/chat/completions": "Chat completions.",
    "/v1/responses": "Responses.",
    "/v1/embeddings": "Embeddings.",
    "/v1/rerank": "Reranking: documents sorted by similarity to a query.",
    "/rerank": "Reranking, under the path that some clients use.",
    "/tokenize": "Tokenize a text or a chat.",
    "/detokenize": "Detokenize.",
}
_ERROR: _Schema = _object(
    {
        "error": _object(
            {
                "message": {"type": "string", "minLength": 1},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            *("message", "type", "param", "code"),
        )
    },
    "error",
)


def fields_of(limits: HttpLimits) -> dict[str, frozenset[str]]:
    """The fields of every body, by its path."""
    return {path: frozenset(body(limits, "")["properties"]) for path, body in _BODIES.items()}


def document(routes: tuple[tuple[str, str], ...], limits: HttpLimits, name: str) -> dict[str, Any]:
    """The document.

    Args:
        routes: method and path of every endpoint.
        limits: limits of the options of a request.
        name: what the model is called.
    """
    paths: dict[str, Any] = {}
    for method, path in routes:
        paths[path] = {method.lower(): _operation(method, path, limits, name)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shoal", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(method: str, path: str, limits: HttpLimits, name: str) -> dict[str, Any]:
    kinds = ["application/json"]
    if path == "/metrics":
        kinds = ["text/plain"]
    elif path.endswith(("completions", "responses")):
        kinds.append("text/event-stream")
    statuses = (*_ALWAYS, *(_WRITTEN if method == "POST" else _READ))
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answers: dict[str, Any] = {
        "200": {"description": "Done.", "content": {kind: {} for kind in kinds}}
    }
    for status in sorted(statuses):
        answers[str(status)] = {"description": _STATUSES[status], "content": error}
    made: dict[str, Any] = {
        "summary": _SUMMARIES[path],
        "operationId": f"{method.lower()}{path.translate(str.maketrans('/.{}', '____'))}",
        "responses": answers,
        "security": [] if path == "/health" else [{"key": []}],
    }
    if path in _BODIES:
        schema = _BODIES[path](limits, name)
        made["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    if "{model}" in path:
        one = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
        made["parameters"] = [one]
    return made
