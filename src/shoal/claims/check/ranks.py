"""Starting the processes of a check, watching them, and leaving none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.claims.check.protocols import CheckSettings
from shoal.claims.check.store import CheckDirectory, read_facts
from shoal.core import children
from shoal.core.errors import ConfigError, RankError

_POLL_S = 0.02
_CONNECTION_LOST = 3
_WAITING = ("torch/distributed", "_engine_run_backward")


class Processes:
    """One process for each name in ``who``.

    Args:
        place: the check's directory.
        settings: for the time limit.
        who: ``["one"]`` or the ranks' numbers.
    """

    def __init__(self, place: CheckDirectory, settings: CheckSettings, who: Sequence[str]) -> None:
        self.place = place
        self.settings = settings
        self.who = list(who)
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self, tick: Callable[[str], None]) -> None:
        """Start all, return when all ended well.

        Args:
            tick: called with what the slowest of them is doing.

        Raises:
            ConfigError: the user's program failed; file and line.
            RankError: a process died or hangs.
        """
        try:
            for name in self.who:
                self.processes.append(self._start(name))
            self._wait(tick)
        finally:
            self.end()

    def end(self) -> None:
        """Kill what still runs, and whatever it started."""
        children.kill(self.processes)
        if os.environ.get("SHOAL_DEBUG"):
            for name in self.who:
                for line in _read(self.place.log(name)).splitlines():
                    print(f"[{name}] {line}", file=sys.stderr)

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        rank = 0 if name == "one" else int(name)
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(self.who)),
            "LOCAL_WORLD_SIZE": str(len(self.who)),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }
        log = os.open(self.place.log(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            return children.start(
                "shoal.claims.check.worker",
                *(str(self.place.root), name),
                env=children.environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        finally:
            os.close(log)

    def _wait(self, tick: Callable[[str], None]) -> None:
        changed = time.monotonic()
        seen: list[tuple[int, str]] = []
        while True:
            codes = [process.poll() for process in self.processes]
            if all(code == 0 for code in codes):
                return
            if any(code not in (None, 0) for code in codes):
                self._explain_death()
            doing = [self._doing(index) for index in range(len(self.who))]
            if doing != seen:
                changed, seen = time.monotonic(), doing
                tick(min(doing)[1])
            elif time.monotonic() - changed > self.settings.timeout_s:
                self._explain_hang(doing)
            time.sleep(_POLL_S)

    def _named(self, index: int) -> str:
        name = self.who[index]
        if name == "one":
            return "the one-process side"
        return f"rank {name} of {len(self.who)} (pid {self.processes[index].pid})"

    def _doing(self, index: int) -> tuple[int, str]:
        """How many things a process has begun, and the last of them."""
        number, _, text = _read(self.place.doing(self.who[index])).partition(" ")
        return (int(number), text) if number.isdecimal() else (0, "starting")

    def _explain_death(self) -> None:
        # Let the peers' errors arrive; the earliest is the cause, and a signal before all.
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and any(p.poll() is None for p in self.processes):
            time.sleep(_POLL_S)
        codes = [process.poll() or 0 for process in self.processes]
        killed = [index for index, code in enumerate(codes) if code < 0]
        if killed:
            index = killed[0]
            raise RankError(
                f"{self._named(index)} was killed by {signal.Signals(-codes[index]).name} on host "
                f"{socket.gethostname()} while {self._doing(index)[1]}"
                f"{self._printed(index)}"
            )
        errors = []
        for index, name in enumerate(self.who):
            if self.place.error(name).exists():
                facts = read_facts(self.place.error(name))
                lost = codes[index] == _CONNECTION_LOST
                errors.append((lost, facts["time"], index, facts))
        if not errors:
            index = next(i for i, code in enumerate(codes) if code)
            raise RankError(
                f"{self._named(index)} ended with status {codes[index]} while "
                f"{self._doing(index)[1]}{self._printed(index)}"
            )
        _, _, index, facts = min(errors, key=lambda error: error[:3])
        if os.environ.get("SHOAL_DEBUG"):
            print(facts["trace"], file=sys.stderr)
        prefix = "" if facts["own"] or self.who == ["one"] else f"rank {self.who[index]}: "
        raise ConfigError(prefix + facts["message"])

    def _explain_hang(self, doing: Sequence[tuple[int, str]]) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.5)
        stacks = [_read(self.place.stack(name)) for name in self.who]
        # The others wait for the one that has come least far; among several, it is the one
        # that is in no collective and no backward pass, which may hold one.
        running = [index for index, p in enumerate(self.processes) if p.poll() is None]
        index = min(
            running,
            key=lambda i: (doing[i][0], any(w in _main(stacks[i]) for w in _WAITING), i),
        )
        others = "; ".join(
            f"rank {name}: {text}" for name, (_, text) in zip(self.who, doing, strict=True)
        )
        stack = "\n".join(f"  {line}" for line in self._shown(stacks[index]))
        raise RankError(
            f"{self._named(index)} hangs: no progress for {self.settings.timeout_s:g} s "
            f"while {doing[index][1]}"
            + (f" ({others})" if len(self.who) > 1 else "")
            + (f"; its stack:\n{stack}" if stack else "; it does not respond")
            + "\nall processes were terminated; raise --timeout to wait longer"
        )

    def _shown(self, stacks: str) -> list[str]:
        """The innermost frames, and those of the user's file."""
        path = self.settings.path
        own = "" if path is None else str(path.resolve())
        frames = [line for line in _main(stacks).splitlines() if line.startswith("  File")]
        return [line for at, line in enumerate(frames) if at < 3 or (own and own in line)]

    def _printed(self, index: int) -> str:
        lines = _read(self.place.log(self.who[index])).strip().splitlines()[-3:]
        return "; its last output: " + " | ".join(lines) if lines else ""


def _main(stacks: str) -> str:
    """The main thread's stack, which faulthandler prints last."""
    return stacks.rpartition("Current thread")[2] or stacks.rpartition("Thread")[2]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""
