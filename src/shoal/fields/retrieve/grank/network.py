"""Peers in processes on this machine, and what is asked of all of them."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.core import children
from shoal.fields.retrieve.grank.protocols import RetrieveError

_LEAVE_S, _ANSWER_S = 10.0, 120.0


class RankingPeer:
    """One peer; a command waits for its answer.

    Args:
        description: what :mod:`~shoal.fields.retrieve.grank.peer_process` reads first.

    Raises:
        RetrieveError: it does not start; says why.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        self.process: subprocess.Popen[Any] = children.start(
            "shoal.fields.retrieve.grank.peer_process",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=children.environment({"OMP_NUM_THREADS": "1"}),
        )
        self._said: list[str] = []
        self._lock = threading.Lock()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=read, daemon=True) for read in (self._answers, self._listen)
        ]
        for thread in self._threads:
            thread.start()
        self._write(description)
        self._description = description
        self.address, self.peer = "", ""

    def ready(self) -> None:
        """Wait until it listens."""
        hello = self._read()
        self.address, self.peer = hello["address"], hello["peer"]

    def ask(self, command: str, **arguments: Any) -> Any:
        """The answer to a command.

        Raises:
            RetrieveError: the peer has ended; says why.
        """
        with self._lock:
            self._write([command, arguments])
            return self._read()

    def close(self) -> None:
        """Of a process that has ended."""
        for thread in self._threads:
            thread.join(_LEAVE_S)

    def _write(self, value: object) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()
        except OSError:
            raise self._ended() from None

    def _read(self) -> Any:
        try:
            line = self._lines.get(timeout=_ANSWER_S)
        except queue.Empty:
            raise RetrieveError(f"a peer has not answered for {_ANSWER_S:g} s") from None
        if not line:
            raise self._ended()
        return json.loads(line)

    def _answers(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _listen(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self._said = [*self._said[-20:], line.strip()]

    def _ended(self) -> RetrieveError:
        code = self.process.wait(_LEAVE_S)
        last = next((one for one in reversed(self._said) if one), f"status {code}")
        return RetrieveError(f"a peer has ended: {last}")


@contextmanager
def network(root: Path, count: int, common: Mapping[str, Any]) -> Iterator[list[RankingPeer]]:
    """So many peers; each joins through the first.

    Args:
        root: each has a directory in it.
        count: of peers.
        common: of their descriptions.

    Raises:
        RetrieveError: one does not start.
    """
    peers: list[RankingPeer] = []
    try:
        for at in range(count):
            join = [peers[0].address] if peers else []
            own = {"directory": str(root / f"peer-{at}"), "join": join, "seed": at}
            peers.append(RankingPeer({**common, **own}))
            if at == 0:
                peers[0].ready()
        for peer in peers[1:]:
            peer.ready()
        yield peers
    finally:
        for peer in peers:
            if peer.process.stdin is not None:
                with suppress(OSError):
                    peer.process.stdin.close()
        end = time.monotonic() + _LEAVE_S
        while time.monotonic() < end and any(one.process.poll() is None for one in peers):
            time.sleep(0.02)
        children.kill(one.process for one in peers)
        for peer in peers:
            peer.close()


def settle(peers: list[RankingPeer], limit_s: float) -> bool:
    """Wait until all have the same entries; whether they had in time."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        states = [peer.ask("state") for peer in peers]
        if all(one["have"] == states[0]["have"] for one in states):
            return True
        time.sleep(0.1)
    return False
