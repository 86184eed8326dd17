"""Adapters as a hook: whose each request is, and whose the rows of a step are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.errors import ServeError, require
from shoal.ir import Request
from shoal.serve.adapters.loaded import AdapterBank
from shoal.serve.engine.failure import failure
from shoal.serve.engine.hooks import EngineHook, ForwardPass

if TYPE_CHECKING:
    from shoal.serve.engine.build import EngineBuilder

log = logging.getLogger("shoal.serve")


class AdapterHook(EngineHook):
    """Gives each request its adapter.

    Args:
        bank: of the model.
    """

    kind: ClassVar[str] = "adapters"

    def __init__(self, bank: AdapterBank) -> None:
        self.bank = bank
        self._open: dict[str, str | None] = {}  # request -> identity of its adapter

    def check(self, request: Request) -> None:
        """Give a request the identity of its adapter in the place of its name."""
        request.adapter = self.bank.key_for(request.adapter)

    def admitted(self, request: Request) -> None:
        """Keep the adapter until the request has ended."""
        self._open[request.id] = request.adapter
        self.bank.take(request.adapter)

    def ended(self, request_id: str) -> None:
        """Let the adapter go."""
        if request_id in self._open:
            self.bank.leave(self._open.pop(request_id))

    def answers(self) -> Mapping[str, Callable[..., Any]]:
        """Changes of what is in memory."""
        return {"adapter": self._change}

    def _change(self, do: str, name: str, path: str) -> str | None:
        """Load an adapter, unload, merge or unmerge it; what went wrong, if anything."""
        bank = self.bank
        try:
            if do == "load":
                bank.load(name, Path(path))
            else:
                {"unload": bank.unload, "merge": bank.merge, "unmerge": bank.unmerge}[do](name)
        except ServeError as cause:
            return str(cause)
        except Exception as cause:  # of an adapter, which is not there then
            log.exception("adapter %s: cannot %s it", name, do)
            return f"adapter {name!r}: the engine failed to {do} it ({failure(cause)})"
        return None

    def metrics(self) -> Mapping[str, float]:
        return self.bank.stats()

    def before_pass(self, work: ForwardPass) -> None:
        """Take in whose the rows are."""
        adapted = self.bank.begin(work.chunks)
        work.plain, work.version = work.plain and not adapted, self.bank.switches

    def around(self, work: ForwardPass) -> AbstractContextManager[None]:
        """Say which rows are needed behind the last attention."""
        if work.needed is not None:
            self.bank.select(work.chunks, work.rows)
        return nullcontext()


def adapters_of(built: EngineBuilder) -> AdapterHook | None:
    """Of a job with room for adapters, with those that it names.

    Raises:
        ServeError: the model cannot have any, or one of them cannot be served.
    """
    job, architecture = built.job, built.model.config.architecture
    if not job.room_for_adapters:
        return None
    require(
        architecture.rows_of_a_token == 1,
        "adapters",
        sorted(job.adapters) or job.room_for_adapters,
        expected=f"none for a {architecture.name} model, whose tokens are several rows each",
        error=ServeError,
    )
    bank = AdapterBank(built.model, most=job.room_for_adapters, max_rank=job.max_adapter_rank)
    for name, directory in job.adapters.items():
        bank.load(name, Path(directory))
    return AdapterHook(bank)
