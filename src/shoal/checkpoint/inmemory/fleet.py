"""The snapshot processes of a run, kept by the process that starts the trainers.

They are started before the trainers, live on when trainers die, are replaced when they are lost
themselves, and end with this process, however that ends: each reads a pipe that ends with it.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from shoal.checkpoint.inmemory.recovery import RecoveryResult, recover
from shoal.checkpoint.inmemory.wire import ENVIRONMENT, SECRET, Members, SnapshotAddress
from shoal.core import children
from shoal.core.errors import CheckpointError, MachineError, RankError
from shoal.core.files import write_atomic

_MODULE = "shoal.checkpoint.inmemory.process"

# s in which a snapshot process must answer while ranks are recovered, and in which what it holds
# must have been written.
_ANSWER_S = 600.0
_PERSIST_S = 3600.0


def _line(process: subprocess.Popen[str]) -> str:
    """What a snapshot process answers; nothing if it has ended, or blocks and is ended."""
    assert process.stdout is not None
    # One answer to one question, so that nothing of it lies in the buffer of the file.
    if not select.select([process.stdout], [], [], _ANSWER_S)[0]:
        process.kill()
        return ""
    return process.stdout.readline()


class _Pipe:
    """A snapshot process, asked over the pipes to it; see :class:`recovery.SnapshotReader`."""

    def __init__(self, rank: int, process: subprocess.Popen[str]) -> None:
        self._rank = rank
        self._process = process

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
            self._process.stdin.flush()
            line = _line(self._process)
        if not line:
            raise RankError(f"the snapshot process of rank {self._rank} was lost while recovering")
        data: dict[str, Any] = json.loads(line)
        if "error" in data:
            raise CheckpointError(f"snapshot process of rank {self._rank}: {data['error']}")
        return data


class Fleet:
    """Snapshot processes, one for each rank.

    Args:
        folder: where the file of members and the logs are written.
        world: ranks.
        host: address at which the process of a rank listens.
        prefix: what the command of a rank's process begins with, such as the entrance of a
            network namespace.
    """

    def __init__(
        self,
        folder: Path,
        world: int,
        *,
        host: Callable[[int], str] = lambda rank: "127.0.0.1",
        prefix: Callable[[int], Sequence[str]] = lambda rank: (),
    ) -> None:
        self.folder = folder
        self.file = folder / "memory.json"
        self._host = host
        self._prefix = prefix
        self._secret = secrets.token_bytes(32)
        self.processes: list[subprocess.Popen[str]] = []
        self.members = Members(run=secrets.token_hex(8))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self.processes = [self._spawn(rank) for rank in range(world)]
            places = tuple(self._place(rank) for rank in range(world))
        except BaseException:
            self.close()
            raise
        self._write(places=places)

    @property
    def environment(self) -> dict[str, str]:
        """Environment from which a trainer finds the processes."""
        return {ENVIRONMENT: str(self.file.absolute()), SECRET: self._secret.hex()}

    @property
    def secret(self) -> bytes:
        """Of the run."""
        return self._secret

    def dead(self) -> list[int]:
        """Ranks whose snapshot process has ended."""
        return [r for r, process in enumerate(self.processes) if process.poll() is not None]

    def check(self) -> None:
        """Refuse to go on without a process.

        Raises:
            RankError: one has ended.
        """
        for rank in self.dead():
            raise RankError(
                f"the snapshot process of rank {rank} (pid {self.processes[rank].pid}) has ended "
                f"with status {self.processes[rank].returncode}; see {self._log(rank)}"
            )

    def recover(self) -> RecoveryResult:
        """Replace lost processes and bring all to the newest step that is left.

        The trainers must not run.

        Raises:
            ShoalError: not even a new process can be started or reached.
        """
        places = list(self.members.places)
        for rank in self.dead():
            self._reap(self.processes[rank])
            self.processes[rank] = self._spawn(rank)
            places[rank] = self._place(rank)
        self._write(generation=self.members.generation + 1, places=tuple(places), restore=None)
        result = recover(self.members, [_Pipe(r, one) for r, one in enumerate(self.processes)])
        self._write(restore=result.step)
        return result

    def persist(self, where: str, keep: int) -> None:
        """Write the recovered version to a store; the trainers have no part in it.

        Args:
            where: its directory or address.
            keep: newest checkpoints kept there.

        Raises:
            RankError: it could not be done; the message has the reason.
        """
        process = children.start(
            "shoal.checkpoint.inmemory.persist",
            *(where, str(keep)),
            prefix=self._prefix(0),
            env=children.environment(self.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, stderr = process.communicate(timeout=_PERSIST_S)
        except subprocess.TimeoutExpired as cause:
            raise RankError(
                f"step {self.members.restore} in memory was not saved within {_PERSIST_S:g} s"
            ) from cause
        finally:
            children.kill([process])
        if process.returncode:
            said = (stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise RankError(f"step {self.members.restore} in memory was not saved: {said}")

    def kill(self, ranks: Iterable[int]) -> None:
        """End the processes of some ranks at once, as if their node were lost."""
        for rank in ranks:
            self.processes[rank].kill()
        for rank in ranks:
            self.processes[rank].wait()

    def close(self) -> None:
        """End all processes; what they hold is gone."""
        for process in self.processes:
            process.kill()
            self._reap(process)
        self.file.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spawn(self, rank: int) -> subprocess.Popen[str]:
        with self._log(rank).open("ab") as log:
            process = children.start(
                _MODULE,
                prefix=self._prefix(rank),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # One thread: spare cores are for the computation.
                env=children.environment({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}),
            )
        assert process.stdin is not None
        given = {
            "run": self.members.run,
            "secret": self._secret.hex(),
            "rank": rank,
            "host": self._host(rank),
        }
        with contextlib.suppress(BrokenPipeError):  # it has ended: _place says so
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()
        return process

    def _place(self, rank: int) -> SnapshotAddress:
        line = _line(self.processes[rank])
        if not line:
            raise MachineError(
                f"the snapshot process of rank {rank} did not start; see {self._log(rank)}"
            )
        return SnapshotAddress.model_validate_json(line)

    def _log(self, rank: int) -> Path:
        return self.folder / f"memory-{rank}.log"

    def _write(self, **changes: object) -> None:
        self.members = self.members.model_copy(update=changes)
        write_atomic(self.file, self.members.model_dump_json())

    @staticmethod
    def _reap(process: subprocess.Popen[str]) -> None:
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
