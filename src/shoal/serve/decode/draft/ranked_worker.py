"""The other ranks of a draft: processes that compute with the one that serves.

The serving process is rank 0. Before each pass it sends the others a few numbers that describe the
pass; everything else goes by their communicator. Between messages they sleep.

Messages to a rank, of int64 numbers: how many follow, what is asked, and its numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import itertools
import json
import os
import shutil
import socket
import subprocess
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.core import children
from shoal.core.config import parse
from shoal.core.errors import RankError, ServeError, ShoalError
from shoal.core.janitor import leave
from shoal.core.meter import Meter
from shoal.core.scratch import scratch
from shoal.ir import ServeJob
from shoal.parallel.comm.collectives import TorchComm
from shoal.serve.decode.captured import TreeRows
from shoal.serve.decode.draft.net import DraftNet
from shoal.serve.decode.draft.ranked import part_of, ranked
from shoal.serve.engine.frames import PRIVATE

# How long a rank may take to load its part, and to compute one.
_START_S, _PASS_S = 60.0, 30.0
# How long its exit code is waited for once it does not answer.
_EXIT_S = 1.0
# A rank looks out for the next pass for so long before it sleeps.
_AWAKE_S = 1e-3
_READY = b"ready"


class _Ask(enum.IntEnum):
    """What all ranks are to do."""

    EXACT = 0
    """scores of rows, layer by layer"""
    QUICK = 1
    """scores of rows, by groups"""
    READ = 2
    """keys and values of tokens"""
    KEEP = 3
    """copy keys and values"""


def _pack(several: Sequence[TreeRows]) -> list[int]:
    numbers = [len(several)]
    for one in several:
        held = one.blocks
        numbers += [len(one.depth), len(held), one.start, one.root, *map(int, one.tokens), *held]
        numbers += [*one.depth.tolist(), *one.seen.tolist()]
    return numbers


def _unpack(numbers: np.ndarray) -> list[TreeRows]:
    at, several = 1, []
    for _ in range(int(numbers[0])):
        rows, held, start, root = numbers[at : at + 4].tolist()
        ends = np.cumsum([at + 4, rows, held, rows, rows])
        tokens, blocks, depth, seen = (
            numbers[first:last] for first, last in itertools.pairwise(ends.tolist())
        )
        several.append(TreeRows(tokens, blocks.tolist(), start, root, depth, seen))
        at = int(ends[-1])
    return several


class DraftRanks:
    """The serving process's side of the ranks of a draft.

    Args:
        told: arguments of every rank, see :func:`main`.
        world: ranks, this process among them.
        cores: cores that the other ranks are held to, one each; none for any.

    Raises:
        ServeError: a rank cannot be started, or this process is itself one of others.
    """

    def __init__(self, settings: dict[str, Any], world: int, cores: Sequence[int] = ()) -> None:
        if world > 1 and dist.is_initialized():
            raise ServeError(
                "speculative.easyspec.realise = ranks: this process already is a rank of others; "
                "close the engine that it has, or serve with realise: fused"
            )
        self.world = world
        self._folder = scratch("draft")
        self._rendezvous = f"file://{self._folder}/rendezvous"
        self.processes: list[Any] = []
        self._ends: list[socket.socket] = []
        self._closing = weakref.finalize(self, _close, self._ends, self.processes, self._folder)
        for rank in range(1, world):
            core = [cores[(rank - 1) % len(cores)]] if cores else []
            self._start({**settings, "rank": rank, "world": world, "cores": core,
                         "rendezvous": self._rendezvous})  # fmt: skip

    def _start(self, settings: dict[str, Any]) -> None:
        own, theirs = socket.socketpair()
        self._ends.append(own)
        with theirs:
            self.processes.append(
                children.start(
                    "shoal.serve.decode.draft.ranked_worker",
                    *("--fd", str(theirs.fileno()), "--settings", json.dumps(settings)),
                    stdin=subprocess.DEVNULL,
                    env=children.environment({"OMP_NUM_THREADS": "1"}, without=PRIVATE),
                    pass_fds=[theirs.fileno()],
                )
            )

    def join(self) -> TorchComm:
        """The communicator of all ranks, once each has loaded its part.

        Raises:
            ServeError: one cannot.
        """
        for rank, end in enumerate(self._ends, 1):
            end.settimeout(_START_S)
            with self._alive():
                words = end.recv(1 << 16)
                if not words:
                    raise EOFError("no answer")
            if words != _READY:
                raise ServeError(
                    f"rank {rank} of the draft cannot be loaded: {words.decode(errors='replace')}"
                )
            end.settimeout(None)
        for end in self._ends:
            end.sendall(_READY)
        with self._alive():
            try:
                return _join(0, self.world, self._rendezvous)
            except RuntimeError as cause:
                raise EOFError(str(cause)) from cause

    @contextlib.contextmanager
    def running(self, what: int, numbers: Sequence[int]) -> Any:
        """While all ranks do something.

        Raises:
            ServeError: one has died; names its exit code.
        """
        with self._alive():
            message = np.array([len(numbers), what, *numbers], dtype=np.int64).tobytes()
            for end in self._ends:
                end.sendall(message)
            yield

    @contextlib.contextmanager
    def _alive(self) -> Any:
        try:
            yield
        except (OSError, EOFError, RankError) as cause:
            raise ServeError(f"{self._death(cause)}; restart the server, or serve with realise: "
                             "fused") from None  # fmt: skip

    def _death(self, cause: Exception) -> str:
        deadline = time.monotonic() + _EXIT_S
        while time.monotonic() < deadline:
            for rank, process in enumerate(self.processes, 1):
                code = process.poll()
                if code is not None:
                    who = f"rank {rank} of the draft (process {process.pid})"
                    return f"{who} ended with exit code {code}"
            time.sleep(0.01)
        return f"the ranks of the draft do not answer ({cause})"

    def close(self) -> None:
        """End the other ranks."""
        self._closing()


def _join(rank: int, world: int, rendezvous: str) -> TorchComm:
    # Ranks of one host talk over its own interface.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return TorchComm(Meter([]), rank=rank, world=world, timeout_s=_PASS_S, rendezvous=rendezvous)


def _close(ends: list[socket.socket], processes: list[Any], folder: Path) -> None:
    """Hang up; the ranks leave by themselves, or are ended."""
    for end in ends:
        end.close()
    for process in processes:
        try:
            process.wait(timeout=_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if processes and dist.is_initialized():
        dist.destroy_process_group()
    shutil.rmtree(folder, ignore_errors=True)


class RankedNet(DraftNet):
    """Passes of a draft that the serving process and all other ranks compute together.

    Args:
        own: of this rank.
        team: the others.
        quick: these are passes by groups.
    """

    def __init__(self, own: DraftNet, team: DraftRanks, quick: bool) -> None:
        super().__init__(
            own.model,
            own.cache,
            nbytes=own.nbytes * team.world,
            attention=own.attention,
            prompts=own.prompts,
            recorded=own.recorded,
        )
        self.team, self._ask = team, _Ask.QUICK if quick else _Ask.EXACT

    def read(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> None:
        with self.team.running(_Ask.READ, [start, len(tokens), *tokens, *blocks]):
            super().read(tokens, start, blocks)

    def rows(self, several: Sequence[TreeRows]) -> Tensor:
        with self.team.running(self._ask, _pack(several)):
            return super().rows(several)

    def keep(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if sources:
            with self.team.running(_Ask.KEEP, [*sources, *targets]):
                super().keep(sources, targets)


def _heard(end: socket.socket, buffer: bytearray, count: int) -> np.ndarray:
    """The next so many numbers; looks out for them before it sleeps.

    Raises:
        EOFError: the serving process has ended.
    """
    nbytes, until = 8 * count, time.monotonic() + _AWAKE_S
    while len(buffer) < nbytes:
        flags = socket.MSG_DONTWAIT if time.monotonic() < until else 0
        try:
            data = end.recv(1 << 16, flags)
        except BlockingIOError:
            continue
        if not data:
            raise EOFError("the serving process has ended")
        buffer += data
    result = np.frombuffer(bytes(buffer[:nbytes]), dtype=np.int64)
    del buffer[:nbytes]
    return result


def _serve(end: socket.socket, exact: DraftNet, quick: DraftNet) -> None:
    """Compute what is asked, until the connection ends."""
    buffer = bytearray()
    while True:
        try:
            count, what = _heard(end, buffer, 2).tolist()
            numbers = _heard(end, buffer, count)
        except (EOFError, ConnectionError):
            return
        if what == _Ask.KEEP:
            sources, targets = np.split(numbers, 2)
            exact.keep(sources.tolist(), targets.tolist())
        elif what == _Ask.READ:
            start, length = numbers[:2].tolist()
            exact.read(numbers[2 : 2 + length].tolist(), start, numbers[2 + length :].tolist())
        else:
            (quick if what == _Ask.QUICK else exact).rows(_unpack(numbers))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; 0 when the serving process has left."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--settings", required=True)
    given = parser.parse_args(arguments)
    data = json.loads(given.settings)
    if data["cores"]:
        os.sched_setaffinity(0, data["cores"])
    torch.set_num_threads(1)
    end = socket.socket(fileno=given.fd)
    rank, world, limit = data["rank"], data["world"], data["limit"]
    try:
        job = parse(ServeJob, {**data["job"], "threads": 1}, where="job")
        dtype = getattr(torch, data["dtype"])
        part = part_of(str(Path(data["path"])), job, limit, dtype, rank, world)
    except ShoalError as cause:
        end.sendall(str(cause).encode())
        return 1
    end.sendall(_READY)
    if end.recv(len(_READY)) != _READY:
        return 0
    comm = _join(rank, world, data["rendezvous"])
    groups = tuple(data["groups"])
    with torch.inference_mode():
        try:
            _serve(
                end,
                ranked(part, comm, limit),
                ranked(part, comm, limit, groups=groups, full=data["full"]),
            )
        except RankError:
            return 1
    return 0


if __name__ == "__main__":
    # Threads of a broken process group must not keep a rank alive.
    leave(main())
