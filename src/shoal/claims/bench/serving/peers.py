"""Engines in processes of their own, of which one works at a time."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from shoal.claims.bench.serving.values import Form, ServingPeer
from shoal.core import children
from shoal.core.errors import ServeError

__all__ = ["PeerEngine", "known", "resting"]

_DRIVERS = Path(__file__).parent / "drivers"
# Loading converts or quantizes a model the first time.
_LOAD_S, _BATCH_S = 600.0, 300.0


def known(environments: Path | None) -> tuple[dict[str, ServingPeer], dict[str, str]]:
    """Engines that can be started here, and why the others cannot.

    Args:
        environments: a directory with one virtual environment an engine, named ``llama.cpp``
            and ``vllm``, as ``scripts/peers`` makes it.
    """
    peers = {
        "shoal": ServingPeer(
            name="shoal", driver="of_shoal", python=sys.executable, forms=_ALL, needed=True
        )
    }
    missing = {}
    try:
        import transformers  # noqa: F401
    except ImportError:
        missing["transformers"] = "not installed; install shoal-ml[bench]"
    else:
        for name, driver in (
            ("transformers", "of_transformers"),
            ("transformers, continuous", "of_transformers_continuous"),
        ):
            peers[name] = ServingPeer(name=name, driver=driver, python=sys.executable)
    for name, driver, forms in (
        ("llama.cpp", "of_llama_cpp", _ALL),
        ("vllm", "of_vllm", _ALL[:1]),
    ):
        python = environments / name / "bin" / "python" if environments else None
        if python is None or not python.exists():
            missing[name] = "no environment; make one with scripts/peers and give --environments"
        else:
            peers[name] = ServingPeer(name=name, driver=driver, python=str(python), forms=forms)
    return peers, missing


_ALL: tuple[Form, ...] = ("bf16", "int8", "int4")


class PeerEngine:
    """A loaded engine, resting until it is asked.

    Args:
        peer: which.
        options: the first line of ``drivers/loop.py``.

    Raises:
        ServeError: it cannot be started or loaded.
    """

    def __init__(self, peer: ServingPeer, options: dict[str, Any]) -> None:
        self.peer = peer
        # What it says beside its answers.
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        if peer.python != sys.executable:
            # A peer's environment has no part of this one.
            environment.pop("PYTHONPATH", None)
        self._process = children.from_lasting_thread(
            lambda: subprocess.Popen(
                [peer.python, str(_DRIVERS / f"{peer.driver}.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=environment,
                start_new_session=True,
            )
        )
        try:
            self.version = str(self._ask(options, _LOAD_S)["ready"]["version"])
        except BaseException:
            self.close()
            raise
        self._rest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self, prompts: Sequence[Sequence[int]], new: Sequence[int]
    ) -> tuple[float, list[list[int]]]:
        """Seconds of a batch, and its tokens; all others rest meanwhile.

        Raises:
            ServeError: the engine failed, or gave another number of tokens.
        """
        self._signal(signal.SIGCONT)
        try:
            requests = {"prompts": [list(p) for p in prompts], "new": list(new)}
            answer = self._ask(requests, _BATCH_S)
        finally:
            self._rest()
        tokens: list[list[int]] = answer["tokens"]
        if [len(row) for row in tokens] != list(new):
            raise ServeError(
                f"{self.peer.name}: {[len(row) for row in tokens]} new tokens: expected {list(new)}"
            )
        return float(answer["seconds"]), tokens

    def close(self) -> None:
        """End the process and all that it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()

    def said(self) -> str:
        """What it said beside its answers so far."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), min(size, 2**20), max(0, size - 2**20)).decode(
            errors="replace"
        )

    def _rest(self) -> None:
        """Stop, and wait until it has: the next engine is to be alone."""
        self._signal(signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):  # it has ended, and was asked why
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _ask(self, message: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(message).encode() + b"\n")
            stdin.flush()
            line = _line(stdout.fileno(), timeout_s)
        except (BrokenPipeError, TimeoutError, EOFError) as cause:
            raise ServeError(
                f"{self.peer.name}: {cause or 'the process ended'}; it said: {self._last_words()}"
            ) from cause
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ServeError(f"{self.peer.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        lines = self.said().strip().splitlines()
        return " | ".join(lines[-3:])[:600] or "nothing"


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


@contextlib.contextmanager
def resting(engines: Sequence[PeerEngine]) -> Iterator[None]:
    """Close all engines at the end."""
    try:
        yield
    finally:
        for engine in engines:
            engine.close()
