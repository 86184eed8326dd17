"""Requests that failed end, and no others; what they leave in the cache reaches no other."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Protocol, runtime_checkable

from shoal.core.errors import ServeError
from shoal.ir import Output, PurgingKVManager, Request, Step
from shoal.plan.batching.common import Queues
from shoal.serve.engine.failure import failure
from shoal.serve.engine.hooks import EngineHook, ExecutedStep

log = logging.getLogger("shoal.serve")


@runtime_checkable
class _Checked(Protocol):
    """Books of blocks that can be compared with the requests that hold them."""

    def check_integrity(self, requests: Mapping[str, Request]) -> None:
        """AssertionError where they differ."""


class IsolationHook(EngineHook):
    """Ends requests that failed, and no others.

    An unexpected error fails requests instead of the engine: those of the failed step, or all if
    planning or committing failed. The integrity of the cache is then checked.
    """

    kind: ClassVar[str] = "isolation"

    def __init__(self) -> None:
        # Blocks of requests that failed, to be set to zero before the next step.
        self._scrub: list[int] = []
        self._dirty: list[int] = []

    def planned(self, step: Step) -> Step:
        """The step, which first sets to zero what failed requests have left."""
        if not (self._scrub and step.chunks):
            return step
        blocks, self._scrub = tuple(self._scrub), []
        return replace(step, scrub=blocks)

    def executed(self, done: ExecutedStep) -> None:
        """End requests that cannot go on."""
        errors = done.result.errors
        chunks = done.step.chunks if errors else ()
        self._dirty = [b for c in chunks if c.request.id in errors for b in c.request.blocks]
        for kind, reasons in (("refused", done.result.failed), ("error", errors)):
            for request_id, reason in reasons.items():
                self._end(kind, request_id, reason)

    def committed(self, done: ExecutedStep, outputs: Sequence[Output]) -> None:
        """Forget what failed requests have left in the cache."""
        if done.result.errors:
            kv: object = self.engine.kv
            self._scrub += (
                kv.purge(self._dirty) if isinstance(kv, PurgingKVManager) else self._dirty
            )
            self.check_integrity()

    def failed(self, cause: Exception) -> bool:
        """End all requests: it is not known what of the books was changed before they failed.

        Raises:
            ServeError: they cannot be trusted any more.
        """
        scheduler: object = self.engine.scheduler
        if isinstance(cause, ServeError) or not isinstance(scheduler, Queues):
            return False
        # What is on its way between cache and host belongs to no request then.
        if scheduler.preemption.moving:
            return False
        log.error("a step failed; all its requests end", exc_info=cause)
        for request_id in list(scheduler.requests):
            self._end("error", request_id, failure(cause))
        self.check_integrity()
        return True

    def _end(self, kind: str, request_id: str, reason: str) -> None:
        self.engine.abort(request_id)
        self.engine.tell(kind, id=request_id, message=reason)

    def check_integrity(self) -> None:
        """Compare the books of blocks with the requests that hold them.

        Raises:
            ServeError: a block is lost, counted wrongly or held where it must not be.
        """
        kv: object = self.engine.kv
        scheduler: object = self.engine.scheduler
        if not isinstance(kv, _Checked) or not isinstance(scheduler, Queues):
            return
        try:
            kv.check_integrity(scheduler.requests)
        except AssertionError as cause:
            raise ServeError(
                f"the books of the cache are wrong ({cause}); the engine must start again"
            ) from cause
