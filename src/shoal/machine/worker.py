"""A child process that measures torch, so that the caller's threads stay as they are.

The parent sends one line of JSON, ``{"call": NAME, "with": {...}}``; the child answers
one line. NAME is a function of :mod:`shoal.machine.torch_side`, or ``module:function`` of the
probe that asks.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
from typing import Any

from shoal.core import children
from shoal.core.errors import MachineError, MissingExtraError
from shoal.core.parts import load_object


class TorchWorker:
    """One child process; torch is imported at its first call.

    Raises:
        MissingExtraError: torch is not installed.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("torch") is None:
            raise MissingExtraError("torch", "run", "measuring the framework")
        self._child = children.start(
            "shoal.machine.worker",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Wrong settings of the caller would otherwise be measured as the machine.
            env=children.environment(
                {"GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"},
                without=("OMP_NUM_THREADS", "MKL_NUM_THREADS"),
            ),
        )

    @property
    def ended(self) -> bool:
        """Whether it takes no further call: it was closed, or died."""
        return self._child.poll() is not None

    def send(self, call: str, **options: Any) -> None:
        """Start a call without waiting for it.

        Raises:
            MachineError: the child was closed.
        """
        assert self._child.stdin is not None
        if self._child.stdin.closed:
            raise MachineError("the measuring process has ended; start the probe again")
        with contextlib.suppress(BrokenPipeError):  # receive() says that the child is gone
            self._child.stdin.write(json.dumps({"call": call, "with": options}).encode() + b"\n")
            self._child.stdin.flush()

    def receive(self, timeout_s: float = 60.0) -> Any:
        """The answer to the call that was sent last.

        Raises:
            MachineError: the call failed, the child died, or it took too long.
        """
        out = self._child.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], timeout_s)
        if not ready:
            self.close()
            raise MachineError(
                f"the measuring process did not answer within {timeout_s:g} s; "
                "try again when the machine is less busy"
            )
        line = out.readline()
        if not line:
            raise MachineError(
                f"the measuring process ended with status {self._child.wait()}; "
                "check that python -c 'import torch' works"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise MachineError(f"measuring with torch failed: {answer['error']}")
        return answer["result"]

    def call(self, call: str, *, timeout_s: float = 60.0, **options: Any) -> Any:
        """Send and receive."""
        self.send(call, **options)
        return self.receive(timeout_s)

    def close(self) -> None:
        """End the child."""
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._child.terminate()
        try:
            self._child.wait(5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # Whatever a library prints must not be taken for an answer.
    os.dup2(2, 1)
    from shoal.machine import torch_side

    for line in sys.stdin:
        data = json.loads(line)
        try:
            call = data["call"]
            function = load_object(call) if ":" in call else getattr(torch_side, call)
            answer = {"result": function(**data["with"])}
        except Exception as cause:  # every failure is the parent's to report
            answer = {"error": f"{type(cause).__name__}: {cause}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
