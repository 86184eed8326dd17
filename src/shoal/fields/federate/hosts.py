"""Processes of clients: started, watched, and started again when they die."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.core import children
from shoal.fields.federate.protocols import FederationError

# Seconds that a process of clients may take to end when the run is over.
_FAREWELL_S = 30.0


@dataclass
class Host:
    """A process and its clients.

    Args:
        clients: what it is given of each.
        process: that runs them; None when it may not be started again.
        restarts: how often it was started again.
    """

    clients: Sequence[Mapping[str, Any]]
    process: subprocess.Popen[Any] | None = None
    restarts: int = 0

    @property
    def names(self) -> list[str]:
        """Of its clients."""
        return [str(one["name"]) for one in self.clients]


class Hosts:
    """All processes of clients.

    Args:
        words: what each of them is given beside its clients.
        dealt: clients of each process.
        restarts: how often each may be started again.
        prefix: words before the command line of a process, by its number, such as those that run
            it in a network namespace.
    """

    def __init__(
        self,
        words: Mapping[str, Any],
        dealt: Sequence[Sequence[Mapping[str, Any]]],
        restarts: int,
        prefix: Callable[[int], Sequence[str]] = lambda _: (),
    ) -> None:
        self._words, self._restarts, self._prefix = words, restarts, prefix
        self.all = [Host(clients=clients) for clients in dealt]
        for at, host in enumerate(self.all):
            self._start(at, host)

    @property
    def restarted(self) -> int:
        """How often any process was started again."""
        return sum(host.restarts for host in self.all)

    def processes(self) -> list[subprocess.Popen[Any]]:
        """Those that were not given up."""
        return [host.process for host in self.all if host.process is not None]

    def watch(self, gone: Callable[[list[str]], None]) -> None:
        """See who has died; start it again, if it may be.

        Args:
            gone: called with the clients of a process that died, before it is started again.

        Raises:
            FederationError: all have died as often as they may.
        """
        why = ""
        for at, host in enumerate(self.all):
            if host.process is None or host.process.poll() is None:
                continue
            why = _why(host.process)
            _end(host.process)  # with what it has started
            host.process = None
            gone(host.names)
            if host.restarts < self._restarts:
                host.restarts += 1
                self._start(at, host)
        if why and not self.processes():
            raise FederationError(f"all processes of clients have ended: {why}")

    def farewell(self) -> None:
        """Let them end by themselves."""
        for process in self.processes():
            process.wait(_FAREWELL_S)

    def kill(self) -> None:
        """End them all."""
        for process in self.processes():
            _end(process)

    def _start(self, at: int, host: Host) -> None:
        process = children.start(
            "shoal.fields.federate.wire.client",
            prefix=self._prefix(at),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=children.environment({"OMP_NUM_THREADS": "1"}),
        )
        host.process = process
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({**self._words, "clients": host.clients}) + "\n")
            process.stdin.close()
        except BrokenPipeError:  # it has died at once, which the next watch sees
            pass


def _end(process: subprocess.Popen[Any]) -> None:
    """Kill a process, and close what it has said."""
    children.kill([process])
    if process.stderr is not None:
        process.stderr.close()


def _why(process: subprocess.Popen[Any]) -> str:
    assert process.stderr is not None
    said = process.stderr.read().strip().splitlines()
    return said[-1] if said else f"exit status {process.returncode}"
