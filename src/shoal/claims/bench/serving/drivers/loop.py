"""The lines that an engine's process reads and writes, one JSON object each.

The first line says what to load: ``model`` (a directory), ``form`` (bf16, int8 or int4),
``threads``, ``kv_tokens``, ``max_running``, ``max_position`` and ``scratch`` (a directory for
converted files). The answer is ``{"ready": {...}}`` with the engine's version. Then every line is
one batch, ``{"prompts": [[id, ...], ...], "new": [n, ...]}``, and its answer
``{"seconds": s, "tokens": [[id, ...], ...]}``. What fails is ``{"error": "..."}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Prompts, and the number of new tokens of each, to the new tokens."""

_PR_SET_PDEATHSIG = 1


def main(load: Callable[[dict[str, Any]], tuple[Generate, str]]) -> None:
    """Load what the first line says, then answer batches until the input ends."""
    # A waiting process cannot see that its input has ended, so the system ends it with its parent.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Libraries print to standard output; only answers belong there.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**answer: object) -> None:
        answers.write(json.dumps(answer) + "\n")

    try:
        generate, version = load(json.loads(sys.stdin.readline()))
        say(ready={"version": version})
        for line in sys.stdin:
            batch = json.loads(line)
            began = time.perf_counter()
            tokens = generate(batch["prompts"], batch["new"])
            say(seconds=time.perf_counter() - began, tokens=tokens)
    except Exception as cause:  # reported to the caller, and shown on standard error
        say(error=f"{type(cause).__name__}: {cause}"[:2000])
        raise
