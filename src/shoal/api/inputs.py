"""Prompts, conversations and options as users give them, each checked by its place."""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from shoal.api.sampling import SamplingOptions
from shoal.core.errors import ServeError, ShoalError, require

Prompt = str | list[int]

_TEXTS = "a text, a list of texts, or a list of lists of token ids"
# Fields of a request that hold a prompt; others are options of its sampling.
_PROMPT = re.compile(r"(prompt|messages|input)\b")


def place_of(name: str, given: object, place: int) -> str:
    """``name``, with a place in it where several were given."""
    return name if _listed(given) is None else f"{name}[{place}]"


def read_prompts(prompts: object) -> list[Prompt]:
    """Texts, or token ids; the ids are not checked.

    Raises:
        ServeError: they are neither.
    """
    if isinstance(prompts, str):
        return [prompts]
    items = _listed(prompts)
    if items is None:
        raise ServeError(f"prompts = {type(prompts).__name__}: expected {_TEXTS}")
    result: list[Prompt] = []
    for place, item in enumerate(items):
        tokens = _listed(item)
        if isinstance(item, str):
            result.append(item)
        elif tokens is not None:
            result.append(tokens)
        else:
            raise ServeError(
                f"prompts[{place}] = {item!r:.80}: expected a text or a list of token ids; "
                f"prompts are {_TEXTS}"
            )
    return result


def read_conversations(messages: object) -> list[object]:
    """One conversation, or several; the messages are not checked.

    Raises:
        ServeError: they are neither.
    """
    items = _listed(messages)
    if items is None:
        raise ServeError(
            f"messages = {type(messages).__name__}: expected a list of messages, each with role "
            "and content, or a list of such lists"
        )
    chats = [_listed(item) for item in items]
    if chats and None not in chats:
        return list(chats)
    return [items]


def read_params(given: object, number: int) -> list[SamplingOptions]:
    """The options of each of so many prompts; the defaults for None.

    Raises:
        ServeError: they are none, or not as many as the prompts.
    """
    items = _listed(given)
    params = []
    for place, one in enumerate([given] if items is None else items):
        one = SamplingOptions() if given is None else one
        if not isinstance(one, SamplingOptions):
            raise ServeError(
                f"{place_of('sampling_params', given, place)} = {one!r:.80}: expected "
                "shoal.SamplingParams(...)"
            )
        params.append(one)
    if items is None:
        return params * number
    require(
        len(params) == number,
        "sampling_params",
        f"{len(params)} of them",
        expected=f"one for all prompts, or one for each of the {number}",
        error=ServeError,
    )
    return params


def _listed(given: object) -> list[Any] | None:
    """Items of what has an order and is no text; None for anything else."""
    if isinstance(given, Sequence) and not isinstance(given, (str, bytes, bytearray)):
        return list(given)
    return None


class ErrorPlace:
    """Says in errors which prompt, or which of its options, is wrong.

    Args:
        prompt: its place.
        params: the place of its options.
    """

    def __init__(self, prompt: str, params: str = "") -> None:
        self._prompt, self._params = prompt, params

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        from shoal.serve.http.errors import ApiError

        if not isinstance(error, ShoalError):
            return
        option = isinstance(error, ApiError) and not _PROMPT.match(error.param or "prompt")
        where = self._params if option else self._prompt
        prefix = "" if str(error).startswith(where) else f"{where}: "
        raise ServeError(f"{prefix}{error}") from None
