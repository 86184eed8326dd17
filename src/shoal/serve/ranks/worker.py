"""One rank of a serving engine: it loads its part of the model and computes command by command.

Each rank has a connection to the controller, from which a thread of its own reads commands into
an inbox, and each computes them in the order of their tickets. While it computes one, the hidden
states of the next are on their way. The first rank of the last stage sends what was chosen.

Messages in: ``cache`` (num_blocks, block_size, job), ``step`` (see
:mod:`shoal.serve.ranks.commands`), ``stop`` (ticket). Messages out: ``hello`` (rank), ``loaded``
(dtype), ``ready``, ``result``.

Source: Du et al., EnergonAI, 2022, section 4.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.config import parse
from shoal.core.errors import ServeError, ShoalError
from shoal.core.parts import table
from shoal.ir import Parallel, ServeJob, StepResult
from shoal.kernel.tensors import name_of
from shoal.parallel.comm.ranks import ranks_of
from shoal.serve.engine.frames import Decoder, encode
from shoal.serve.ranks.boundary import RankBoundary
from shoal.serve.ranks.commands import CommandQueue, CommandReader, pack_result

if TYPE_CHECKING:
    from shoal.model.parameters import Parameters
    from shoal.parallel.protocols import Comm

_READ_BYTES = 2**20


class Rank:
    """The part of the engine that one rank is.

    Args:
        blocking: of :class:`~shoal.serve.ranks.boundary.RankBoundary`.
        latency_s: of the same, and of a sum over the ranks of a stage.
        sums: False leaves those out, to time the computation alone; the tokens are then wrong.

    Raises:
        ShoalError: the model cannot be split so, or cannot be read.
    """

    def __init__(
        self,
        comm: Comm,
        job: ServeJob,
        parameters: Parameters,
        *,
        blocking: bool = False,
        latency_s: float = 0.0,
        sums: bool = True,
    ) -> None:
        from shoal.serve.engine.build import DTYPES
        from shoal.serve.ranks.part import PartModel, layers_of
        from shoal.serve.ranks.slow import NoSums, SlowSums

        split = job.parallel
        ranks = ranks_of(comm, Parallel(tp=split.tp, pp=split.pp))
        self._config = parameters.config
        dtype = DTYPES[job.precision] or parameters.dtype
        self._boundary = RankBoundary(
            ranks.pp, self._config.hidden, dtype, blocking=blocking, latency_s=latency_s
        )
        layers = layers_of(self._config.num_layers, ranks.pp.rank, split.pp)
        tp: Any = ranks.tp
        if split.tp > 1 and (latency_s or not sums):
            tp = SlowSums(tp, latency_s) if sums else NoSums(tp)
        self.model = PartModel(job, parameters, tp, self._boundary, layers)
        self.answers = self._boundary.last and ranks.tp.rank == 0

    def serve(
        self,
        job: ServeJob,
        num_blocks: int,
        block_size: int,
        inbox: CommandQueue,
        tell: Callable[[int, StepResult], None],
    ) -> None:
        """Compute the commands of ``inbox`` until the last.

        Args:
            job: as it will be.
            num_blocks: of the cache of this rank, for its layers and heads.
            block_size: tokens of a block.
            inbox: commands.
            tell: receives every ticket and its result, where this rank answers.

        Raises:
            ShoalError: a step cannot be computed, or another rank is gone.
        """
        from shoal.model.parscale import heads_of
        from shoal.serve.cache.host import HostCopyHook, HostMover, HostStore
        from shoal.serve.cache.paged import PagedCache
        from shoal.serve.engine.build import attention_kernel
        from shoal.serve.engine.hooks import EngineHook
        from shoal.serve.engine.pooling import PoolingHook
        from shoal.serve.engine.prompt_logprobs import PromptLogprobs
        from shoal.serve.engine.runner import LocalRunner
        from shoal.serve.text.grammar import Grammars, vocabulary

        weight = self.model.weight
        cache = PagedCache(
            heads_of(self.model.local_config),
            num_blocks,
            block_size,
            dtype=weight.dtype,
            device=weight.device,
            form=table("kv_format").build(job.kv_format, where="kv_format"),
        )
        size = self._config.vocab_size
        hooks: list[EngineHook] = [
            PoolingHook(),
            PromptLogprobs(self.model.logits, size),
            Grammars(lambda: vocabulary(job, size)),
        ]
        if job.host_tokens:
            # One rank answers for all of them, so on each they are over with their step.
            mover = HostMover(cache, HostStore(cache, job.host_tokens // block_size))
            hooks.append(HostCopyHook(mover, at_once=True))
        runner = LocalRunner(
            self.model,
            cache,
            attention=attention_kernel(job, self.model.local, cache),
            prompts=attention_kernel(job, self.model.local, cache, prompts=True),
            exact=job.exact,
            hooks=hooks,
        )
        runner.shared = job.parallel.world > 1
        reader = CommandReader()
        while (command := inbox.take()) is not None:
            ticket = command["ticket"]
            self._boundary.expect(ticket, _tokens(command))
            following = inbox.following()
            if following is not None:
                self._boundary.expect(following["ticket"], _tokens(following))
            self.model.ticket = ticket
            result = runner.execute(reader.step(command))
            if self.answers:
                tell(ticket, result)


def _tokens(command: Mapping[str, Any]) -> int:
    return sum(chunk[2] for chunk in command["chunks"])


class _Controller:
    """The connection to the controller."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(path)
        self._messages = self._read()

    def send(self, message: Mapping[str, Any]) -> None:
        self.socket.sendall(encode(message))

    def receive(self) -> dict[str, Any]:
        """The next message; ServeError when the controller is gone."""
        try:
            return next(self._messages)
        except (StopIteration, OSError):
            raise ServeError("the controller of these ranks has ended") from None

    def _read(self) -> Iterator[dict[str, Any]]:
        decoder = Decoder()
        while data := self.socket.recv(_READ_BYTES):
            yield from decoder.feed(data)

    def fill(self, inbox: CommandQueue) -> None:
        """Put all that comes into the inbox, until the controller is gone.

        Then nothing is left to do: the parent of this process ends it, and tidies up.
        """
        try:
            for message in self._messages:
                inbox.put(message)
        except OSError:
            return
        except ShoalError as cause:
            inbox.close(cause)


