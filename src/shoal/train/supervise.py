"""Start the ranks of a run on this host, watch them, and say who failed.

A rank that dies is named with its signal, step and collective. A rank that makes no
progress for ``timeout_s`` is found by the heartbeats: it is behind in collectives, or
outside of one while the others wait; every rank is asked for its stacks before all
are ended. Where the link between two ranks carries nothing any more, no rank is to blame,
and the pair is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.checkpoint.store import Store
from shoal.core import errors
from shoal.core.errors import CheckpointError, RankError, ShoalError
from shoal.ir import Plan
from shoal.parallel.heartbeat import Beat, Heartbeat, blame
from shoal.parallel.silent import said, silent_links
from shoal.train.layout import RunDir

if TYPE_CHECKING:
    from shoal.checkpoint.inmemory.fleet import Fleet

__all__ = ["Supervisor"]

_POLL_S = 0.05
_GRACE_S = 3.0


class Supervisor:
    """The ranks of one run as child processes.

    Args:
        directory: the run's directory; its plan is written already.
        ranks: how many to start.
        threads: threads of each rank.
        timeout_s: silence after which a rank counts as hanging.
        start_s: time allowed before the first step.
        resume: continue from the newest checkpoint.
        from_step: continue from this checkpoint instead.
        environment: variables of a rank on top of this process's own.
        module: what a rank runs.
        level: the snapshot processes of the run, which are watched with the ranks.
        prefix: what the command of a rank begins with, such as the entrance of an emulated host.
    """

    def __init__(
        self,
        directory: RunDir,
        *,
        ranks: int,
        threads: int,
        timeout_s: float,
        start_s: float = 300.0,
        resume: bool = False,
        from_step: int | None = None,
        environment: Callable[[int], Mapping[str, str]] | None = None,
        module: str = "shoal.train.worker",
        level: Fleet | None = None,
        prefix: Callable[[int], Sequence[str]] = lambda rank: (),
    ) -> None:
        self.directory = directory
        self.ranks = ranks
        self.threads = threads
        self.timeout_s = timeout_s
        self.start_s = start_s
        self.resume = resume
        self.from_step = from_step
        self.environment = environment
        self.module = module
        self.level = level
        self.prefix = prefix
        self.processes: list[subprocess.Popen[bytes]] = []
        self.lost: int | None = None
        """The rank that the error of :meth:`wait` is about, once there is one."""

    def start(self) -> None:
        """Start all ranks."""
        self.directory.ranks.mkdir(parents=True, exist_ok=True)
        meeting = self.directory.ranks / "rendezvous"
        meeting.unlink(missing_ok=True)
        for rank in range(self.ranks):
            here = self.directory
            for path in (here.beat(rank), here.error(rank), here.flight(rank)):
                path.unlink(missing_ok=True)
            self.processes.append(self._spawn(rank, meeting))

    def _spawn(self, rank: int, meeting: Path) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "SHOAL_RENDEZVOUS": f"file://{meeting.absolute()}",
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            # Ranks of one host talk over its own interface and nobody else's.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            **(self.level.environment if self.level is not None else {}),
            **(self.environment(rank) if self.environment is not None else {}),
        }
        command = [
            *self.prefix(rank),
            *(sys.executable, "-m", self.module, str(self.directory.root)),
        ]
        if self.resume:
            command.append("--resume")
        if self.from_step is not None:
            command.append(f"--from-step={self.from_step}")
        with self.directory.log(rank).open("ab") as log:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C goes to the supervisor alone, which asks the ranks to save and stop.
                start_new_session=True,
            )

    def wait(self, tick: Callable[[], None]) -> None:
        """Return when every rank ended well; call ``tick`` often meanwhile.

        A first KeyboardInterrupt in here asks the ranks to save and stop; a second one
        ends them.

        Raises:
            RankError: a rank died or hangs.
            ShoalError: what a rank itself reported.
        """
        asked = False
        began = time.monotonic()
        try:
            while True:
                try:
                    tick()
                    if self._poll(began):
                        tick()
                        return
                    time.sleep(_POLL_S)
                except KeyboardInterrupt:
                    if asked:
                        raise
                    asked = True
                    self._signal(signal.SIGTERM)
        finally:
            self.end()

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    def lose(self, ranks: Collection[int]) -> None:
        """Kill ranks and their snapshot processes, as the loss of their node would."""
        for rank in ranks:
            self.processes[rank].kill()
        if self.level is not None:
            self.level.kill(ranks)

    def _poll(self, began: float) -> bool:
        codes = [process.poll() for process in self.processes]
        if all(code == 0 for code in codes):
            return True
        if any(code not in (None, 0) for code in codes):
            self._explain_death()
        if self.level is not None:
            self.level.check()
        beats = self.beats()
        limit = self.timeout_s
        if not beats or max(beat.step for beat in beats) < 0:
            # Importing, tokenising and compiling come before the first step.
            if time.monotonic() - began > self.start_s + self.timeout_s:
                self._explain_hang(beats)
            return False
        # A hang is when nobody makes progress: one slow rank keeps the others waiting,
        # and all of them fall silent.
        if min(beat.age_s for beat in beats) > limit:
            self._explain_hang(beats)
        return False

    def beats(self) -> list[Beat]:
        """The newest heartbeats of the ranks that run."""
        found = (
            Heartbeat.read(self.directory.beat(rank), rank)
            for rank in range(self.ranks)
            if self.processes[rank].poll() is None
        )
        return [beat for beat in found if beat is not None]

    def _explain_death(self) -> None:
        # Let the peers' own errors arrive, then tell the first cause: a signal before
        # an error, an error before a lost peer.
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and any(p.poll() is None for p in self.processes):
            time.sleep(_POLL_S)

        def order(rank: int) -> tuple[int, int]:
            code = self.processes[rank].poll()
            if code is None or code == 0:
                return (9, rank)
            if code < 0:
                return (0, rank)
            return ({2: 1, 3: 3}.get(code, 2), rank)

        rank = self.lost = min(range(self.ranks), key=order)
        code = self.processes[rank].poll() or 0
        told = self.directory.error(rank)
        if code > 0 and told.exists():
            record = json.loads(told.read_text())
            cls = getattr(errors, record["type"], RankError)
            prefix = f"rank {rank}: " if self.ranks > 1 and issubclass(cls, RankError) else ""
            message = record["message"].removeprefix(f"rank {rank}: ")
            raise _rebuild(cls, prefix + message)
        beat = Heartbeat.read(self.directory.beat(rank), rank)
        where = (
            f" in step {beat.step} at collective {beat.collective}"
            if beat is not None and beat.step >= 0
            else " before its first step"
        )
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with status {code}"
        )
        stack = _tail(self.directory.stack(rank), 12)
        raise RankError(
            f"rank {rank} of {self.ranks} (pid {self.processes[rank].pid}, host "
            f"{socket.gethostname()}) {how}{where}; its output is in {self.directory.log(rank)}"
            + (f"; its stack:\n{stack}\n" if stack else "; ")
            + self._onward()
        )

    def _onward(self) -> str:
        """Where the run begins when it is continued."""
        job = Plan.load(self.directory.plan).job
        steps: set[int] = set()
        for place in self.directory.levels_of(job):
            with contextlib.suppress(OSError, CheckpointError):  # a place that is away has none
                steps.update(Store(place).steps())
        last = f"last checkpoint: step {max(steps)}" if steps else "there is no checkpoint yet"
        return f"{last}; continue with --resume"

    def _explain_hang(self, beats: list[Beat]) -> None:
        self._signal(signal.SIGUSR1)
        time.sleep(_GRACE_S / 3)
        if not beats:
            raise RankError(
                f"no rank reached its first step within {self.start_s + self.timeout_s:.0f} s; "
                f"see {self.directory.ranks}"
            )
        worst = blame(beats)
        self.lost = worst.rank
        silent = silent_links({beat.rank: self.processes[beat.rank].pid for beat in beats})
        if silent:
            where = f"{worst.op or 'a collective'} of step {worst.step}"
            raise RankError(
                f"{said(silent, min(beat.age_s for beat in beats), where)}; all ranks were ended; "
                + self._onward()
            )
        process = self.processes[worst.rank]
        stack = _tail(self.directory.stack(worst.rank), 30)
        if not stack:
            stack = f"  no stack: the process is {_state(process.pid)} and does not answer"
        raise RankError(
            f"rank {worst.rank} of {self.ranks} (pid {process.pid}, host {socket.gethostname()}) "
            f"hangs in step {worst.step}, {'inside' if worst.inside else 'before'} collective "
            f"{worst.collective + (0 if worst.inside else 1)}, silent for {worst.age_s:.0f} s; "
            f"its stack:\n{stack}\nall ranks were ended; {self._onward()}"
        )


def _rebuild(cls: type[ShoalError], message: str) -> ShoalError:
    error = cls.__new__(cls)
    Exception.__init__(error, message)
    return error


def _tail(path: Path, lines: int) -> str:
    try:
        text = path.read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""
    return "\n".join(f"  {line}" for line in text.splitlines()[:lines])


def _state(pid: int) -> str:
    """What the kernel says a process is doing."""
    names = {"T": "stopped", "t": "traced", "D": "waiting for a device", "Z": "dead"}
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return names.get(letter, "running")
