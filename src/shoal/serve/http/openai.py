"""OpenAI's requests: the fields of a body become what is asked of the engine.

A field that would change the answer and is not supported is refused by name. A field that
would not, such as ``user``, is ignored. One that is not known is ignored too, and the answer says
so: see :mod:`shoal.serve.http.unknown`.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.ir.serving import MIN_REPETITION_PENALTY, MIN_TEMPERATURE, SamplingParams
from shoal.serve.engine.link import ModelInfo
from shoal.serve.http.errors import ApiError
from shoal.serve.http.fields import Fields, wrong
from shoal.serve.http.limits import HttpLimits
from shoal.serve.text.messages import read_messages
from shoal.serve.text.structured import Form, read_form
from shoal.serve.text.tools import Tools, read_tools

_REFUSED: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "prompt_logprobs": (None,),
    "guided_grammar": (None,),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "logits_processors": (None, []),
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
}
REFUSED_TEXT: dict[str, tuple[Any, ...]] = {
    **_REFUSED,
    "workers": (None, 1),
    "add_special_tokens": (None, True),
}
"""Fields of completions that would change the answer -> the values that mean "not used"."""
REFUSED_CHAT: dict[str, tuple[Any, ...]] = {
    **_REFUSED,
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
}
"""The same of chats."""

_SALT_CHARS = 256
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of the older endpoint


@dataclass(frozen=True, kw_only=True)
class ParsedRequest:
    """A request that was understood.

    Args:
        given: the field that has the prompt.
        prompts: texts or token ids to continue; empty for a chat.
        messages: messages of a chat; empty for a completion.
        template_values: further names for the chat template.
        n: answers of each prompt.
        best_of: answers to choose them from.
        max_tokens: most new tokens; None for what fits.
        sampling: of the first answer; ``max_tokens`` and the model's own stop tokens are open.
        form: what an answer must be; None for anything.
        tools: functions that the answer may call; None for none.
        stops: strings that end an answer.
        keep_stop: an answer has the string that ended it.
        ignore_eos: go on when the model ends the text.
        priority: smaller numbers run first, if the scheduler uses priorities.
        model: the requested model, or an adapter of it.
        salt: cached prompts are shared only with requests of the same one.
        echo: begin each answer with its prompt.
        prompt_only: the answer is the prompt alone; one token is computed and left out.
        stream: send pieces as they come.
        include_usage: end the stream with a piece that has the number of tokens.
        token_ids: also report the ids of prompt and answer.
    """

    given: str = "prompt"
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    template_values: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    best_of: int = 1
    max_tokens: int | None = None
    sampling: SamplingParams
    form: Form | None = None
    tools: Tools | None = None
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    ignore_eos: bool = False
    priority: int = 0
    model: str = ""
    salt: str = ""
    echo: bool = False
    prompt_only: bool = False
    stream: bool = False
    include_usage: bool = False
    token_ids: bool = False

    @property
    def logprobs(self) -> int | None:
        """Log probabilities a token; None for none."""
        return self.sampling.logprobs


def check_model(fields: Fields, served: Sequence[str]) -> None:
    """Refuse a model that is not served.

    Raises:
        ApiError: 404 for another name.
    """
    name = fields.get("model")
    if not isinstance(name, str):
        wrong("model", name, f"the name of a model: {', '.join(served)}")
    if name not in served:
        raise ApiError(
            f"model = {name[:80]!r}: unknown model; this server has {', '.join(served)}",
            status=404,
            param="model",
            code="model_not_found",
        )


def _common(
    fields: Fields,
    limits: HttpLimits,
    served: Sequence[str],
    refused: Mapping[str, tuple[Any, ...]],
) -> dict[str, Any]:
    check_model(fields, served)
    fields.refuse(refused)
    n = fields.integer("n", 1, limits.choices, 1)
    assert n is not None
    best_of = fields.integer("best_of", 1, limits.choices, n)
    assert best_of is not None
    if best_of < n:
        wrong("best_of", best_of, f"at least n = {n}")
    stream = fields.flag("stream")
    if best_of > n and stream:
        wrong("best_of", best_of, f"n = {n} with stream: the best are known at the end")
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        wrong("stream_options", options, "an object")
    if options is not None and not stream:
        wrong("stream_options", options, "nothing unless stream is true")
    include = (options or {}).get("include_usage")
    if include is not None and not isinstance(include, bool):
        wrong("stream_options.include_usage", include, "true or false")
    return {
        "n": n,
        "best_of": best_of,
        "form": read_form(fields),
        "stops": _stops(fields.get("stop"), limits),
        "keep_stop": fields.flag("include_stop_str_in_output"),
        "ignore_eos": fields.flag("ignore_eos"),
        "stream": stream,
        "include_usage": bool(include),
        "token_ids": fields.flag("return_token_ids"),
        "priority": fields.integer("priority", -(2**31), 2**31 - 1, 0) or 0,
        "model": fields.get("model") or served[0],
        "salt": _salt(fields.get("cache_salt")),
    }


def _salt(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not 1 <= len(value) <= _SALT_CHARS:
        wrong("cache_salt", value, f"a string of 1 to {_SALT_CHARS} characters")
    return value


def _check_form(fields: Fields, form: Form | None) -> None:
    for name, value in (
        ("ignore_eos", fields.get("ignore_eos")),
        ("min_tokens", fields.get("min_tokens")),
    ):
        if form is not None and value:
            wrong(name, value, f"nothing beside {form[0]}, which says when to end")


def _sampling(
    fields: Fields,
    limits: HttpLimits,
    model: ModelInfo,
    *,
    max_tokens: int | None,
    logprobs: int | None,
) -> SamplingParams:
    top_p = fields.number("top_p", 0.0, 1.0, 1.0)
    if top_p == 0:
        wrong("top_p", top_p, "a number above 0, up to 1; use temperature 0 for the best token")
    temperature = fields.number("temperature", 0.0, 2.0, 1.0)
    if 0 < temperature < MIN_TEMPERATURE:
        expected = f"0 for the best token, or a number from {MIN_TEMPERATURE:g} to 2"
        wrong("temperature", temperature, expected)
    repetition = fields.number("repetition_penalty", MIN_REPETITION_PENALTY, 10.0, 1.0)
    top_k = fields.integer("top_k", -1, model.vocab_size, 0)
    seed = fields.integer("seed", -(2**63), 2**63 - 1, None)
    most = max_tokens or model.max_position
    streams = fields.get("streams")
    if streams is not None and (type(streams) is not int or not 1 <= streams <= model.streams):
        wrong("streams", streams, f"an integer from 1 to {model.streams}, the model's streams")
    compute = None
    if fields.get("compute") is not None:
        compute = fields.number("compute", 0.0, 1.0, 1.0)
    if compute is not None and not model.shares:
        wrong("compute", compute, "nothing: the model has no trained routers (ffn: duo)")
    if compute == 0:
        wrong("compute", compute, "a number above 0, up to 1")
    return SamplingParams(
        max_tokens=most,
        temperature=temperature,
        top_p=top_p,
        top_k=max(0, top_k or 0),
        min_p=fields.number("min_p", 0.0, 1.0, 0.0),
        seed=secrets.randbits(62) if seed is None else seed % 2**63,
        stop_ids=_stop_ids(fields.get("stop_token_ids"), limits, model),
        logprobs=logprobs,
        repetition_penalty=repetition,
        frequency_penalty=fields.number("frequency_penalty", -2.0, 2.0, 0.0),
        presence_penalty=fields.number("presence_penalty", -2.0, 2.0, 0.0),
        logit_bias=_bias(fields.get("logit_bias"), limits, model),
        min_tokens=fields.integer("min_tokens", 0, most, 0) or 0,
        streams=streams,
        compute=compute,
    )


def _bias(value: Any, limits: HttpLimits, model: ModelInfo) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > limits.biases:
        given = f"{len(value)} tokens" if isinstance(value, dict) else value
        wrong("logit_bias", given, f"an object of up to {limits.biases} token ids")
    values: dict[int, float] = {}
    for name, bias in value.items():
        token = int(name) if name.isascii() and name.isdecimal() and len(name) <= 9 else -1
        if not 0 <= token < model.vocab_size:
            wrong("logit_bias", name, f"token ids from 0 to {model.vocab_size - 1} as names")
        number = isinstance(bias, (int, float)) and not isinstance(bias, bool)
        if not number or not -100 <= bias <= 100:
            wrong(f"logit_bias.{token}", bias, "a number from -100 to 100")
        values[token] = float(bias)
    return tuple(values.items())


def _stops(value: Any, limits: HttpLimits) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    expected = f"a string or up to {limits.stops} of 1 to {limits.stop_chars} characters"
    if not isinstance(stops, list) or len(stops) > limits.stops:
        wrong("stop", value if isinstance(value, str) else type(value).__name__, expected)
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= limits.stop_chars:
            wrong("stop", stop if not isinstance(stop, str) else stop[:80], expected)
    return tuple(stops)


def _stop_ids(value: Any, limits: HttpLimits, model: ModelInfo) -> frozenset[int]:
    if value is None:
        return frozenset()
    expected = f"up to {limits.stops} token ids from 0 to {model.vocab_size - 1}"
    if not isinstance(value, list) or len(value) > limits.stops:
        wrong("stop_token_ids", type(value).__name__, expected)
    for token in value:
        if type(token) is not int or not 0 <= token < model.vocab_size:
            wrong("stop_token_ids", token, expected)
    return frozenset(value)


def read_completion(
    body: Mapping[str, Any], limits: HttpLimits, model: ModelInfo, served: Sequence[str]
) -> ParsedRequest:
    """A body of ``POST /v1/completions``.

    Raises:
        ApiError: a field is wrong or not supported; names it.
    """
    fields = Fields(body)
    common = _common(fields, limits, served, REFUSED_TEXT)
    logprobs = fields.integer("logprobs", 0, limits.logprobs, None)
    echo = fields.flag("echo")
    _check_form(fields, common["form"])
    prompts = read_prompts(fields.get("prompt"), limits, model, "prompt")
    _check_batch(len(prompts), common["best_of"], limits)
    default = min(_DEFAULT_COMPLETION_TOKENS, model.max_position)
    wanted = fields.integer("max_tokens", 0, model.max_position, default)
    if wanted == 0 and not echo:
        wrong("max_tokens", 0, f"1 to {model.max_position}, or 0 with echo: the prompt alone")
    most = max(1, wanted or 0)
    sampling = _sampling(fields, limits, model, max_tokens=most, logprobs=logprobs)
    return ParsedRequest(
        prompts=prompts,
        max_tokens=most,
        sampling=replace(sampling, prompt_logprobs=logprobs if echo else None),
        echo=echo,
        prompt_only=wanted == 0,
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


def read_prompts(
    value: Any, limits: HttpLimits, model: ModelInfo, param: str
) -> tuple[str | tuple[int, ...], ...]:
    """One or several texts, or their tokens.

    Raises:
        ApiError: they are none of it; names the field ``param``.
    """
    if isinstance(value, str):
        return (value,)
    expected = "a string, a list of strings, a list of token ids, or a list of such lists"
    if not isinstance(value, list):
        wrong(param, value, expected, code="missing" if value is None else "invalid_value")
    if not value:
        wrong(param, value, f"{expected}, not empty")
    if isinstance(value[0], int):
        return (_token_ids(value, model, param),)
    if len(value) > limits.batch:
        wrong(param, f"{len(value)} prompts", f"at most {limits.batch}")
    if all(isinstance(item, str) for item in value):
        return tuple(value)
    if not all(isinstance(item, list) for item in value):
        wrong(param, "a mixture", expected)
    return tuple(_token_ids(item, model, param) for item in value)


def _token_ids(value: list[Any], model: ModelInfo, param: str) -> tuple[int, ...]:
    if not value:
        wrong(param, value, "at least one token")
    if len(value) >= model.max_position:
        raise too_long(len(value), 1, model, param=param)
    for token in value:
        if type(token) is not int or not 0 <= token < model.vocab_size:
            wrong(param, token, f"token ids from 0 to {model.vocab_size - 1}")
    return tuple(value)


def too_long(
    num_tokens: int,
    max_tokens: int,
    model: ModelInfo,
    *,
    param: str = "prompt",
    estimated: bool = False,
) -> ApiError:
    """The error of a prompt that does not fit; ``estimated`` of one not counted to its end."""
    count = f"about {num_tokens}" if estimated else num_tokens
    return ApiError(
        f"{param} of {count} tokens and {max_tokens} new ones: expected at most "
        f"{model.max_position} together; shorten it or ask for fewer tokens",
        param=param,
        code="context_length_exceeded",
    )


def read_chat(
    body: Mapping[str, Any], limits: HttpLimits, model: ModelInfo, served: Sequence[str]
) -> ParsedRequest:
    """A body of ``POST /v1/chat/completions``.

    Raises:
        ApiError: a field is wrong or not supported; names it.
    """
    fields = Fields(body)
    common = _common(fields, limits, served, REFUSED_CHAT)
    top = fields.integer("top_logprobs", 0, limits.logprobs, None)
    wanted = fields.flag("logprobs")
    if top is not None and not wanted:
        wrong("top_logprobs", top, "nothing unless logprobs is true")
    newer = fields.integer("max_completion_tokens", 1, model.max_position, None)
    older = fields.integer("max_tokens", 1, model.max_position, None)
    if newer is not None and older is not None and newer != older:
        wrong("max_tokens", older, "nothing beside max_completion_tokens")
    if common["best_of"] != common["n"]:
        wrong("best_of", common["best_of"], f"the same as n = {common['n']}, or nothing")
    workers = _workers(fields, model, common["n"])
    if workers > 1:
        common["n"] = common["best_of"] = workers
    _check_batch(1, common["n"], limits)
    tools = read_tools(fields, limits)
    if tools is not None and tools.form is not None:
        if common["form"] is not None:
            wrong(
                "tool_choice", fields.get("tool_choice"), f"auto or none beside {common['form'][0]}"
            )
        common["form"] = tools.form
    if workers > 1 and common["form"] is not None:
        wrong(common["form"][0], "a form", "nothing beside workers, who write to each other, too")
    _check_form(fields, common["form"])
    most = older if newer is None else newer
    logprobs = (top or 0) if wanted else None
    return ParsedRequest(
        given="messages",
        tools=tools,
        messages=read_messages(fields.get("messages"), limits),
        template_values=read_template_values(fields.get("chat_template_kwargs")),
        max_tokens=most,
        sampling=replace(
            _sampling(fields, limits, model, max_tokens=most, logprobs=logprobs), workers=workers
        ),
        **common,
    )


def _workers(fields: Fields, model: ModelInfo, n: int) -> int:
    """Concurrent workers of a request: each is a choice of the answer."""
    workers = fields.get("workers")
    if workers is None:
        return model.workers if n == 1 else 1
    if type(workers) is not int or not 1 <= workers <= model.workers:
        most = f"an integer from 1 to {model.workers}"
        wrong("workers", workers, most if model.workers > 1 else "1 without decode = hogwild")
    if workers > 1 and n > 1:
        wrong("workers", workers, f"1 with n = {n}: workers are the choices of an answer")
    return workers


def read_template_values(value: Any) -> dict[str, Any]:
    """Further names for a chat template.

    Raises:
        ApiError: they are not what they should be.
    """
    if value is None:
        return {}
    expected = "up to 16 names with a string, number or boolean each"
    if not isinstance(value, dict) or len(value) > 16:
        wrong("chat_template_kwargs", type(value).__name__, expected)
    for name, item in value.items():
        simple = isinstance(item, (str, int, float, bool)) or item is None
        if not name.isidentifier() or name in ("messages", "tools") or not simple:
            wrong(f"chat_template_kwargs.{name[:80]}", item, expected)
    return dict(value)
