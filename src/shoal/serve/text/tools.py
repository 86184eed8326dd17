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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.serve.http.fields import Fields, wrong
from shoal.serve.http.limits import HttpLimits
from shoal.serve.text.calls import CALL_BEGIN, CALL_END
from shoal.serve.text.structured import Form

# What comes before the arguments of a call, with its name.
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """What an answer may call.

    Args:
        given: as the request had it, for the chat template.
        form: what the answer must be; None if the model may choose to call nothing.
        named: the request names the function.
    """

    given: tuple[Mapping[str, Any], ...]
    form: Form | None = None
    named: bool = False


@dataclass(frozen=True)
class ToolCall:
    """A call that an answer makes.

    Args:
        id: by which the next message reports its result.
        name: of the function.
        arguments: JSON.
    """

    id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """As OpenAI has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


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
    return Tools(tuple(given), ("tools", form), named=choice != "required")


def _function(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        wrong(where, tool, "an object with type function")
    function = tool.get("function")
    if not isinstance(function, dict):
        wrong(f"{where}.function", function, "an object with a name")
    return read_function(function, f"{where}.function")


def read_function(function: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Name and parameters of a function.

    Raises:
        ApiError: they are not what they should be.
    """
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        wrong(f"{where}.name", name, "1 to 64 letters, digits, _, - and .")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object"}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        wrong(f"{where}.parameters", parameters, "a JSON schema of type object")
    return {"name": name, "parameters": parameters}


def read_call(call: Any, where: str) -> dict[str, Any]:
    """A call of an earlier answer, with its arguments as templates want them.

    Raises:
        ApiError: it is none.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        wrong(where, call, "a call with function.name and function.arguments")
    arguments = call_arguments(function.get("arguments"), f"{where}.function.arguments")
    identity = call.get("id")
    return {
        "id": identity if isinstance(identity, str) else "",
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def call_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """The arguments of a call; none if they are empty.

    Raises:
        ApiError: they are no JSON object.
    """
    try:
        value = {} if arguments in (None, "") else json.loads(arguments)
    except (TypeError, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        wrong(where, arguments, "a JSON object as a string")
    return value


@dataclass
class ToolCallDelta:
    """What is new of a call.

    Args:
        place: of the call among those of the answer.
        arguments: characters of its arguments.
        call: the call, where it begins.
    """

    place: int
    arguments: str
    call: ToolCall | None = None

    def as_json(self) -> dict[str, Any]:
        """As a chunk of a stream has it."""
        if self.call is None:
            return {"index": self.place, "function": {"arguments": self.arguments}}
        return {"index": self.place, **replace(self.call, arguments=self.arguments).as_json()}


class ToolCallReader:
    """Parts the text of an answer, as it comes, into words and calls.

    A call has begun when its name and the first sign of its arguments are there. From then on
    its arguments are passed on as they come, so that one that breaks off has a part of them.
    """

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._behind = False
        self._nesting: _Nesting | None = None
        self.calls: list[ToolCall] = []

    def feed(self, text: str, *, last: bool = False) -> tuple[str, list[ToolCallDelta]]:
        """Words that are certain, and what is new of calls.

        Args:
            text: what is new.
            last: nothing follows; what was begun and is no call becomes words.
        """
        self._held += text
        words: list[str] = []
        parts: list[ToolCallDelta] = []

        def say(text: str) -> None:
            # Blanks behind a call part it from what follows, and are no words.
            text = text.lstrip() if self._behind else text
            self._behind = self._behind and not text
            words.append(text)

        while True:
            if self._inside and self._nesting is None:
                self._open(parts)
            if self._nesting is not None and not self._pass_on(self._nesting, parts):
                break
            sign = CALL_END if self._inside else CALL_BEGIN
            before, there, after = self._held.partition(sign)
            if not there:
                break
            self._held = after
            if self._nesting is not None:
                self._nesting = None
                self._behind = True
            elif self._inside:
                call = _parse(before)
                if call is None:
                    say(f"{CALL_BEGIN}{before}{CALL_END}")
                else:
                    self._add(call, parts)
                    self._behind = True
            else:
                say(before)
            self._inside = not self._inside
        if last:
            if self._nesting is None:
                say(f"{CALL_BEGIN}{self._held}" if self._inside else self._held)
            self._held, self._inside, self._nesting = "", False, None
        elif not self._inside:
            keep = _begun(self._held)
            say(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
        return "".join(words), parts

    def _open(self, parts: list[ToolCallDelta]) -> None:
        """Begin a call whose arguments have begun."""
        head = _HEAD.match(self._held)
        if head is None:
            return
        try:
            name = json.loads(head.group(1))
        except ValueError:
            return
        self._held = self._held[head.end() :]
        self._nesting = _Nesting()
        self._add(ToolCall(_call_id(), name, ""), parts)

    def _add(self, call: ToolCall, parts: list[ToolCallDelta]) -> None:
        parts.append(ToolCallDelta(len(self.calls), call.arguments, call))
        self.calls.append(call)

    def _pass_on(self, nesting: _Nesting, parts: list[ToolCallDelta]) -> bool:
        """Take what is here of the arguments; whether they are whole."""
        end = nesting.end(self._held)
        new, self._held = self._held[:end], self._held[end:]
        if new:
            call = self.calls[-1]
            self.calls[-1] = replace(call, arguments=call.arguments + new)
            if parts and parts[-1].place == len(self.calls) - 1:
                parts[-1].arguments += new
            else:
                parts.append(ToolCallDelta(len(self.calls) - 1, new))
        return nesting.closed


class _Nesting:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self.closed = False

    def end(self, text: str) -> int:
        """How many of the characters belong to the object."""
        if self.closed:
            return 0
        for place, sign in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = sign == "\\"
                self._quoted = sign != '"'
            elif sign == '"':
                self._quoted = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.closed = True
                    return place + 1
        return len(text)


def _begun(text: str) -> int:
    """Length of the longest end of the text that a call may begin with."""
    for length in range(min(len(text), len(CALL_BEGIN) - 1), 0, -1):
        if CALL_BEGIN.startswith(text[-length:]):
            return length
    return 0


def _parse(text: str) -> ToolCall | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return ToolCall(_call_id(), value["name"], json.dumps(arguments, ensure_ascii=False))


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
