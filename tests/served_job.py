"""A job that serves, run by ``shoal run`` in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


class ServedJob:
    """``shoal run KIND SUBJECT ...``, which has said where it serves.

    Args:
        kind: of the job.
        subject: what it is about.
        run: directory of the run.
        more: further words of the command.
    """

    def __init__(self, kind: str, subject: str, run: Path, *more: str) -> None:
        self._events, self._begun = run / "events.jsonl", time.time()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "run", kind, subject, "-m", "laptop",
             "--dir", str(run), "-q", *more],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.url = self._url()

    def stop(self, by: int = signal.SIGINT) -> str:
        """Send a signal; all that the process wrote until it ended."""
        self.process.send_signal(by)
        return self.process.communicate(timeout=30)[0]

    def _url(self) -> str:
        end = time.monotonic() + 60
        while time.monotonic() < end and self.process.poll() is None:
            lines = self._events.read_text().splitlines() if self._events.exists() else []
            events = [json.loads(one) for one in lines if '"serving"' in one]
            if events and events[-1]["time"] > self._begun:
                return events[-1]["url"]
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(self.process.communicate(timeout=10)[0])