def run(
    comm: Comm,
    *,
    path: str,
    job: dict[str, Any],
    blocking: bool = False,
    latency_s: float = 0.0,
    sums: bool = True,
) -> None:
    """What one process does; see :func:`shoal.parallel.comm.processes.run_processes`.

    Args:
        comm: all ranks of the engine.
        path: the Unix socket of the controller.
        job: what to serve.
        blocking: of :class:`~shoal.serve.ranks.boundary.RankBoundary`.
        latency_s: of the same.
        sums: of :class:`Rank`.

    Raises:
        ShoalError: the model cannot be loaded, a step fails, or a peer is gone.
    """
    from shoal.model.parameters import Parameters
    from shoal.serve.engine.build import DTYPES

    controller = _Controller(path)
    controller.send({"kind": "hello", "rank": comm.rank})
    result = parse(ServeJob, job, where="job")
    parameters = Parameters(Path(result.model), DTYPES[result.precision])
    rank = Rank(comm, result, parameters, blocking=blocking, latency_s=latency_s, sums=sums)
    controller.send({"kind": "loaded", "dtype": name_of(rank.model.weight.dtype)})
    cache = controller.receive()
    result = parse(ServeJob, cache["job"], where="job")
    # The last command is one, too, beside those under way.
    inbox = CommandQueue(result.parallel.depth + 1)
    threading.Thread(target=controller.fill, args=(inbox,), daemon=True).start()
    controller.send({"kind": "ready"})

    def tell(ticket: int, result: StepResult) -> None:
        controller.send(pack_result(ticket, result))

    rank.serve(result, cache["num_blocks"], cache["block_size"], inbox, tell)
