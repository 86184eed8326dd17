"""An engine in the process of its caller, who has all requests at hand."""

from __future__ import annotations

import contextlib
import gc
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from shoal.core.errors import ServeError, require
from shoal.core.measure import num_cores
from shoal.core.parts import load_object
from shoal.ir import Output, Request, ServeJob
from shoal.serve.engine.failure import ENDS
from shoal.serve.engine.frames import DEFAULT_FACTORY
from shoal.serve.engine.link import ModelInfo
from shoal.serve.engine.process import EngineLike, describe, factory_of

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig

# s between two looks at an engine whose processes say nothing.
_LOOK_S = 1.0


class OfflineEngine:
    """Computes requests that are all there, together, in this process.

    Args:
        job: what to serve, in one replica. ``threads`` = 0 is every core: no server needs one.

    Attributes:
        model: what the engine says about its model.

    Raises:
        ShoalError: the model cannot be read, or a part or a limit of the job cannot be.
    """

    def __init__(self, job: ServeJob) -> None:
        require(
            job.replicas == 1,
            "replicas",
            job.replicas,
            expected="1 in this process",
            hint="shoal serve starts several behind one address",
            error=ServeError,
        )
        factory = factory_of(job)
        if factory == DEFAULT_FACTORY and not job.threads:
            job = job.model_copy(update={"threads": num_cores()})
        self._threads = torch.get_num_threads()
        engine: EngineLike
        config: ModelConfig
        engine, config = load_object(factory)(job)
        self._engine: EngineLike | None = engine
        self.model = ModelInfo.of(describe(job, engine, config))

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or a step failed."""
        return self._engine is None

    def run(
        self,
        requests: Sequence[Request],
        output: Callable[[Output], bool],
        heard: Mapping[str, Callable[[Mapping[str, Any]], None]] = {},
    ) -> None:
        """Compute requests until all have ended; continuous batching by the job's scheduler.

        Ctrl-C is raised between two steps, and the engine can go on with others afterwards.

        Args:
            requests: with different ids.
            output: called with each output; true ends its request.
            heard: kind of a message -> called with it: ``vector`` of a prompt, or
                ``prompt_logprobs``.

        Raises:
            RefusedError: the engine can never run one of them; all end.
            RequestFailedError: the engine failed on one of them; all end.
            ServeError: the engine is closed, or cannot go on.
        """
        engine = self._open()
        remaining = {request.id for request in requests}
        try:
            with _interrupts() as interrupted:
                for request in requests:
                    engine.add(request)
                while remaining:
                    interrupted()
                    for one in self._step(engine):
                        if one.request_id not in remaining:
                            continue  # it was ended while this was under way
                        if output(one) and one.finish is None:
                            engine.abort(one.request_id)
                        elif one.finish is None:
                            continue
                        remaining.discard(one.request_id)
                    for message in engine.drain_events():
                        if message["kind"] in ENDS:
                            remaining.discard(message["id"])
                            raise ENDS[message["kind"]](message["message"])
                        if (take := heard.get(message["kind"])) is not None:
                            take(message)
        finally:
            if not self.closed:
                for name in remaining:
                    engine.abort(name)
                engine.drain_events()

    def stats(self) -> dict[str, float]:
        """Gauges of now, and counters since the start.

        Raises:
            ServeError: the engine is closed.
        """
        return dict(self._open().stats())

    def _open(self) -> EngineLike:
        if self._engine is None:
            raise ServeError("the engine is closed; open the model again")
        return self._engine

    def _step(self, engine: EngineLike) -> list[Output]:
        """A step; of an engine of several processes, once one of them has something to say."""
        if not engine.busy:
            sockets = getattr(engine, "sockets", ())
            if not sockets:
                raise ServeError("the engine has no work, and requests have not ended")
            select.select(sockets, [], [], _LOOK_S)
            if not engine.busy:
                return []
        try:
            return engine.step()
        except Exception:
            self.close()  # what its scheduler knows is not what its cache holds
            raise

    def close(self) -> None:
        """End the engine and its processes; its memory is free once nothing else holds it."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        close: Callable[[], Any] | None = getattr(engine, "close", None)
        if close is not None:
            close()
        torch.set_num_threads(self._threads)
        del engine
        gc.unfreeze()  # an engine and its hooks hold each other
        gc.collect()


@contextlib.contextmanager
def _interrupts() -> Iterator[Callable[[], None]]:
    """Hold Ctrl-C back until the function that this gives is called, or it comes again."""
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(before):
        yield lambda: None
        return
    caught: list[FrameType | None] = []

    def catch(_: int, frame: FrameType | None) -> None:
        caught.append(frame)
        if len(caught) > 1:
            raise KeyboardInterrupt

    def check() -> None:
        if caught:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, catch)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
