"""Serving in two phases: what the instances of each promise, and whose turn it is.

A request is computed up to its first token by a prefill instance, which then holds its keys
and values; a decode instance fetches them and goes on. Both are schedulers like any other
(:mod:`shoal.ir.engine`), with one thing more. Engine and simulator drive the same objects.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from shoal.ir.engine import KVManager, Scheduler
from shoal.ir.serving import Request, SchedulerLimits


@runtime_checkable
class PrefillPhaseScheduler(Scheduler, Protocol):
    """A scheduler of the prefill phase: it holds what others go on with."""

    held: Mapping[str, Request]
    """Requests with their first token, whose blocks stay until they are released."""

    def release(self, request_id: str) -> None:
        """The blocks of a held request were fetched; nothing happens if it is gone already."""


@runtime_checkable
class DecodePhaseScheduler(Scheduler, Protocol):
    """A scheduler of the decode phase: it takes requests over when it has room."""

    def accept(self) -> list[Request]:
        """Requests that were given blocks just now: fetch their keys and values.

        Those of the prompt, ``n_prompt`` tokens, go to ``request.blocks``.
        """

    def arrived(self, request_id: str) -> None:
        """What was fetched is there; nothing happens if the request is gone meanwhile."""


class PhasePart(Protocol):
    """A part of kind ``phase``."""

    def build(self, kv: KVManager, limits: SchedulerLimits) -> Scheduler:
        """An empty :class:`PrefillPhaseScheduler` or :class:`DecodePhaseScheduler`."""


class Dispatcher(Protocol):
    """Which of several instances takes a request; keeps books of what each has to do."""

    def prompt(self, request_id: str, n_tokens: int) -> int:
        """The instance that computes a prompt of so many tokens."""

    def prompted(self, request_id: str) -> None:
        """Its first token is there, or it was given up."""

    def decode(self, request_id: str, n_tokens: int) -> int:
        """The instance that generates for a request of so many tokens up to now."""

    def ended(self, request_id: str) -> None:
        """It is over, however it ended."""
