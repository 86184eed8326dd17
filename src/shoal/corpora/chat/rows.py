"""The rows of a chat data set, checked: messages, or a prompt and its completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from shoal.core.errors import DataError, suggestion
from shoal.corpora.jsonl import whole_unicode

ROLES = ("system", "developer", "user", "assistant")
COLUMNS = ("messages", "prompt", "completion")
_RIGHT = (
    '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]} '
    'or {"prompt": "...", "completion": "..."}'
)


class ChatRow(NamedTuple):
    """One row: a conversation, or a text and how it goes on.

    Args:
        messages: each with role and content; empty for a row of plain text.
        first: number of the first message that is learned.
        prompt: of a row of plain text.
        completion: of a row of plain text.
    """

    messages: tuple[dict[str, str], ...] = ()
    first: int = 0
    prompt: str = ""
    completion: str = ""


def read_row(row: Mapping[str, Any], where: str) -> ChatRow:
    """A row, when it is what it should be.

    Args:
        row: by column.
        where: its place, for errors.

    Raises:
        DataError: it is not; says what is wrong, where, and what would be right.
    """
    if row.get("tools"):
        _wrong(where, "tools: function calls are not supported in training; remove such rows")
    if row.get("messages") is not None:
        messages = _messages(row["messages"], f"{where}: messages")
        return ChatRow(_with_turn(messages, 0, where))
    prompt, completion = row.get("prompt"), row.get("completion")
    if "prompt" not in row or "completion" not in row:
        if "messages" in row:
            _wrong(where, f"messages is null; give {_RIGHT}")
        named = ", ".join(map(repr, list(row)[:8])) or "nothing"
        hint = next((text for one in row if (text := suggestion(one, COLUMNS))), "")
        _wrong(
            where, f"no messages, and no prompt with completion, but {named}{hint}; give {_RIGHT}"
        )
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _messages(prompt, f"{where}: prompt")
        after = _messages(completion, f"{where}: completion")
        return ChatRow(_with_turn((*before, *after), len(before), where), len(before))
    for key, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str):
            _wrong(where, f"{key} is {_kind(value)}; give text, or messages in both columns")
    if not completion:
        _wrong(where, "completion is empty; give the target text")
    return ChatRow(prompt=whole_unicode(str(prompt)), completion=whole_unicode(str(completion)))


def _messages(value: Any, where: str) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list):
        _wrong(where, f"{_kind(value)}, not a list of messages; give {_RIGHT}")
    if not value:
        _wrong(where, f"an empty conversation; give {_RIGHT}")
    return tuple(_message(one, f"{where}[{number}]") for number, one in enumerate(value))


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        _wrong(where, f"{_kind(value)}, not an object with role and content")
    role = value.get("role")
    if role == "tool" or value.get("tool_calls") or value.get("function_call"):
        _wrong(where, "function calls are not supported in training; remove such conversations")
    if role not in ROLES:
        hint = suggestion(role, ROLES) if isinstance(role, str) else ""
        _wrong(where, f"role = {role!r}: expected one of {', '.join(ROLES)}{hint}")
    content = value.get("content")
    if isinstance(content, list):
        content = "".join(_part(one, f"{where}.content[{n}]") for n, one in enumerate(content))
    if not isinstance(content, str):
        _wrong(where, f"content is {_kind(content)}; give text")
    if role == "assistant" and not content:
        _wrong(where, "an empty answer of the assistant; give the target text")
    # The newer name of the same role; templates know the older one.
    return {
        "role": "system" if role == "developer" else role,
        "content": whole_unicode(content),
    }


def _part(value: Any, where: str) -> str:
    text = value.get("text") if isinstance(value, dict) and value.get("type") == "text" else None
    if not isinstance(text, str):
        kind = value.get("type") if isinstance(value, dict) else _kind(value)
        _wrong(where, f"{kind}: only parts of type text are trained on")
    return text


def _with_turn(
    messages: tuple[dict[str, str], ...], first: int, where: str
) -> tuple[dict[str, str], ...]:
    """The messages up to the assistant's last."""
    last = max(
        (n for n, one in enumerate(messages) if one["role"] == "assistant" and n >= first),
        default=None,
    )
    if last is None:
        _wrong(where, "no message of the assistant, so there is no target; remove the row")
    if messages[0]["role"] == "assistant":
        _wrong(
            where,
            "the first message is from the assistant; start with a message of the user "
            "or the system",
        )
    return messages[: last + 1]


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a truth value"}
    if value is None:
        return "null"
    return names.get(type(value), "a number" if isinstance(value, int | float) else "no text")


def _wrong(where: str, what: str) -> NoReturn:
    raise DataError(f"{where}: {what}")
