"""Requests that were being answered when an engine died.

An engine that dies takes all answers under way with it, and which of them it died of is not known.
One that was there both times is the likely cause, and is not tried a third time: clients retry by
themselves, and every retry would end the answers of all others again.
"""

from __future__ import annotations

import hashlib
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import ClassVar

from shoal.ir.serving import Request, SamplingParams
from shoal.serve.engine.failure import RequestFailedError
from shoal.serve.engine.hooks import ClientHook

MOST_DEATHS = 2
"""Deaths of engines after which a request is not tried again."""

# So many kinds of requests are remembered, and each for so many s.
_KEPT = 4096
_FORGET_S = 600.0


def key_of(tokens: Sequence[int], params: SamplingParams, adapter: str | None) -> bytes:
    """What is the same for a request and for its retries: all but the seed.

    Args:
        tokens: of the prompt.
        params: how to sample.
        adapter: name of the adapter it is for.
    """
    plain = replace(params, seed=0, stop_ids=frozenset())
    digest = hashlib.blake2b(array("q", tokens).tobytes(), digest_size=16)
    digest.update(repr((plain, sorted(params.stop_ids), adapter)).encode())
    return digest.digest()


def _key(request: Request) -> bytes:
    return key_of(request.tokens, request.params, request.adapter)


class CrashHistory(ClientHook):
    """Which requests engines died with, and how often.

    Args:
        clock: s, monotonic.
    """

    kind: ClassVar[str] = "crashes"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Key -> which deaths, and when the last one was.
        self._met: OrderedDict[bytes, tuple[frozenset[Hashable], float]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._met)

    def opening(self, request: Request) -> None:
        if self:
            self.check(_key(request))

    def answered(self, request: Request) -> None:
        if self:
            self.served(_key(request))

    def lost(self, requests: Sequence[Request], restarts: int) -> None:
        self.died(map(_key, requests), restarts)

    def died(self, keys: Iterable[bytes], which: Hashable) -> None:
        """An engine died while requests of these keys were open.

        Args:
            keys: of the requests.
            which: names the death: several equal requests may meet the same one.
        """
        now = self._clock()
        for key in set(keys):
            self._met[key] = self._deaths(key) | {which}, now
            self._met.move_to_end(key)
        while len(self._met) > _KEPT:
            self._met.popitem(last=False)

    def served(self, key: bytes) -> None:
        """A request of this key was answered, so it did not cause the crashes of engines."""
        self._met.pop(key, None)

    def check(self, key: bytes) -> None:
        """Refuse what has met too many deaths.

        Raises:
            RequestFailedError: it has.
        """
        if len(self._deaths(key)) >= MOST_DEATHS:
            raise RequestFailedError(
                f"the engine died {MOST_DEATHS} times while it answered this request, so it is not "
                f"tried again for {_FORGET_S / 60:g} minutes; change the request, or report it "
                "with the server's log"
            )

    def _deaths(self, key: bytes) -> frozenset[Hashable]:
        deaths, at = self._met.get(key, (frozenset(), 0.0))
        return deaths if self._clock() - at < _FORGET_S else frozenset()
