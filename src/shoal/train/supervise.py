"""Start the ranks of a run on this host, watch them, and say who failed.

A rank that dies is named with its signal, step and collective. A rank that makes no
progress for ``timeout_s`` is found by the heartbeats: it is behind in collectives, or
outside of one while the others wait; every rank is asked for its stacks before all
are ended. Of several faults at once all are named. Where the link between two ranks
carries nothing any more, no rank is to blame, and the pair is named.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.checkpoint.store import Store
from shoal.core import children, errors
from shoal.core.errors import CheckpointError, RankError, rebuild
from shoal.ir import TrainPlan
from shoal.parallel.comm.heartbeat import BeatReader, Heartbeat, HeartbeatReading, blame
from shoal.parallel.comm.silent import said, silent_links
from shoal.train.layout import RunDir
from shoal.train.watch.phases import open_phases
from shoal.train.watch.recorder import read as read_flight

if TYPE_CHECKING:
    from shoal.checkpoint.inmemory.fleet import Fleet

_POLL_S = 0.05
# With thousands of ranks a look at all of them takes milliseconds: processes are asked for at once
# when one has ended, else now and then, and reading heartbeats takes at most 1 % of the time.
_ASK_S = 1.0
_BEATS_TIMES = 100.0
_GRACE_S = 3.0
# A disk with less room than this counts as full.
_LEAST_BYTES = 1 << 16
# A rank whose peer has died may end itself with this; the others are signs of its own death.
_OF_A_PEER = frozenset({-signal.SIGABRT, -signal.SIGTERM})


@dataclass(frozen=True)
class Failure:
    """A rank that has failed.

    Args:
        rank: which.
        rule: ``lost``: its process ended; ``hang``: it makes no progress and waits for no other.
        text: a sentence for people, without the stack.
    """

    rank: int
    rule: Literal["lost", "hang"]
    text: str


class Supervisor:
    """The ranks of one run as child processes.

    Args:
        timeout_s: silence after which a rank counts as hanging.
        start_s: time allowed before the first step.
        resume: continue from the newest checkpoint.
        environment: variables of a rank on top of this process's own.
        module: what a rank runs.
        level: the snapshot processes of the run, which are watched with the ranks.
        prefix: first words of the command of a rank, such as the entry command of an emulated host.
        hang_s: silence after which a rank that waits for no other counts as hanging where another
            rank has died; ``timeout_s`` if not given.
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
        environment: Callable[[int], Mapping[str, str]] | None = None,
        module: str = "shoal.train.worker",
        level: Fleet | None = None,
        prefix: Callable[[int], Sequence[str]] = lambda rank: (),
        hang_s: float | None = None,
    ) -> None:
        self.directory = directory
        self.ranks = ranks
        self.threads = threads
        self.timeout_s = timeout_s
        self.start_s = start_s
        self.resume = resume
        self.environment = environment
        self.module = module
        self.level = level
        self.prefix = prefix
        self.hang_s = timeout_s if hang_s is None else hang_s
        self.processes: list[subprocess.Popen[bytes]] = []
        self.stopping = self.saved = False
        """Whether the run was asked to stop, and whether its ranks saved and ended so."""
        self._reader = BeatReader()
        self.failures: tuple[Failure, ...] = ()
        """The ranks that the error of :meth:`wait` is about, its first cause first."""
        self._ask_at = self._beats_at = 0.0

    def start(self) -> None:
        """Start all ranks."""
        self.directory.ranks.mkdir(parents=True, exist_ok=True)
        meeting = self.directory.ranks / "rendezvous"
        meeting.unlink(missing_ok=True)
        try:
            for rank in range(self.ranks):
                here = self.directory
                for path in (here.beat(rank), here.error(rank), here.flight(rank)):
                    path.unlink(missing_ok=True)
                self.processes.append(self._spawn(rank, meeting))
        except BaseException:
            self.end()
            raise

    def _spawn(self, rank: int, meeting: Path) -> subprocess.Popen[bytes]:
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "SHOAL_RENDEZVOUS": f"file://{meeting.absolute()}",
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            # Ranks of one host talk over its own interface and no other.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            **(self.level.environment if self.level is not None else {}),
            **(self.environment(rank) if self.environment is not None else {}),
        }
        arguments = [str(self.directory.root)]
        if self.resume:
            arguments.append("--resume")
        with self.directory.log(rank).open("ab") as log:
            return children.start(
                self.module,
                *arguments,
                prefix=self.prefix(rank),
                env=children.environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait(self, tick: Callable[[], None]) -> None:
        """Return when every rank ended well; call ``tick`` often meanwhile.

        A first KeyboardInterrupt in here asks the ranks to save and stop, and is raised again
        once they have; :attr:`saved` is true then. A second one ends them.

        Raises:
            KeyboardInterrupt: the run was stopped.
            RankError: a rank died or hangs, perhaps while it was to stop.
            ShoalError: what a rank itself reported.
        """
        interrupt: KeyboardInterrupt | None = None
        began = self._reader.clock()
        try:
            while True:
                try:
                    tick()
                    if self._poll(began):
                        tick()
                        break
                    time.sleep(_POLL_S)
                except KeyboardInterrupt as stop:
                    # Before the first step there is nothing to save, and not all can receive it.
                    if interrupt is not None or all(beat.step < 0 for beat in self.beats()):
                        raise
                    interrupt, self.stopping = stop, True
                    self._signal(signal.SIGTERM)
            if interrupt is not None:
                self.saved = True
                raise interrupt
        finally:
            self.end()

    def end(self) -> None:
        """Kill what still runs."""
        children.kill(self.processes)

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
        now = time.monotonic()
        if now >= self._ask_at or child_ended():
            self._ask_at = now + _ASK_S
            codes = [process.poll() for process in self.processes]
            if all(code == 0 for code in codes):
                return True
            if any(code not in (None, 0) for code in codes):
                self._explain_death()
            if self.level is not None:
                self.level.check()
        if now < self._beats_at:
            return False
        beats = self.beats()
        limit = self.timeout_s
        self._beats_at = now + max(_POLL_S, _BEATS_TIMES * (time.monotonic() - now))
        if not beats or max(beat.step for beat in beats) < 0:
            # Importing, tokenising and compiling come before the first step.
            if self._reader.clock() - began > self.start_s + self.timeout_s:
                self._explain_hang(beats)
            return False
        # A hang is when no rank makes progress: one slow rank keeps the others waiting,
        # and all of them fall silent.
        if min(beat.age_s for beat in beats) > limit:
            self._explain_hang(beats)
        return False

    def beats(self) -> list[HeartbeatReading]:
        """The newest heartbeats of the ranks that run."""
        result = (
            self._reader.read(self.directory.beat(rank), rank)
            for rank in range(self.ranks)
            if self.processes[rank].returncode is None
        )
        return [beat for beat in result if beat is not None]

    def _explain_death(self) -> None:
        # Let the peers' own errors arrive, then report the first cause: a signal before
        # an error, an error before a lost peer.
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and any(p.poll() is None for p in self.processes):
            time.sleep(_POLL_S)

        rank = min(range(self.ranks), key=self._order)
        code = self.processes[rank].poll() or 0
        reported = self.directory.error(rank)
        if code > 0 and reported.exists():
            record = json.loads(reported.read_text())
            cls = getattr(errors, record["type"], RankError)
            prefix = f"rank {rank}: " if self.ranks > 1 and issubclass(cls, RankError) else ""
            message = prefix + record["message"].removeprefix(f"rank {rank}: ")
            self.failures = (Failure(rank, "lost", message),)
            raise rebuild(cls, message)
        died = [rank]
        for other in range(self.ranks):
            status = self.processes[other].poll() or 0
            if other != rank and status < 0 and status not in _OF_A_PEER:
                died.append(other)
        hanging = self._hanging()
        self._signal(signal.SIGUSR1)
        time.sleep(_GRACE_S / 6)
        self.failures = (
            *(Failure(one, "lost", self._death(one)) for one in died),
            *(Failure(beat.rank, "hang", self._hang(beat)) for beat in hanging),
        )
        full = _full(self.directory.ranks)
        notes = [f"{self.failures[0].text}; its output is in {self.directory.log(rank)}{full}"]
        notes += [failure.text for failure in self.failures[1:]]
        stacks = [(one, _tail(self.directory.stack(one), 12)) for one in died]
        stacks += [(beat.rank, self._stack(beat.rank)) for beat in hanging]
        raise RankError(self._worded(notes, stacks) + self._onward())

    def _order(self, rank: int) -> tuple[int, int]:
        """A signal before an error, an error before what a rank says of a lost peer."""
        code = self.processes[rank].poll()
        if code is None or code == 0:
            return (9, rank)
        if code < 0:
            return (3 if code in _OF_A_PEER else 0, rank)
        return ({2: 1, 3: 4}.get(code, 2), rank)

    def _hanging(self) -> list[HeartbeatReading]:
        """Ranks that make no progress, after another has died, and do not wait for that one.

        A rank that computes comes to its next collective, or ends, and is not one of them: this
        waits for it, for as long as a rank may be silent.
        """
        while True:
            free = self._free(self.beats())
            if all(beat.age_s > self.hang_s or self.stopped(beat.rank) for beat in free):
                return free
            time.sleep(_POLL_S)

    def _free(self, beats: list[HeartbeatReading]) -> list[HeartbeatReading]:
        """Ranks in a step that wait for no other: stopped, or outside of every collective.

        What a GPU waits for does not show in its process; there a rank must be behind as well.
        """
        dead = (
            Heartbeat.read(self.directory.beat(rank), rank)
            for rank in range(self.ranks)
            if self.processes[rank].poll() is not None
        )
        most = max([beat.collective for beat in (*beats, *dead) if beat is not None], default=0)
        return [
            beat
            for beat in beats
            if beat.step >= 0
            and (
                self.stopped(beat.rank)
                or not (beat.inside or (self._on_gpu() and beat.collective >= most))
            )
        ]

    def _on_gpu(self) -> bool:
        return TrainPlan.load(self.directory.plan).machine.device.kind == "gpu"

    def stopped(self, rank: int) -> bool:
        """Whether a rank's process was stopped, as by SIGSTOP."""
        return _state(self.processes[rank].pid) == "stopped"

    def _death(self, rank: int) -> str:
        code = self.processes[rank].poll() or 0
        beat = self._reader.read(self.directory.beat(rank), rank)
        where = (
            f" in step {beat.step} at collective {beat.collective}{self._phase(rank)}"
            if beat is not None and beat.step >= 0
            else " before its first step"
        )
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with status {code}"
        )
        return f"{self._named(rank)} {how}{where}"

    def _hang(self, beat: HeartbeatReading) -> str:
        number = beat.collective + (0 if beat.inside else 1)
        return (
            f"{self._named(beat.rank)} hangs in step {beat.step}{self._phase(beat.rank)}, "
            f"{'inside' if beat.inside else 'before'} collective {number}, silent for "
            f"{beat.age_s:.0f} s"
        )

    def _named(self, rank: int) -> str:
        pid = self.processes[rank].pid
        return f"rank {rank} of {self.ranks} (pid {pid}, host {socket.gethostname()})"

    def _phase(self, rank: int) -> str:
        """What a rank computes, where it has recorded that."""
        with contextlib.suppress(RankError):  # a file that is cut short says nothing
            flight = read_flight(self.directory.flight(rank))
            inside = [] if flight is None else open_phases(flight)
            if inside:
                return f" in {inside[-1].name}"
        return ""

    def _stack(self, rank: int) -> str:
        stack = _tail(self.directory.stack(rank), 30)
        state = _state(self.processes[rank].pid)
        return stack or f"  no stack: the process is {state} and does not answer"

    def _worded(self, message: Sequence[str], stacks: Sequence[tuple[int, str]]) -> str:
        """One line for each failure, each with its stack."""
        lines = []
        for text, (_, stack) in zip(message, stacks, strict=True):
            lines.append(text + (f"; its stack:\n{stack}\n" if stack else "; "))
        return "".join(lines)

    def _onward(self) -> str:
        """Where the run begins when it is continued."""
        job = TrainPlan.load(self.directory.plan).job
        steps: set[int] = set()
        for place in self.directory.levels_of(job):
            with contextlib.suppress(OSError, CheckpointError):  # a place that is away has none
                steps.update(Store(place).steps())
        origin = self.directory.origin_of(job)
        if not steps and origin is not None:
            return f"the run continues from step {origin[0]}; continue with --resume"
        last = f"last checkpoint: step {max(steps)}" if steps else "there is no checkpoint yet"
        return f"{last}; continue with --resume"

    def _explain_hang(self, beats: list[HeartbeatReading]) -> None:
        self._signal(signal.SIGUSR1)
        time.sleep(_GRACE_S / 3)
        if not beats:
            raise RankError(
                f"no rank reached its first step within {self.start_s + self.timeout_s:.0f} s; "
                f"see {self.directory.ranks}"
            )
        free = self._free(beats)
        worst = blame(free or beats)
        hanging = [worst, *(beat for beat in free if beat.rank != worst.rank)]
        silent = silent_links({beat.rank: self.processes[beat.rank].pid for beat in beats})
        if silent:
            where = f"{worst.op or 'a collective'} of step {worst.step}"
            message = said(silent, min(beat.age_s for beat in beats), where)
            self.failures = (Failure(worst.rank, "lost", message),)
            raise RankError(f"{message}; all ranks were ended; " + self._onward())
        self.failures = tuple(Failure(beat.rank, "hang", self._hang(beat)) for beat in hanging)
        notes = [failure.text for failure in self.failures]
        stacks = [(beat.rank, self._stack(beat.rank)) for beat in hanging]
        raise RankError(self._worded(notes, stacks) + f"all ranks were ended; {self._onward()}")


def child_ended() -> bool:
    """Whether a child of this process has ended and was not waited for; it still can be."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True  # all were waited for


def _full(folder: Path) -> str:
    """A hint where the disk of the ranks' output has no room: then that may be missing."""
    room = os.statvfs(folder)
    if room.f_bavail * room.f_frsize >= _LEAST_BYTES:
        return ""
    return f" (the disk of {folder} is full: it may have lost what the rank printed)"


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
