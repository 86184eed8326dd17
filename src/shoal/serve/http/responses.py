"""``/v1/responses``: what is asked, as the chat that it is.

The items of the input become messages, and the other fields those of a chat; one reader reads
both. What an item or a field of another name may be is checked here, so that errors name it.
Nothing is stored: a request has its whole conversation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.serve.engine.link import ModelInfo
from shoal.serve.http.errors import ApiError
from shoal.serve.http.fields import Fields, wrong
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.openai import ParsedRequest, read_chat
from shoal.serve.text.tools import call_arguments, read_function

REFUSED_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "truncation": (None, "disabled"),
}
"""Fields that would change the answer -> the values that mean "not used"."""

SHARED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "min_tokens",
    "ignore_eos",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "priority",
    "cache_salt",
    "streams",
    "compute",
    "stream",
    "parallel_tool_calls",
    "chat_template_kwargs",
)
"""Fields that are those of a chat."""

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text")
# What ``include`` may name: of these the first is given, and the second never there.
_LOGPROBS, _ABSENT = "message.output_text.logprobs", "reasoning.encrypted_content"


def read_response(
    body: Mapping[str, Any], limits: HttpLimits, model: ModelInfo, served: Sequence[str]
) -> tuple[ParsedRequest, dict[str, Any]]:
    """A body of ``POST /v1/responses``, and what its answer repeats of it.

    Raises:
        ApiError: a field is wrong or not supported; names it.
    """
    fields = Fields(body)
    fields.refuse(REFUSED_RESPONSES)
    before = fields.get("previous_response_id")
    if before is not None:
        raise ApiError(
            f"previous_response_id = {str(before)[:80]!r}: this server keeps no responses; send "
            "the whole conversation in input",
            param="previous_response_id",
            code="unsupported_parameter",
        )
    metadata = fields.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        wrong("metadata", metadata, "an object")
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        wrong("stream_options", options, "an object")
    text = _text(fields.get("text"))
    tools = _tools(fields.get("tools"), limits)
    top = fields.integer("top_logprobs", 0, limits.logprobs, None)
    chat = {name: body[name] for name in SHARED if name in body}
    chat |= {
        "messages": _messages(fields, limits),
        "max_completion_tokens": fields.integer("max_output_tokens", 1, model.max_position, None),
        "response_format": text,
        "tools": [_as_in_chats(tool) for tool in tools],
        "tool_choice": _choice(fields.get("tool_choice")),
        "logprobs": _with_logprobs(fields.get("include")) or top is not None,
        "top_logprobs": top,
        # Other workers would be other choices, and here there is one.
        "workers": 1,
    }
    if not chat["logprobs"]:
        del chat["top_logprobs"]
    ask = read_chat(chat, limits, model, served)
    if ask.form is not None and text is not None:
        ask = replace(ask, form=("text.format", ask.form[1]))
    many = body.get("parallel_tool_calls")
    return replace(ask, given="input"), {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": metadata or {},
        "parallel_tool_calls": many is not False,
        "temperature": ask.sampling.temperature,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": tools,
        "top_logprobs": top or 0,
        "top_p": ask.sampling.top_p,
    }


def _with_logprobs(include: Any) -> bool:
    if include is None:
        return False
    if not isinstance(include, list) or any(one not in (_LOGPROBS, _ABSENT) for one in include):
        wrong("include", include, f"a list of {_LOGPROBS} and {_ABSENT}")
    return _LOGPROBS in include


def _text(value: Any) -> dict[str, Any] | None:
    """The form of the answer, as chats have it; None for any."""
    if value is None:
        return None
    if not isinstance(value, dict):
        wrong("text", value, "an object with format")
    form = value.get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, dict) else form
    if kind not in ("text", "json_object", "json_schema"):
        wrong("text.format.type", kind, "text, json_object or json_schema")
    if kind != "json_schema":
        return {"type": kind}
    if not isinstance(form.get("schema"), dict):
        wrong("text.format.schema", form.get("schema"), "a JSON schema, which is an object")
    return {"type": kind, "json_schema": {"schema": form["schema"]}}


def _tools(value: Any, limits: HttpLimits) -> list[dict[str, Any]]:
    """Functions, as they came."""
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > limits.tools:
        wrong("tools", type(value).__name__, f"a list of up to {limits.tools} functions")
    for place, tool in enumerate(value):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if kind != "function":
            wrong(f"tools[{place}].type", kind, "function; this server has no tools of its own")
        read_function(tool, f"tools[{place}]")
    return value


def _as_in_chats(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {n: v for n, v in tool.items() if n != "type"}}


def _choice(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("type") != "function":
        expected = "function, with a name; or none, auto or required instead"
        wrong("tool_choice.type", value.get("type"), expected)
    return {"type": "function", "function": {"name": value.get("name")}}


def _messages(fields: Fields, limits: HttpLimits) -> list[dict[str, Any]]:
    """The messages that the input is."""
    instructions, items = fields.get("instructions"), fields.get("input")
    if instructions is not None and not isinstance(instructions, str):
        wrong("instructions", instructions, "a string")
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    # The instructions are a message too.
    most = limits.messages - len(messages)
    if not isinstance(items, list) or not 1 <= len(items) <= most:
        given = f"{len(items)} items" if isinstance(items, list) else items
        code = "missing" if items is None else "invalid_value"
        wrong("input", given, f"a string, or a list of 1 to {most} items", code=code)
    for place, item in enumerate(items):
        _add(messages, item, f"input[{place}]")
    if not messages:
        wrong("input", "reasoning alone", "at least one message")
    return messages


def _add(messages: list[dict[str, Any]], item: Any, where: str) -> None:
    """Add what an item is to the messages before it."""
    if not isinstance(item, dict):
        wrong(where, item, "an object with type, or with role and content")
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("role") not in _ROLES:
            wrong(f"{where}.role", item.get("role"), f"one of {', '.join(_ROLES)}")
        content = _content(item.get("content"), f"{where}.content")
        messages.append({"role": item["role"], "content": content})
    elif kind == "function_call":
        for name in ("call_id", "name"):
            if not isinstance(item.get(name), str):
                wrong(f"{where}.{name}", item.get(name), "a string")
        call_arguments(item.get("arguments"), f"{where}.arguments")
        # Calls of one answer, and the words before them, are one message of a chat.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        if not isinstance(item.get("call_id"), str):
            wrong(f"{where}.call_id", item.get("call_id"), "a string")
        content = _content(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    elif kind != "reasoning":  # of another model: nothing that is said
        expected = "message, function_call, function_call_output or reasoning"
        wrong(f"{where}.type", kind, expected)


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        wrong(where, value, f"a string, or a list of parts of type {' or '.join(_PARTS)}")
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind not in _PARTS:
            wrong(f"{where}[{place}].type", kind, f"{' or '.join(_PARTS)}; others are not read")
        if not isinstance(part.get("text"), str):
            wrong(f"{where}[{place}].text", part.get("text"), "a string")
    return "".join(part["text"] for part in value)
