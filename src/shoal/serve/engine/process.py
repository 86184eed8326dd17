"""The engine's own process: it owns model and cache and computes, and does nothing else.

``python -m shoal.serve.engine.process --fd N`` talks to the HTTP process through a socket that it
inherits. Until the first message it imports what most engines need; it loads what that message
says. Then it takes in what has come (without waiting while there is work), runs one step, and sends
what the step gave, again and again. It ends when its parent does.

Messages in: ``start`` (factory, job), ``add`` (a request), ``abort`` (id), ``ask`` (number, what,
words: a question of :attr:`EngineLike.answers`), ``ping`` (number). Messages out: ``ready`` (what
the model is), ``outputs``, ``refused`` (a request that cannot be served, with the reason),
``error`` (one that the engine failed on), ``vector`` (of a text), ``prompt_logprobs`` (id, place
of the first token, and log probabilities from it on), ``began`` (ids, and when their first step
began), ``answer`` (number, and the answer, if this engine has any), ``pong`` (number,
stats), ``failed`` (why the process ends).
"""

from __future__ import annotations

import argparse
import gc
import logging
import select
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from shoal.core.config import parse
from shoal.core.errors import ServeError, ShoalError, require
from shoal.core.parts import load_object, table
from shoal.core.traits import traits
from shoal.ir.serve_job import ServeJob
from shoal.ir.serving import Output, Request
from shoal.serve.decode.protocols import DecodePart
from shoal.serve.engine.failure import failure
from shoal.serve.engine.frames import DEFAULT_FACTORY, Decoder, encode
from shoal.serve.engine.wire import pack_output, unpack_request

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig


def factory_of(job: ServeJob) -> str:
    """What builds the engine of a job: one that computes, or one made of several processes.

    Raises:
        ServeError: the job is priced for another program.
    """
    require(
        job.engine == "shoal",
        "engine",
        job.engine,
        expected="shoal: a plan that is priced for another program is run by that program",
        hint=f"write its files with shoal plan serve --emit {job.engine}, or --set engine=shoal",
        error=ServeError,
    )
    require(
        job.parallel.dp == job.parallel.ep == 1,
        "parallel",
        f"dp={job.parallel.dp}, ep={job.parallel.ep}",
        expected="1 of each: groups that share experts are planned for other programs",
        hint="give replicas, or a plan with --engine and --emit",
        error=ServeError,
    )
    decode: DecodePart = table("decode").build(job.decode, where="decode")
    factory = decode.factory()
    if factory is not None:
        return factory
    if job.parallel.world > 1:
        return "shoal.serve.ranks.workers:build_engine"
    if "lends_blocks" in traits("kv", job.kv):
        return "shoal.serve.cluster.distkv:build_engine"
    return DEFAULT_FACTORY if job.disagg is None else "shoal.serve.cluster.disagg:build_engine"


log = logging.getLogger("shoal.serve")

_READ_BYTES = 2**20


class EngineLike(Protocol):
    """What the process needs of an engine.

    Attributes:
        facts: options that clients may request: ``workers``, ``streams`` and ``shares`` of
            :class:`~shoal.serve.engine.client.ModelInfo`, where they differ from its defaults.
        answers: questions that are answered between two steps.
    """

    facts: Mapping[str, Any] = MappingProxyType({})
    answers: Mapping[str, Callable[..., Any]] = MappingProxyType({})

    @property
    def busy(self) -> bool:
        """Whether a step would compute something."""

    def add(self, request: Request) -> None:
        """Queue a request; ServeError if it can never run."""

    def abort(self, request_id: str) -> Output | None:
        """Forget a request."""

    def step(self) -> list[Output]:
        """Plan, execute, commit."""

    def drain_events(self) -> list[dict[str, Any]]:
        """Messages of the last steps about requests: see above, ``refused`` to ``began``."""

    def stats(self) -> Mapping[str, float]:
        """Counters for metrics."""


