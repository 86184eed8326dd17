"""A stream that goes on at another replica, where the one that answered has gone.

The other replica is asked the same again, with the same seed, and says the answer from its
beginning. What the client has already is left out, once it was seen to be the same; the rest
follows as if nothing had happened. Where it says something else, the client gets an error: numbers
may differ in their last bits in other company, unless the server runs with ``exact``.

What carries more than text, such as log probabilities or calls of functions, is not resumed, and
nor are typed events, whose numbers and names would begin anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.core.errors import ServeError

DONE = b"[DONE]"

# Fields whose values come in pieces of a stream that their text does not distinguish.
_NOT_TEXT = ("logprobs", "tools", "return_token_ids")


class DivergedError(ServeError):
    """Another replica says something else."""


# The type of an event that has one is its first field.
_TYPE = re.compile(rb'\{"type":"([a-z_.]+)"')
_LAST = frozenset((b"response.completed", b"response.incomplete", b"response.failed", b"error"))


def type_of(data: bytes) -> bytes | None:
    """The type of a typed event, by its data; None for another one."""
    match = _TYPE.match(data)
    return match[1] if match else None


def is_last(data: bytes) -> bool:
    """Whether an event with this data is the last of its stream."""
    return data == DONE or type_of(data) in _LAST


def resumable(body: Mapping[str, Any]) -> bool:
    """Whether the stream of a request is text alone."""
    if "input" in body:  # typed events
        return False
    given = [body.get(name) for name in _NOT_TEXT]
    return all(value is None or value is False or value == [] for value in given)


def split_events(held: bytearray) -> Iterator[bytes]:
    """The data of all whole server-sent events; takes them out of ``held``."""
    while (end := held.find(b"\n\n")) >= 0:
        event = bytes(held[:end])
        del held[: end + 2]
        named, _, data = event.partition(b"data: ")
        if data and (not named or named.startswith(b"event: ")):
            yield data


@dataclass
class _Sent:
    """What a client has of one answer."""

    parts: list[str] = field(default_factory=list)
    text: str = ""
    opened: bool = False
    ended: bool = False
    at: int = 0  # characters of it that this replica has said


class Progress:
    """What a client has of a stream."""

    def __init__(self) -> None:
        self._answers: dict[int, _Sent] = {}
        self._name: dict[str, Any] = {}
        self._again = False
        self.num_events = 0

    def again(self) -> None:
        """Another replica restarts the same answer."""
        self._again = True
        for answer in self._answers.values():
            answer.text += "".join(answer.parts)
            answer.parts.clear()
            answer.at = 0

    def take(self, data: bytes) -> bytes | None:
        """What the client is to be sent of an event's data; None for nothing.

        Raises:
            DivergedError: the client has something else already.
        """
        event: dict[str, Any] = json.loads(data)
        if not self._name:
            self._name = {name: event[name] for name in ("id", "created") if name in event}
        if event.get("choices"):
            if not self._choice(event["choices"][0]):
                return None
        elif "error" in event:
            return data
        self.num_events += 1
        return data if not self._again else json.dumps({**event, **self._name}).encode()

    def _choice(self, choice: dict[str, Any]) -> bool:
        """Shorten a choice to what is new; whether anything is."""
        answer = self._answers.setdefault(choice["index"], _Sent())
        holder, key = choice.get("delta"), "content"
        if holder is None:
            holder, key = choice, "text"
        text = holder.get(key) or ""
        begun, answer.opened = answer.opened, True
        ends = choice["finish_reason"] is not None
        if not self._again:
            answer.parts.append(text)
            answer.ended = answer.ended or ends
            return True
        known = answer.text[answer.at : answer.at + len(text)]
        answer.at += len(text)
        over = answer.at - len(answer.text)
        if not text.startswith(known) or (ends and over < 0):
            raise DivergedError("another replica says something else")
        if over > 0:
            answer.text += text[len(known) :]
            if key in holder:
                holder[key] = text[len(known) :]
        elif key in holder:
            holder[key] = ""
        new = over > 0 or (ends and not answer.ended) or not begun
        answer.ended = answer.ended or ends
        return new
