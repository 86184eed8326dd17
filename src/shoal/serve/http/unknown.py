"""Fields of a body that nothing here knows: ignored, as OpenAI and vLLM do, and named in a header.

A misspelled field would otherwise change an answer without notice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from shoal.core.errors import suggestion
from shoal.serve.http.limits import HttpLimits
from shoal.serve.http.openai import REFUSED_CHAT, REFUSED_TEXT
from shoal.serve.http.openapi import fields_of
from shoal.serve.http.responses import REFUSED_RESPONSES

log = logging.getLogger("shoal.serve")

WARNING = "x-shoal-warning"
"""Header of an answer to a request with unknown fields."""

# Fields of OpenAI's and vLLM's APIs that change nothing in an answer of this server.
_HARMLESS = frozenset(
    {
        "early_stopping", "length_penalty", "metadata", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "request_id", "safety_identifier", "service_tier",
        "spaces_between_special_tokens", "store", "user",
    }
)  # fmt: skip
_REFUSED: dict[str, Mapping[str, Any]] = {
    "/v1/completions": REFUSED_TEXT,
    "/v1/chat/completions": REFUSED_CHAT,
    "/v1/responses": REFUSED_RESPONSES,
}
# Names in a header, characters of each, and names that are logged: a client chooses them.
_NAMED, _CHARS, _LOGGED = 4, 80, 1000


class UnknownFields:
    """Notes unknown fields of requests."""

    def __init__(self, limits: HttpLimits) -> None:
        self._fields = fields_of(limits)
        self._known = {
            path: names | _REFUSED.get(path, {}).keys() | _HARMLESS
            for path, names in self._fields.items()
        }
        self._logged: set[str] = set()

    def note(self, request: Request, body: Mapping[str, Any]) -> None:
        """Let the answer to a request name the fields of its body that are not known."""
        path = request.url.path
        known, fields = self._known[path], self._fields[path]
        # Null is what clients send for a field that they do not use.
        unknown = [name for name, value in body.items() if name not in known and value is not None]
        if not unknown:
            return
        words = []
        for name in (name[:_CHARS] for name in unknown[:_NAMED]):
            words.append(f"unknown field {name!a}{suggestion(name, sorted(fields))}")
            if name not in self._logged and len(self._logged) < _LOGGED:
                self._logged.add(name)
                log.warning("%s: %s (said once; such fields are ignored)", path, words[-1])
        if len(unknown) > _NAMED:
            words.append(f"{len(unknown) - _NAMED} more")
        request.scope["state"]["warning"] = ", ".join(words)
