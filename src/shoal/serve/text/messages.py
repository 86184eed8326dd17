"""The messages of a chat, as chat templates want them."""

from __future__ import annotations

from typing import Any

from shoal.serve.http.errors import ApiError
from shoal.serve.http.fields import wrong
from shoal.serve.http.limits import HttpLimits
from shoal.serve.text.tools import read_call

_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(value: Any, limits: HttpLimits) -> tuple[dict[str, Any], ...]:
    """The field ``messages``.

    Raises:
        ApiError: it is not what it should be; names the message.
    """
    if not isinstance(value, list) or not 1 <= len(value) <= limits.messages:
        given = f"{len(value)} messages" if isinstance(value, list) else value
        wrong("messages", given, f"a list of 1 to {limits.messages} messages")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        wrong(where, value, "an object with role and content")
    role = value.get("role")
    if role not in _ROLES:
        wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    for name in ("function_call", "audio"):
        if value.get(name):
            raise ApiError(
                f"{where}.{name} is not supported by this server; leave it out",
                param=f"{where}.{name}",
                code="unsupported_parameter",
            )
    calls = value.get("tool_calls")
    if calls not in (None, []):
        if role != "assistant" or not isinstance(calls, list):
            wrong(f"{where}.tool_calls", calls, "a list of calls, in a message of the assistant")
        calls = [read_call(one, f"{where}.tool_calls[{i}]") for i, one in enumerate(calls)]
    silent = bool(calls) and value.get("content") is None
    message: dict[str, Any] = {
        # The newer name of the same role; templates know the older one.
        "role": "system" if role == "developer" else role,
        "content": "" if silent else _content(value.get("content"), f"{where}.content"),
    }
    if calls:
        message["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        text = value.get(name)
        if text is not None:
            if not isinstance(text, str):
                wrong(f"{where}.{name}", text, "a string")
            message[name] = text
    return message


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        wrong(where, value, "a string, or a list of parts of type text")
    texts = []
    for index, item in enumerate(value):
        if not isinstance(item, dict) or item.get("type") != "text":
            kind = item.get("type") if isinstance(item, dict) else item
            wrong(f"{where}[{index}].type", kind, "text; other parts are not supported")
        if not isinstance(item.get("text"), str):
            wrong(f"{where}[{index}].text", item.get("text"), "a string")
        texts.append(item["text"])
    return "".join(texts)
