"""An engine whose model is shared by ranks: it plans, and they compute.

The controller is the engine's process. It sends each rank a small command for every step and takes
the tokens from the first rank of the last stage; what the ranks exchange among themselves never
comes here. Several steps are under way where the model is cut into stages, so that none of these
waits for an answer to come back.

The ranks are started and watched by :func:`~shoal.parallel.comm.processes.run_processes`. If one of
them ends, all do, and the engine fails with one error that names it; the server starts the
engine again, and with it new ranks.

Source: Du et al., EnergonAI, 2022, section 4.
"""

from __future__ import annotations

import atexit
import math
import os
import select
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from shoal.core.errors import ServeError, ShoalError
from shoal.core.measure import num_cores
from shoal.core.parts import table
from shoal.core.scratch import scratch
from shoal.ir import (
    KVPart,
    Output,
    PreemptPart,
    SchedulerPart,
    ServeJob,
    Step,
    StepResult,
)
from shoal.parallel.comm.processes import run_processes
from shoal.plan.batching.schedulers.ahead import OpenScheduler
from shoal.serve.engine.ahead import AheadEngine
from shoal.serve.engine.frames import Decoder, encode
from shoal.serve.ranks.commands import CommandWriter, unpack_result

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig

_TARGET = "shoal.serve.ranks.worker:run"
_READ_BYTES = 2**20
_POLL_S = 0.1
# How long the launcher may take to say who died and why, which it waits for itself.
_EXPLAIN_S = 4.0


