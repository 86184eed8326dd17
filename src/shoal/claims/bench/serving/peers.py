"""Engines in processes of their own, of which one works at a time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shoal.claims.bench.peer_process import PeerProcess
from shoal.claims.bench.serving.values import Form, ServingPeer
from shoal.core.errors import ServeError, install

_DRIVERS = Path(__file__).parent / "drivers"
# Loading converts or quantizes a model the first time.
_LOAD_S, _BATCH_S = 600.0, 300.0


def known(environments: Path | None) -> tuple[dict[str, ServingPeer], dict[str, str]]:
    """Engines that can be started here, and why the others cannot.

    Args:
        environments: a directory with one virtual environment an engine, named as in
            :data:`_ENVIRONMENTS`, as ``scripts/peers`` makes it.
    """
    peers = {
        "shoal": ServingPeer(name="shoal", driver="of_shoal", python=sys.executable, needed=True)
    }
    missing = {}
    try:
        import transformers  # noqa: F401
    except ImportError:
        missing["transformers"] = f"not installed; {install('bench')}"
    else:
        for name, driver in (
            ("transformers", "of_transformers"),
            ("transformers, continuous", "of_transformers_continuous"),
        ):
            peers[name] = ServingPeer(
                name=name,
                driver=driver,
                python=sys.executable,
                lacks=_lacking("has no quantized weights without another package"),
            )
    for name, place, driver, lacks in _ENVIRONMENTS:
        python = environments / place / "bin" / "python" if environments else None
        if python is None or not python.exists():
            missing[name] = "no environment; make one with scripts/peers and give --environments"
        else:
            peers[name] = ServingPeer(name=name, driver=driver, python=str(python), lacks=lacks)
    return peers, missing


def _lacking(why: str) -> dict[Form, str]:
    return {"int8": why, "int4": why}


# Engine, its directory, its driver, and what it is not asked for.
_ENVIRONMENTS: tuple[tuple[str, str, str, dict[Form, str]], ...] = (
    ("llama.cpp", "llama.cpp", "of_llama_cpp", {}),
    ("vllm", "vllm", "of_vllm", _lacking("reads quantized directories, and quantizes none here")),
    ("openvino-genai", "openvino", "of_openvino", {}),
    ("onnxruntime-genai", "onnx", "of_onnxruntime", {}),
)


class PeerEngine(PeerProcess):
    """A loaded engine, resting until it is asked.

    Args:
        peer: which.
        options: the first line of ``drivers/loop.py``.

    Raises:
        ServeError: it cannot be started or loaded.
    """

    def __init__(self, peer: ServingPeer, options: dict[str, Any]) -> None:
        self.peer = peer
        super().__init__(
            peer.name,
            [peer.python, str(_DRIVERS / f"{peer.driver}.py")],
            {"TOKENIZERS_PARALLELISM": "false"},
        )
        try:
            ready = self.ask(options, _LOAD_S)["ready"]
            self.version, self.settings, self.weights = (
                str(ready[name]) for name in ("version", "settings", "weights")
            )
        except BaseException:
            self.close()
            raise
        self._rest()

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
            answer = self.ask(requests, _BATCH_S)
        finally:
            self._rest()
        tokens: list[list[int]] = answer["tokens"]
        if [len(row) for row in tokens] != list(new):
            raise ServeError(
                f"{self.peer.name}: {[len(row) for row in tokens]} new tokens: expected {list(new)}"
            )
        return float(answer["seconds"]), tokens

    def ask(self, message: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        """See :class:`PeerProcess`; an answer that says what failed is an error."""
        answer = super().ask(message, timeout_s)
        if "error" in answer:
            raise ServeError(f"{self.peer.name}: {answer['error']}")
        return answer

    def _rest(self) -> None:
        """Stop, and wait until it has: the next engine is to be alone."""
        self._signal(signal.SIGSTOP)
        with contextlib.suppress(ChildProcessError):  # it has ended, and was asked why
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


@contextlib.contextmanager
def resting(engines: Sequence[PeerEngine]) -> Iterator[None]:
    """Close all engines at the end."""
    try:
        yield
    finally:
        for engine in engines:
            engine.close()
