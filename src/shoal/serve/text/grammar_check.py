"""Grammars of strangers, tried in another process before the engine sees them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from shoal.serve.http.errors import ApiError
from shoal.serve.http.limits import HttpLimits
from shoal.serve.text.confined import ConfinedProcess

_KEPT = 64
# Forms that wait for the one worker; more are refused until later.
_WAITING = 32


class GrammarCheck:
    """Turns forms into grammars with a worker that is killed when it takes too long.

    Args:
        limits: size and seconds of a form.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._waiting = 0
        self._worker = ConfinedProcess("shoal.serve.text.grammar_worker", limits.grammar_s)
        self._known: OrderedDict[str, str] = OrderedDict()

    async def grammar(self, form: Mapping[str, Any], param: str) -> str:
        """The grammar of a form.

        Args:
            form: see :mod:`shoal.serve.text.grammar`.
            param: the field it came from.

        Raises:
            ApiError: it is wrong, too large, takes too long, or too many wait.
        """
        text = json.dumps(form, sort_keys=True)
        if len(text) > self._limits.grammar_bytes:
            raise bad_form(param, f"larger than {self._limits.grammar_bytes} B")
        if text not in self._known:
            if self._waiting >= _WAITING:
                raise ApiError(
                    f"{self._waiting} grammars wait for compilation: expected at most {_WAITING}; "
                    "try again",
                    status=429,
                    code="overloaded",
                    retry_after_s=1,
                )
            self._waiting += 1
            try:
                self._known[text] = await self._try(form, param)
            finally:
                self._waiting -= 1
        self._known.move_to_end(text)
        grammar = self._known[text]
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return grammar

    async def stop(self) -> None:
        """End the worker."""
        await self._worker.stop()

    async def _try(self, form: Mapping[str, Any], param: str) -> str:
        try:
            message = await self._worker.ask({"form": form})
        except TimeoutError:
            raise bad_form(
                param, f"too large: not compiled within {self._limits.grammar_s:g} s"
            ) from None
        except EOFError:
            raise bad_form(param, "too large: it exceeds the memory limit of grammars") from None
        if message["kind"] == "bad":
            raise bad_form(param, message["message"])
        grammar: str = message["grammar"]
        return grammar


def bad_form(param: str, why: str) -> ApiError:
    """The error of a form that cannot be kept to."""
    return ApiError(
        f"{param}: {why}; give a smaller or simpler one", param=param, code="invalid_grammar"
    )
