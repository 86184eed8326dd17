"""Calls of functions: which ones a request offers, and those that an answer makes.

A model calls a function by writing, in one format, that of Hermes and Qwen::

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Several calls follow each other. Where the request leaves the choice to the model, its text is
read for calls; where a call is required, the answer has the form of one.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.serve.calls import CALL_BEGIN, CALL_END
from shoal.serve.fields import Fields, wrong
from shoal.serve.limits import HttpLimits
from shoal.serve.structured import Form

__all__ = ["Call", "CallReader", "Tools", "read_call", "read_tools"]

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """What an answer may call.

    Args:
        given: as the request had it, for the chat template.
        form: what the answer must be; None if the model may choose to call nothing.
    """

    given: tuple[Mapping[str, Any], ...]
    form: Form | None = None


@dataclass(frozen=True)
class Call:
    """A call that an answer makes.

    Args:
        id: by which the next message tells what came of it.
        name: of the function.
        arguments: JSON.
    """

    id: str
    name: str
    arguments: str

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """As OpenAI has it; with its place in a chunk of a stream."""
        place = {} if index is None else {"index": index}
        function = {"name": self.name, "arguments": self.arguments}
        return {**place, "id": self.id, "type": "function", "function": function}


def read_tools(fields: Fields, limits: HttpLimits) -> Tools | None:
    """The tools of a chat; None if there are none, or none may be called.

    Raises:
        ApiError: they are not what they should be.
    """
    given = fields.get("tools")
    choice = fields.get("tool_choice")
    many = fields.get("parallel_tool_calls")
    if many is not None and not isinstance(many, bool):
        wrong("parallel_tool_calls", many, "true or false")
    if not given:
        if given not in (None, []):
            wrong("tools", given, "a list of functions")
        if choice not in (None, "none", "auto"):
            wrong("tool_choice", choice, "none or auto, since there are no tools")
        return None
    if not isinstance(given, list) or len(given) > limits.tools:
        wrong("tools", type(given).__name__, f"a list of up to {limits.tools} functions")
    functions = [_function(tool, f"tools[{place}]") for place, tool in enumerate(given)]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        wrong("tools", names, "each name once")
    if choice == "none":
        return None
    if choice in (None, "auto"):
        return Tools(tuple(given))
    if choice != "required":
        named = choice.get("function") if isinstance(choice, dict) else None
        name = named.get("name") if isinstance(named, dict) else choice
        if name not in names:
            wrong("tool_choice", name, f"none, auto, required or one of {', '.join(names)[:200]}")
        functions = [function for function in functions if function["name"] == name]
        many = False
    form = {"tools": {"functions": functions, "many": many is not False}}
    return Tools(tuple(given), ("tools", form))


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        wrong(where, tool, "an object with type function")
    function = tool.get("function")
    if not isinstance(function, dict):
        wrong(f"{where}.function", function, "an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wrong(f"{where}.function.name", name, "1 to 64 letters, digits, _, - and .")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object"}
    if not isinstance(parameters, dict):
        wrong(f"{where}.function.parameters", parameters, "a JSON schema")
    return {"name": name, "parameters": parameters}


def read_call(call: Any, where: str) -> dict[str, Any]:
    """A call of an earlier answer, with its arguments as templates want them.

    Raises:
        ApiError: it is none.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        wrong(where, call, "a call with function.name and function.arguments")
    arguments = function.get("arguments")
    try:
        value = json.loads(arguments) if isinstance(arguments, str) and arguments else {}
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        wrong(f"{where}.function.arguments", arguments, "a JSON object as a string")
    identity = call.get("id")
    return {
        "id": identity if isinstance(identity, str) else "",
        "type": "function",
        "function": {"name": function["name"], "arguments": value},
    }


class CallReader:
    """Parts the text of an answer, as it comes, into words and calls."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._behind = False
        self.calls: list[Call] = []

    def feed(self, text: str, *, last: bool = False) -> tuple[str, Sequence[Call]]:
        """Words that are certain, and calls that are whole.

        Args:
            text: what is new.
            last: nothing follows; what was begun and is no call becomes words.
        """
        self._held += text
        words: list[str] = []
        found: list[Call] = []

        def say(text: str) -> None:
            # Blanks behind a call part it from what follows, and are no words.
            text = text.lstrip() if self._behind else text
            self._behind = self._behind and not text
            words.append(text)

        while True:
            sign = CALL_END if self._inside else CALL_BEGIN
            before, there, after = self._held.partition(sign)
            if not there:
                break
            self._held = after
            if self._inside:
                call = _parse(before)
                if call is None:
                    say(f"{CALL_BEGIN}{before}{CALL_END}")
                else:
                    found.append(call)
                    self._behind = True
            else:
                say(before)
            self._inside = not self._inside
        if last:
            say(f"{CALL_BEGIN}{self._held}" if self._inside else self._held)
            self._held, self._inside = "", False
        elif not self._inside:
            keep = _begun(self._held)
            say(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        self.calls += found
        return "".join(words), found


def _begun(text: str) -> int:
    """Length of the longest end of the text that a call may begin with."""
    for length in range(min(len(text), len(CALL_BEGIN) - 1), 0, -1):
        if CALL_BEGIN.startswith(text[-length:]):
            return length
    return 0


def _parse(text: str) -> Call | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return Call(
        f"call_{secrets.token_hex(12)}", value["name"], json.dumps(arguments, ensure_ascii=False)
    )
