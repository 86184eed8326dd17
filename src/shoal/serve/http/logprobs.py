"""Log probabilities and numbers of tokens, as OpenAI's answers have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shoal.serve.http.answer import LogprobEntry


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The number of tokens of a request; ``cached_tokens`` of its prompts were not computed."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def _finite(logprob: float) -> float:
    # JSON has no infinity; OpenAI writes this number for "never".
    return logprob if math.isfinite(logprob) else -9999.0


def _spell(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(entries: Sequence[LogprobEntry]) -> dict[str, Any]:
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


def completion_logprobs(
    entries: Sequence[LogprobEntry], start: int, prompt: Sequence[LogprobEntry] = ()
) -> dict[str, Any]:
    """Log probabilities as completions have them.

    Args:
        entries: of an answer.
        start: characters of its prompt.
        prompt: of the prompt, where it is echoed; its first token has none.
    """
    every: list[LogprobEntry] = [*prompt, *entries]
    logprobs: list[float | None] = [_finite(entry.logprob) for entry in every]
    best: list[dict[str, float] | None] = [
        {
            **{_spell(raw): _finite(logprob) for raw, logprob in reversed(entry.top)},
            _spell(entry.raw): _finite(entry.logprob),
        }
        for entry in every
    ]
    if prompt:
        logprobs[0] = best[0] = None
    offsets = [entry.offset for entry in prompt] + [start + entry.offset for entry in entries]
    return {
        "tokens": [_spell(entry.raw) for entry in every],
        "token_logprobs": logprobs,
        "top_logprobs": best,
        "text_offset": offsets,
    }
