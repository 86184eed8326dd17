"""OpenAI's requests and answers: what is read of the one, how the other is written.

A field that would change the answer and is not supported is refused by name. A field that
would not, such as ``user``, is ignored, as OpenAI does with fields it does not know.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from shoal.serve.answer import Entry
from shoal.serve.client import ModelInfo
from shoal.serve.errors import ApiError
from shoal.serve.limits import HttpLimits

__all__ = [
    "Ask",
    "chat_logprobs",
    "completion_logprobs",
    "read_chat",
    "read_completion",
    "too_long",
    "usage",
]

# Value that means "not used" -> what is given otherwise is refused.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
}
_UNSUPPORTED_CHAT: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
}

_ROLES = ("system", "developer", "user", "assistant")
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of the older endpoint


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A request that was understood.

    Args:
        prompts: texts or token ids to continue; empty for a chat.
        messages: messages of a chat; empty for a completion.
        template_values: further names for the chat template.
        n: answers of each prompt.
        max_tokens: most new tokens; None for what fits.
        temperature: 0 is greedy.
        top_k: 0 for all.
        top_p: 1 for all.
        seed: of the first answer.
        stops: strings that end an answer.
        stop_ids: tokens that end it, besides the model's own.
        ignore_eos: go on when the model ends the text.
        logprobs: log probabilities a token; None for none.
        echo: begin each answer with its prompt.
        stream: send pieces as they come.
        include_usage: end the stream with a piece that has the number of tokens.
        token_ids: also report the ids of prompt and answer.
    """

    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    template_values: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stops: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    token_ids: bool = False


def _wrong(param: str, given: object, expected: str, *, code: str = "invalid_value") -> NoReturn:
    shown = repr(given)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    raise ApiError(f"{param} = {shown}: expected {expected}", param=param, code=code)


