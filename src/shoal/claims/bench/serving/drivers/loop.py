"""The lines that an engine's process reads and writes, one JSON object each.

The first line says what to load: ``model`` (a directory), ``form`` (bf16, int8 or int4),
``threads``, ``kv_tokens``, ``max_running``, ``max_position`` and ``scratch`` (a directory for
converted files). The answer is ``{"ready": {...}}`` with the fields of :class:`Loaded` but the
function. Then every line is one batch, ``{"prompts": [[id, ...], ...], "new": [n, ...]}``, and its
answer ``{"seconds": s, "tokens": [[id, ...], ...]}``. What fails is ``{"error": "..."}``.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Generate = Callable[[list[list[int]], list[int]], list[list[int]]]
"""Prompts, and the number of new tokens of each, to the new tokens."""

_PR_SET_PDEATHSIG = 1


class Loaded(NamedTuple):
    """An engine that is ready.

    Args:
        generate: what it does.
        version: of the engine.
        settings: that it was given, in words.
        weights: what they are here, if not what the form says.
    """

    generate: Generate
    version: str
    settings: str
    weights: str = ""


def made(target: Path, write: Callable[[Path], None]) -> Path:
    """A directory that ``write`` fills, if it is not there; half of one never is."""
    if not target.exists():
        part = target.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        write(part)
        part.rename(target)
    return target


def main(load: Callable[[dict[str, Any]], Loaded]) -> None:
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
        generate, *said = load(json.loads(sys.stdin.readline()))
        say(ready=dict(zip(Loaded._fields[1:], said, strict=True)))
        for line in sys.stdin:
            batch = json.loads(line)
            began = time.perf_counter()
            tokens = generate(batch["prompts"], batch["new"])
            say(seconds=time.perf_counter() - began, tokens=tokens)
    except Exception as cause:  # reported to the caller, and shown on standard error
        say(error=f"{type(cause).__name__}: {cause}"[:2000])
        raise