class _Peer:
    """The connection to one rank."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._decoder = Decoder()
        self.inbox: deque[dict[str, Any]] = deque()
        self.gone = False

    def read(self) -> None:
        try:
            data = self.socket.recv(_READ_BYTES)
        except OSError:
            data = b""
        self.gone = not data
        self.inbox.extend(self._decoder.feed(data))


class RankedRunner:
    """Ranks that compute steps; a :class:`~shoal.ir.engine.Runner` with several under way.

    Args:
        threads: of each rank.
        blocking: of :class:`~shoal.serve.ranks.boundary.RankBoundary`, to compare with.
        latency_s: of the same, to emulate a slower link between stages, and between the ranks of
            one for the sums of its layers.
        sums: of :class:`~shoal.serve.ranks.worker.Rank`; False to time the computation alone.
        start_s: s that the ranks may take to load.
        hang_s: s without the result of a step after which all ranks are terminated.

    Raises:
        ShoalError: a rank cannot be started or cannot load its part.
    """

    def __init__(
        self,
        job: ServeJob,
        *,
        threads: int = 1,
        blocking: bool = False,
        latency_s: float = 0.0,
        sums: bool = True,
        start_s: float = 600.0,
        hang_s: float = 120.0,
    ) -> None:
        self.depth = job.parallel.depth
        self._hang_s = hang_s
        self._writer = CommandWriter()
        self._under_way: deque[int] = deque()
        self._failure: BaseException | None = None
        self._closing = False
        self._peers: dict[int, _Peer] = {}
        self._answers = (job.parallel.pp - 1) * job.parallel.tp
        self._directory = scratch("workers", sockets=True)
        path = self._directory / "socket"
        # The job names it for the ranks, whose working directory is this one's.
        arguments = {
            "path": str(path),
            "job": job.model_copy(update={"threads": threads}).model_dump(
                mode="json", exclude_none=True
            ),
            "blocking": blocking,
            "latency_s": latency_s,
            "sums": sums,
        }
        self._thread = threading.Thread(
            target=self._run,
            args=(job.parallel.world, arguments, threads, hang_s),
            name="shoal-ranks",
            daemon=True,
        )
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(path))
                listener.listen(job.parallel.world)
                self._thread.start()
                self._meet(listener, job.parallel.world, time.monotonic() + start_s)
            result = self._hear("loaded", start_s)
        except BaseException:
            self.close()
            raise
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)  # all have connected, or never will
        self.dtype: str = result[0]["dtype"]

    def allocate(self, job: ServeJob, num_blocks: int, block_size: int) -> None:
        """Make the caches, each of a rank's own layers and heads; before the first step.

        Raises:
            ServeError: a rank has no memory for it.
        """
        message = {
            "kind": "cache",
            "num_blocks": num_blocks,
            "block_size": block_size,
            "job": job.model_dump(mode="json", exclude_none=True),
        }
        for peer in self._peers.values():
            self._send(peer, encode(message))
        self._hear("ready", self._hang_s)

    @property
    def sockets(self) -> list[socket.socket]:
        """What to wait for while there is nothing to compute: the end of a rank."""
        return [peer.socket for peer in self._peers.values()]

    @property
    def pids(self) -> list[int]:
        """Processes of the ranks, by rank."""
        return [_peer_process(peer.socket) for _, peer in sorted(self._peers.items())]

    @property
    def lost(self) -> bool:
        """Whether a rank has ended."""
        self._read(0.0)
        return self._failure is not None or any(peer.gone for peer in self._peers.values())

    def submit(self, step: Step) -> int:
        """Send a step to the ranks and return its ticket without waiting.

        Raises:
            ServeError: as many as ``depth`` are under way, or a rank has ended.
        """
        if len(self._under_way) >= self.depth:
            raise ServeError(
                f"{len(self._under_way)} steps are under way and the ranks take {self.depth}; "
                "collect one first"
            )
        command = self._writer.command(step)
        self._under_way.append(command["ticket"])
        message = encode(command)
        for peer in self._peers.values():
            self._send(peer, message)
        return self._under_way[-1]

    def collect(self) -> StepResult:
        """What the oldest step under way gave, once it is there.

        Raises:
            ServeError: a rank has ended, failed or hangs; or nothing is under way.
        """
        if not self._under_way:
            raise ServeError("no step is under way; submit one first")
        ticket = self._under_way[0]
        answers = self._peers[self._answers]
        deadline = time.monotonic() + self._hang_s
        while not answers.inbox:
            self.check()
            if time.monotonic() > deadline:
                raise ServeError(
                    f"the ranks hang: no result of step {ticket} for {self._hang_s:g} s; its "
                    "requests are lost"
                )
            self._read(_POLL_S)
        message = answers.inbox.popleft()
        if message["ticket"] != ticket:
            raise ServeError(f"result of step {message['ticket']}, and step {ticket} is due")
        self._under_way.popleft()
        return unpack_result(message)

    def execute(self, step: Step) -> StepResult:
        """Compute a step and wait for it; see :class:`~shoal.ir.engine.Runner`."""
        self.submit(step)
        return self.collect()

    def close(self) -> None:
        """End the ranks."""
        if self._closing:
            return
        self._closing = True
        stop = encode({**self._writer.command(Step(())), "kind": "stop"})
        for peer in self._peers.values():
            try:
                peer.socket.sendall(stop)
            except OSError:
                continue
        if self._thread.ident is not None:
            self._thread.join(_EXPLAIN_S if self._peers else None)
        for peer in self._peers.values():
            peer.socket.close()

    def _run(self, world: int, arguments: Mapping[str, Any], threads: int, hang_s: float) -> None:
        try:
            run_processes(
                _TARGET, world, arguments, threads=threads, timeout_s=math.inf, collective_s=hang_s
            )
        except BaseException as cause:
            self._failure = cause  # raised where the ranks are awaited

    def _meet(self, listener: socket.socket, world: int, deadline: float) -> None:
        listener.settimeout(_POLL_S)
        while len(self._peers) < world:
            self.check()
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise ServeError("the ranks of the engine did not start in time") from None
                continue
            connection.setblocking(True)
            peer = _Peer(connection)
            while not peer.inbox and not peer.gone:
                peer.read()
            if peer.inbox:
                self._peers[peer.inbox.popleft()["rank"]] = peer

    def _hear(self, kind: str, seconds: float) -> list[dict[str, Any]]:
        """One message of every rank."""
        deadline = time.monotonic() + seconds
        while not all(peer.inbox for peer in self._peers.values()):
            self.check()
            if time.monotonic() > deadline:
                raise ServeError(f"the ranks of the engine were not {kind} in {seconds:g} s")
            self._read(_POLL_S)
        return [peer.inbox.popleft() for _, peer in sorted(self._peers.items())]

    def _read(self, timeout_s: float) -> None:
        """Take in what the ranks have said."""
        there = {peer.socket: peer for peer in self._peers.values() if not peer.gone}
        for one in select.select(list(there), [], [], timeout_s)[0]:
            there[one].read()

    def _send(self, peer: _Peer, message: bytes) -> None:
        try:
            peer.socket.sendall(message)
        except OSError:
            peer.gone = True
            self.check()

    def check(self) -> None:
        """Refuse to go on without all ranks.

        Raises:
            ServeError: one has ended.
        """
        if self._failure is None and not any(peer.gone for peer in self._peers.values()):
            return
        # The starting process determines which one was first.
        self._thread.join(_EXPLAIN_S)
        cause = self._failure
        if isinstance(cause, ShoalError):
            raise type(cause)(f"{cause}; all requests of the engine are lost") from None
        raise ServeError(
            f"a rank of the engine has ended ({cause or 'no reason known'}); all its requests are "
            "lost"
        ) from cause


def _peer_process(connection: socket.socket) -> int:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[:4], "little")


class RankedEngine(AheadEngine):
    """Requests in, tokens out, by ranks."""

    def __init__(self, scheduler: OpenScheduler, runner: RankedRunner, **options: Any) -> None:
        super().__init__(scheduler, runner, **options)
        self.ranks = runner

    @property
    def sockets(self) -> list[socket.socket]:
        """What to wait for while there is nothing to compute."""
        return self.ranks.sockets

    @property
    def busy(self) -> bool:
        """Whether a step would do something, if only to report that a rank has ended."""
        return super().busy or self.ranks.lost

    def step(self) -> list[Output]:
        """See :class:`~shoal.serve.engine.ahead.AheadEngine`.

        Raises:
            ServeError: a rank has ended, failed or hangs.
        """
        self.ranks.check()
        return super().step()

    def close(self) -> None:
        """End the ranks."""
        super().close()
        self.ranks.close()


def ranked_engine(job: ServeJob, config: ModelConfig, **emulated: Any) -> RankedEngine:
    """An engine of ranks.

    Args:
        job: what to serve.
        config: of its model.
        emulated: ``blocking``, ``latency_s`` and ``sums`` of :class:`RankedRunner`.

    Raises:
        ShoalError: the model cannot be split so, or a part or a limit of the job cannot be.
    """
    from shoal.serve.cache.host import HostCopyHook
    from shoal.serve.engine.build import DTYPES, concrete
    from shoal.serve.engine.pooling import PoolingHook
    from shoal.serve.engine.prompt_logprobs import PromptLogprobs
    from shoal.serve.ranks.part import check_parts

    check_parts(job, config)
    world = job.parallel.world
    threads = job.threads or max(1, num_cores() // world)
    runner = RankedRunner(job, threads=threads, **emulated)
    try:
        dtype = DTYPES[runner.dtype]
        assert dtype is not None
        job = concrete(job, config, dtype).model_copy(update={"threads": threads})
        assert job.kv_tokens is not None and job.max_position is not None
        kv_part: KVPart = table("kv").build(job.kv, where="kv")
        kv = kv_part.build(job.kv_tokens)
        preempt: PreemptPart = table("preempt").build(job.preempt, where="preempt")
        preemption = preempt.build(kv, job.limits, host_tokens=job.host_tokens or 0)
        chosen: SchedulerPart = table("scheduler").build(job.scheduler, where="scheduler")
        scheduler = cast("OpenScheduler", chosen.build(kv, job.limits, preemption))
        runner.allocate(job, kv.num_blocks, kv.block_size)
        # The ranks copy, pool and score; here it is counted and reported.
        hooks = (HostCopyHook(), PoolingHook(), PromptLogprobs())
        return RankedEngine(scheduler, runner, kv=kv, vocab_size=config.vocab_size, hooks=hooks)
    except BaseException:
        runner.close()
        raise


def build_engine(job: ServeJob) -> tuple[RankedEngine, ModelConfig]:
    """The engine of a job with ``parallel``, for the process that serves it.

    Raises:
        ShoalError: a rank does not start.
    """
    from shoal.model import huggingface
    from shoal.serve.ranks.spinning import spin_briefly

    spin_briefly(os.environ)
    config = huggingface.read_config(Path(job.model))
    engine = ranked_engine(job, config)
    atexit.register(engine.close)
    return engine, config
