"""Which instance takes a request: the one with the least to do.

A prompt goes where the fewest tokens of prompts wait, and a request that generates goes where
the fewest tokens lie in requests that generate. Ties go to the instance that was taken longest
ago, so that equal ones take turns.

Source: Zhong et al., DistServe, 2024, section 4.3.
"""

from __future__ import annotations

from shoal.core.errors import require


class LeastLoadedDispatcher:
    """Books of open requests; see :class:`~shoal.ir.phases.Dispatcher`.

    Args:
        prefill: instances that compute prompts.
        decode: instances that generate; 0 if each goes on with its own prompts.
    """

    def __init__(self, prefill: int, decode: int = 0) -> None:
        require(prefill >= 1, "instances", prefill, expected="at least one that computes prompts")
        self._prompts = _Books(prefill)
        self._decodes = _Books(decode) if decode else None

    def prompt(self, request_id: str, n_tokens: int) -> int:
        return self._prompts.take(request_id, n_tokens)

    def prompted(self, request_id: str) -> None:
        # An instance of both phases is loaded by generating requests, too.
        if self._decodes is not None:
            self._prompts.leave(request_id)

    def decode(self, request_id: str, n_tokens: int) -> int:
        if self._decodes is None:
            return self._prompts.where(request_id)
        return self._decodes.take(request_id, n_tokens)

    def ended(self, request_id: str) -> None:
        self._prompts.leave(request_id)
        if self._decodes is not None:
            self._decodes.leave(request_id)


class _Books:
    """Tokens of open requests by instance."""

    def __init__(self, instances: int) -> None:
        self._tokens = [0] * instances
        self._taken = [0] * instances
        self._open: dict[str, tuple[int, int]] = {}
        self._turn = 0

    def take(self, request_id: str, n_tokens: int) -> int:
        loads = zip(self._tokens, self._taken, strict=True)
        instance = min(enumerate(loads), key=lambda one: one[1])[0]
        self._turn += 1
        self._taken[instance] = self._turn
        self._tokens[instance] += n_tokens
        self._open[request_id] = instance, n_tokens
        return instance

    def where(self, request_id: str) -> int:
        return self._open[request_id][0]

    def leave(self, request_id: str) -> None:
        if request_id in self._open:
            instance, n_tokens = self._open.pop(request_id)
            self._tokens[instance] -= n_tokens
