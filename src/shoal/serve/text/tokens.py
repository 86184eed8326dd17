"""Texts to tokens and back, in the shapes of vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal.serve.engine.link import ModelInfo
from shoal.serve.http.fields import Fields, wrong
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.openai import check_model
from shoal.serve.text.messages import read_messages


def read_tokenize(
    body: Mapping[str, Any], limits: HttpLimits, served: Sequence[str]
) -> tuple[str | tuple[dict[str, Any], ...], bool, bool]:
    """A body of ``POST /tokenize``: text or messages, with special tokens, with texts of tokens.

    Raises:
        ApiError: a field is wrong; names it.
    """
    fields = Fields(body)
    if fields.get("model") is not None:
        check_model(fields, served)
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        wrong("prompt", prompt, "a string, or messages instead")
    if messages is None and not isinstance(prompt, str):
        wrong("prompt", prompt, "a string")
    special = fields.get("add_special_tokens") is None or fields.flag("add_special_tokens")
    given = prompt if messages is None else read_messages(messages, limits)
    return given, special, fields.flag("return_token_strs")


def read_detokenize(
    body: Mapping[str, Any], model: ModelInfo, served: Sequence[str]
) -> tuple[int, ...]:
    """A body of ``POST /detokenize``.

    Raises:
        ApiError: a field is wrong; names it.
    """
    fields = Fields(body)
    if fields.get("model") is not None:
        check_model(fields, served)
    tokens = fields.get("tokens")
    expected = f"up to {model.max_position} token ids from 0 to {model.vocab_size - 1}"
    if not isinstance(tokens, list) or len(tokens) > model.max_position:
        wrong("tokens", type(tokens).__name__, expected)
    for token in tokens:
        if type(token) is not int or not 0 <= token < model.vocab_size:
            wrong("tokens", token, expected)
    return tuple(tokens)