class EngineConnection:
    """The connection to the process that gives the work.

    Args:
        connection: a stream of messages.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._decoder = Decoder()

    def receive(
        self, timeout_s: float | None, others: Sequence[socket.socket] = ()
    ) -> Iterator[dict[str, Any]]:
        """Messages that are here, or come within the time; EOFError when the parent is gone.

        Args:
            timeout_s: how long to wait; None for as long as it takes.
            others: sockets whose messages end the wait, too.
        """
        readable, _, _ = select.select([self._socket, *others], [], [], timeout_s)
        if self._socket not in readable:
            return
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise EOFError
        yield from self._decoder.feed(data)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send, waiting until the parent has room."""
        self._socket.sendall(encode(message))

    def tell_end(self, reason: str, known: bool) -> None:
        """Send the reason of the end; a parent that is gone too needs none."""
        try:
            self.send({"kind": "failed", "message": reason, "known": known})
        except OSError:
            print(f"error: {reason}", file=sys.stderr)


def serve(connection: socket.socket) -> None:
    """Load what the parent says and answer its messages until it goes away.

    Raises:
        ShoalError: the model cannot be loaded, or a step failed; the parent was informed.
    """
    parent = EngineConnection(connection)
    try:
        start: Mapping[str, Any] | None = None
        if not select.select([connection], [], [], 0.0)[0]:
            _load(DEFAULT_FACTORY)
        while start is None:
            start = next(parent.receive(None), None)
        engine = _start(start, parent)
        while True:
            # An engine of several processes has work when one of them has something to say.
            others: Sequence[socket.socket] = getattr(engine, "sockets", ())
            for message in parent.receive(0.0 if engine.busy else None, others):
                _handle(engine, message, parent)
            if engine.busy:
                outputs = engine.step()
                for message in engine.drain_events():
                    parent.send(message)
                if outputs:
                    parent.send({"kind": "outputs", "outputs": [pack_output(o) for o in outputs]})
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except Exception as cause:
        known = isinstance(cause, ShoalError)
        reason = str(cause) if known else f"{type(cause).__name__}: {cause}"
        parent.tell_end(reason, known)
        raise


def _load(factory: str) -> Callable[..., Any]:
    """Import what builds an engine; of what that makes nothing is ever garbage to be searched."""
    gc.disable()
    try:
        result: Callable[..., Any] = load_object(factory)
    finally:
        gc.freeze()
        gc.enable()
    return result


def _start(start: Mapping[str, Any], parent: EngineConnection) -> EngineLike:
    job = parse(ServeJob, start["job"], where="job")
    engine: EngineLike
    config: ModelConfig
    engine, config = _load(start["factory"])(job)
    parent.send({"kind": "ready", **describe(job, engine, config)})
    return engine


def describe(job: ServeJob, engine: EngineLike, config: ModelConfig) -> dict[str, Any]:
    """What clients must know of an engine and its model."""
    return {
        "vocab_size": config.vocab_size,
        "max_position": min(job.max_position or config.max_position, config.max_position),
        "eos_ids": sorted(config.eos_ids),
        **engine.facts,
    }


def _handle(engine: EngineLike, message: Mapping[str, Any], parent: EngineConnection) -> None:
    kind = message.get("kind")
    if kind == "add":
        request = unpack_request(message)
        try:
            engine.add(request)
        except ServeError as cause:
            parent.send({"kind": "refused", "id": request.id, "message": str(cause)})
        except Exception as cause:  # of a request, which ends alone
            log.exception("request %s could not be queued", request.id)
            engine.abort(request.id)
            parent.send({"kind": "error", "id": request.id, "message": failure(cause)})
    elif kind == "abort":
        engine.abort(message["id"])
    elif kind == "ping":
        parent.send({"kind": "pong", "number": message["number"], "stats": dict(engine.stats())})
    elif kind == "ask":
        answer = engine.answers.get(message["what"])
        known = {} if answer is None else {"answer": answer(**message["words"])}
        parent.send({"kind": "answer", "number": message["number"], **known})
    else:
        raise ServeError(f"message to the engine = {kind!r}: expected add, abort, ask or ping")


def main(arguments: list[str] | None = None) -> int:
    """Take over the socket that the command line names, and serve."""
    parser = argparse.ArgumentParser(prog="shoal.serve.engine.process", description=__doc__)
    parser.add_argument("--fd", required=True, type=int, help="the inherited socket")
    options = parser.parse_args(arguments)
    with socket.socket(fileno=options.fd) as connection:
        try:
            serve(connection)
        except ShoalError:
            return 2  # the parent received the reason
    return 0


if __name__ == "__main__":
    sys.exit(main())
