"""Grammars of strangers, tried in another process before the engine sees them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from shoal.serve.errors import ApiError
from shoal.serve.limits import HttpLimits
from shoal.serve.wire import Decoder, encode

__all__ = ["GrammarCheck"]

_READ_BYTES = 2**16
_KEPT = 64
# Forms that wait for the one worker; more are told to try again.
_WAITING = 32
_START_S = 30.0


class GrammarCheck:
    """Turns forms into grammars with a worker that is killed when it takes too long.

    Args:
        limits: size and seconds of a form.
    """

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._lock = asyncio.Lock()
        self._waiting = 0
        self._worker: asyncio.subprocess.Process | None = None
        self._decoder = Decoder()
        self._known: OrderedDict[str, str] = OrderedDict()

    async def grammar(self, form: Mapping[str, Any], param: str) -> str:
        """The grammar of a form.

        Args:
            form: see :mod:`shoal.serve.grammar`.
            param: the field it came from.

        Raises:
            ApiError: it is wrong, too large, takes too long, or too many wait.
        """
        text = json.dumps(form, sort_keys=True)
        if len(text) > self._limits.grammar_bytes:
            raise _bad(param, f"larger than {self._limits.grammar_bytes} B")
        if text not in self._known:
            if self._waiting >= _WAITING:
                raise ApiError(
                    f"{self._waiting} grammars wait to be read: expected at most {_WAITING}; "
                    "try again",
                    status=429,
                    code="overloaded",
                    retry_after_s=1,
                )
            self._waiting += 1
            try:
                async with self._lock:
                    self._known[text] = await self._try(form, param)
            finally:
                self._waiting -= 1
        self._known.move_to_end(text)
        found = self._known[text]
        while len(self._known) > _KEPT:
            self._known.popitem(last=False)
        return found

    async def stop(self) -> None:
        """End the worker."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        with contextlib.suppress(ProcessLookupError):
            worker.kill()
        # Both pipes at their ends, so that nothing of it is left open.
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.close()
        await worker.stdout.read()
        await worker.wait()

    async def _try(self, form: Mapping[str, Any], param: str) -> str:
        try:
            if self._worker is None:
                await self._start()
            async with asyncio.timeout(self._limits.grammar_s):
                message = await self._ask({"form": form})
        except TimeoutError:
            await self.stop()
            raise _bad(
                param, f"too large: not compiled within {self._limits.grammar_s:g} s"
            ) from None
        except (EOFError, OSError):
            await self.stop()
            raise _bad(param, "too large: it takes more memory than a grammar may") from None
        except BaseException:  # the client left; what the worker says next is for nobody
            await self.stop()
            raise
        if message["kind"] == "bad":
            raise _bad(param, message["message"])
        grammar: str = message["grammar"]
        return grammar

    async def _start(self) -> None:
        self._decoder = Decoder()
        self._worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "shoal.serve.grammar_worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        async with asyncio.timeout(_START_S):
            await self._receive()

    async def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._worker is not None and self._worker.stdin is not None
        self._worker.stdin.write(encode(message))
        await self._worker.stdin.drain()
        return await self._receive()

    async def _receive(self) -> dict[str, Any]:
        assert self._worker is not None and self._worker.stdout is not None
        while data := await self._worker.stdout.read(_READ_BYTES):
            for message in self._decoder.feed(data):
                return message
        raise EOFError


def _bad(param: str, why: str) -> ApiError:
    return ApiError(
        f"{param}: {why}; give a smaller or plainer one", param=param, code="invalid_grammar"
    )
