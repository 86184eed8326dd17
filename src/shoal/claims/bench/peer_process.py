"""A peer's process, perhaps in an environment of its own, that answers one JSON line at a time."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from shoal.core import children
from shoal.core.errors import ServeError


class PeerProcess:
    """A process that reads and writes JSON objects, one a line.

    Args:
        name: of the peer, for messages.
        words: its command line.
        variables: to add to this process's environment.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, name: str, words: Sequence[str], variables: Mapping[str, str] = {}) -> None:
        self._name = name
        # What it says beside its answers.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        environment = {**os.environ, **variables}
        if words[0] != sys.executable:
            # A peer's environment has no part of this one.
            environment.pop("PYTHONPATH", None)
        try:
            self._process = children.from_lasting_thread(
                lambda: subprocess.Popen(
                    words,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    env=environment,
                    start_new_session=True,
                ),
                lambda process: children.kill([process]),
            )
        except BaseException:
            self._log.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, message: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """What it answers to a message, or says next without one.

        Raises:
            ServeError: it ended, was silent for too long or wrote something else than JSON.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            if message is not None:
                stdin.write(json.dumps(message).encode() + b"\n")
                stdin.flush()
            answer = json.loads(_line(stdout.fileno(), timeout_s))
            if not isinstance(answer, dict):
                raise ValueError(f"{answer!r} is not a JSON object")
        except (BrokenPipeError, TimeoutError, EOFError, ValueError) as cause:
            why = "the process ended" if isinstance(cause, BrokenPipeError) else cause
            raise ServeError(
                f"{self._name}: {why}; its last output: {self._last_words()}"
            ) from cause
        return answer

    def close(self) -> None:
        """End the process and all that it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                # What was not read of a question is lost with the process.
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._log.close()

    def said(self) -> str:
        """What it said beside its answers so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), min(size, 2**20), max(0, size - 2**20)).decode(
            errors="replace"
        )

    def _last_words(self) -> str:
        lines = self.said().strip().splitlines()
        return " | ".join(lines[-3:])[-600:] or "nothing"


def _line(file: int, timeout_s: float) -> bytes:
    """One line; nothing follows it before the next question.

    Raises:
        TimeoutError: it does not come in time.
        EOFError: the other end is closed.
    """
    result = b""
    until = time.monotonic() + timeout_s
    while not result.endswith(b"\n"):
        ready, _, _ = select.select([file], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            raise TimeoutError(f"no answer within {timeout_s:.0f} s")
        data = os.read(file, 2**20)
        if not data:
            raise EOFError("the process ended")
        result += data
    return result
