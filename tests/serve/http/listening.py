"""Every program of the package that listens, as a process of its own.

``python listening.py KIND MODEL DESCRIPTORS`` starts one, with so many descriptors at most (0 for
the machine's own limit), and prints its address first.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

KINDS = ("server", "router", "dashboard")
WAIT_S = 60


@dataclass(frozen=True)
class Listening:
    """One that answers."""

    kind: str
    port: int
    process: subprocess.Popen
    log: Path

    @property
    def health(self):
        return "/healthz" if self.kind == "dashboard" else "/health"

    @property
    def posted(self):
        """A path that takes a body."""
        return "/server/chat" if self.kind == "dashboard" else "/v1/completions"

    def ask_health(self, timeout_s=WAIT_S):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request("GET", self.health)
            answer = connection.getresponse()
            answer.read()
            return answer.status


@contextlib.contextmanager
def listening(kind, model, place, *, descriptors=0):
    """A process of this kind, with the health of which all is well."""
    log = place / f"{kind}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, __file__, kind, str(model), str(descriptors)],
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            cwd=place,
            env={**os.environ, "SHOAL_HOME": str(place)},
        )
    try:
        line = process.stdout.readline()
        assert line.startswith("http://"), log.read_text()
        result = Listening(kind, int(line.split("/")[2].rpartition(":")[2]), process, log)
        assert result.ask_health() == 200
        yield result
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(WAIT_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def main(kind, model, descriptors):
    from shoal.core.logs import log_to_stderr

    if descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    if kind == "dashboard":
        from shoal.app.cli import main as shoal

        sys.argv = ["shoal", "dash", "--no-open", "--port", "0", "--server", "http://127.0.0.1:9"]
        shoal()
        return
    from shoal.ir import ServeJob
    from shoal.serve.http.server import ServerOptions, serve

    log_to_stderr()
    job = ServeJob(model=model, replicas=2 if kind == "router" else 1)
    options = ServerOptions(
        port=0,
        grace_s=0.5,
        factory="fake_engine:build",
        key=os.environ.get("SHOAL_API_KEY"),
    )
    serve(job, options, ready=lambda server: print(server.url, flush=True))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