class _Fields:
    """The fields of a body, each read with its type and range."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def integer(self, name: str, low: int, high: int, default: int | None) -> int | None:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) is not int or not low <= value <= high:
            _wrong(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high:  # also refuses what is no number at all
            _wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._body.get(name)
        if value is not None and not isinstance(value, bool):
            _wrong(name, value, "true or false")
        return bool(value)

    def refuse(self, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
        for name, unused in unsupported.items():
            value = self._body.get(name)
            if not any(value == harmless for harmless in unused):
                raise ApiError(
                    f"{name} is not supported by this server; leave it out",
                    param=name,
                    code="unsupported_parameter",
                )


def _common(
    fields: _Fields, limits: HttpLimits, model: ModelInfo, served: Sequence[str]
) -> dict[str, Any]:
    name = fields.get("model")
    if not isinstance(name, str):
        _wrong("model", name, f"the name of a model: {', '.join(served)}")
    if name not in served:
        raise ApiError(
            f"model = {name[:80]!r}: no such model; this server has {', '.join(served)}",
            status=404,
            param="model",
            code="model_not_found",
        )
    fields.refuse(_UNSUPPORTED)
    n = fields.integer("n", 1, limits.choices, 1)
    assert n is not None
    best_of = fields.integer("best_of", 1, limits.choices, n)
    if best_of != n:
        _wrong("best_of", best_of, f"the same as n = {n}, or nothing", code="unsupported_parameter")
    top_p = fields.number("top_p", 0.0, 1.0, 1.0)
    if top_p == 0:
        _wrong("top_p", top_p, "a number above 0, up to 1; use temperature 0 for the best token")
    top_k = fields.integer("top_k", -1, model.vocab_size, 0)
    seed = fields.integer("seed", -(2**63), 2**63 - 1, None)
    stream = fields.flag("stream")
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        _wrong("stream_options", options, "an object")
    if options is not None and not stream:
        _wrong("stream_options", options, "nothing unless stream is true")
    include = (options or {}).get("include_usage")
    if include is not None and not isinstance(include, bool):
        _wrong("stream_options.include_usage", include, "true or false")
    return {
        "n": n,
        "temperature": fields.number("temperature", 0.0, 2.0, 1.0),
        "top_p": top_p,
        "top_k": max(0, top_k or 0),
        "seed": secrets.randbits(62) if seed is None else seed % 2**63,
        "stops": _stops(fields.get("stop"), limits),
        "stop_ids": _stop_ids(fields.get("stop_token_ids"), limits, model),
        "ignore_eos": fields.flag("ignore_eos"),
        "stream": stream,
        "include_usage": bool(include),
        "token_ids": fields.flag("return_token_ids"),
    }


def _stops(value: Any, limits: HttpLimits) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    expected = f"a string or up to {limits.stops} of 1 to {limits.stop_chars} characters"
    if not isinstance(stops, list) or len(stops) > limits.stops:
        _wrong("stop", value if isinstance(value, str) else type(value).__name__, expected)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= limits.stop_chars:
            _wrong("stop", stop if not isinstance(stop, str) else stop[:80], expected)
    return tuple(stops)


def _stop_ids(value: Any, limits: HttpLimits, model: ModelInfo) -> frozenset[int]:
    if value is None:
        return frozenset()
    expected = f"up to {limits.stops} token ids from 0 to {model.vocab_size - 1}"
    if not isinstance(value, list) or len(value) > limits.stops:
        _wrong("stop_token_ids", type(value).__name__, expected)
    for token in value:
        if type(token) is not int or not 0 <= token < model.vocab_size:
            _wrong("stop_token_ids", token, expected)
    return frozenset(value)


def read_completion(
    body: Mapping[str, Any], limits: HttpLimits, model: ModelInfo, served: Sequence[str]
) -> Ask:
    """A body of ``POST /v1/completions``.

    Raises:
        ApiError: a field is wrong or not supported; names it.
    """
    fields = _Fields(body)
    common = _common(fields, limits, model, served)
    logprobs = fields.integer("logprobs", 0, limits.logprobs, None)
    echo = fields.flag("echo")
    if echo and logprobs is not None:
        raise ApiError(
            "echo with logprobs: log probabilities of prompts are not supported; leave out one",
            param="echo",
            code="unsupported_parameter",
        )
    prompts = _prompts(fields.get("prompt"), limits, model)
    _check_batch(len(prompts), common["n"], limits)
    return Ask(
        prompts=prompts,
        max_tokens=fields.integer(
            "max_tokens", 1, model.max_position, min(_DEFAULT_COMPLETION_TOKENS, model.max_position)
        ),
        logprobs=logprobs,
        echo=echo,
        **common,
    )


def _check_batch(prompts: int, n: int, limits: HttpLimits) -> None:
    if prompts * n > limits.batch:
        raise ApiError(
            f"{prompts} prompts with n = {n}: expected at most {limits.batch} answers of one "
            "request; send several requests",
            param="prompt" if prompts > 1 else "n",
            code="invalid_value",
        )


def _prompts(value: Any, limits: HttpLimits, model: ModelInfo) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        return (value,)
    expected = "a string, a list of strings, a list of token ids, or a list of such lists"
    if not isinstance(value, list):
        _wrong("prompt", value, expected, code="missing" if value is None else "invalid_value")
    if not value:
        _wrong("prompt", value, f"{expected}, not empty")
    if isinstance(value[0], int):
        return (_token_ids(value, model),)
    if len(value) > limits.batch:
        _wrong("prompt", f"{len(value)} prompts", f"at most {limits.batch}")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if all(isinstance(item, list) for item in value):
        return tuple(_token_ids(item, model) for item in value)
    _wrong("prompt", "a mixture", expected)


def _token_ids(value: list[Any], model: ModelInfo) -> tuple[int, ...]:
    if not value:
        _wrong("prompt", value, "at least one token")
    if len(value) >= model.max_position:
        raise too_long(len(value), 1, model)
    for token in value:
        if type(token) is not int or not 0 <= token < model.vocab_size:
            _wrong("prompt", token, f"token ids from 0 to {model.vocab_size - 1}")
    return tuple(value)


def too_long(
    num_tokens: int, max_tokens: int, model: ModelInfo, *, param: str = "prompt"
) -> ApiError:
    """The error of a prompt that does not fit."""
    # A text far too long is not counted to its end.
    count = f"more than {model.max_position}" if num_tokens > model.max_position else num_tokens
    return ApiError(
        f"{param} of {count} tokens and {max_tokens} new ones: expected at most "
        f"{model.max_position} together; shorten it or ask for fewer tokens",
        param=param,
        code="context_length_exceeded",
    )


def read_chat(
    body: Mapping[str, Any], limits: HttpLimits, model: ModelInfo, served: Sequence[str]
) -> Ask:
    """A body of ``POST /v1/chat/completions``.

    Raises:
        ApiError: a field is wrong or not supported; names it.
    """
    fields = _Fields(body)
    common = _common(fields, limits, model, served)
    fields.refuse(_UNSUPPORTED_CHAT)
    top = fields.integer("top_logprobs", 0, limits.logprobs, None)
    wanted = fields.flag("logprobs")
    if top is not None and not wanted:
        _wrong("top_logprobs", top, "nothing unless logprobs is true")
    newer = fields.integer("max_completion_tokens", 1, model.max_position, None)
    older = fields.integer("max_tokens", 1, model.max_position, None)
    if newer is not None and older is not None and newer != older:
        _wrong("max_tokens", older, "nothing beside max_completion_tokens")
    _check_batch(1, common["n"], limits)
    return Ask(
        messages=_messages(fields.get("messages"), limits),
        template_values=_template_values(fields.get("chat_template_kwargs")),
        max_tokens=older if newer is None else newer,
        logprobs=(top or 0) if wanted else None,
        **common,
    )


def _template_values(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    expected = "up to 16 names with a string, number or boolean each"
    if not isinstance(value, dict) or len(value) > 16:
        _wrong("chat_template_kwargs", type(value).__name__, expected)
    for name, item in value.items():
        simple = isinstance(item, (str, int, float, bool)) or item is None
        if not name.isidentifier() or name in ("messages", "tools") or not simple:
            _wrong(f"chat_template_kwargs.{name[:80]}", item, expected)
    return dict(value)


def _messages(value: Any, limits: HttpLimits) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= limits.messages:
        given = f"{len(value)} messages" if isinstance(value, list) else value
        _wrong("messages", given, f"a list of 1 to {limits.messages} messages")
    return tuple(_message(item, f"messages[{index}]") for index, item in enumerate(value))


def _message(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _wrong(where, value, "an object with role and content")
    role = value.get("role")
    if role not in _ROLES:
        _wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    for name in ("tool_calls", "function_call", "audio"):
        if value.get(name):
            raise ApiError(
                f"{where}.{name} is not supported by this server; leave it out",
                param=f"{where}.{name}",
                code="unsupported_parameter",
            )
    message = {
        # The newer name of the same role; templates know the older one.
        "role": "system" if role == "developer" else role,
        "content": _content(value.get("content"), f"{where}.content"),
    }
    speaker = value.get("name")
    if isinstance(speaker, str):
        message["name"] = speaker
    return message


def _content(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _wrong(where, value, "a string, or a list of parts of type text")
    texts = []
    for index, item in enumerate(value):
        if not isinstance(item, dict) or item.get("type") != "text":
            kind = item.get("type") if isinstance(item, dict) else item
            _wrong(f"{where}[{index}].type", kind, "text; other parts are not supported")
        if not isinstance(item.get("text"), str):
            _wrong(f"{where}[{index}].text", item.get("text"), "a string")
        texts.append(item["text"])
    return "".join(texts)


# Answers


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    """The number of tokens of a request."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI writes this number for "never".
    return logprob if math.isfinite(logprob) else -9999.0


def _spell(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    """Log probabilities as chats have them."""

    def one(raw: bytes, logprob: float) -> dict[str, Any]:
        text = raw.decode(errors="replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        {
            **one(entry.raw, entry.logprob),
            "top_logprobs": [one(raw, logprob) for raw, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[Entry]) -> dict[str, Any]:
    """Log probabilities as completions have them."""
    return {
        "tokens": [_spell(entry.raw) for entry in entries],
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {
                **{_spell(raw): _finite(logprob) for raw, logprob in reversed(entry.top)},
                _spell(entry.raw): _finite(entry.logprob),
            }
            for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }
