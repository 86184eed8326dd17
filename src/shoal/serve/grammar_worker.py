"""The process in which grammars of strangers are tried, so that it can be killed.

``python -m shoal.serve.grammar_worker`` reads forms from its standard input and answers each
with its grammar, or with what is wrong: messages of :mod:`shoal.serve.wire`. Its memory is
limited, and its parent ends it when it thinks for too long.
"""

from __future__ import annotations

import os
import resource
import sys
from typing import Any

from shoal.core.errors import ShoalError
from shoal.serve.grammar import trial
from shoal.serve.wire import Decoder, encode

__all__ = ["main"]

MEMORY_BYTES = 2**30


def main() -> int:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    decoder = Decoder()
    _answer({"kind": "ready", "grammar": trial({"choice": ["yes"]})})
    while data := os.read(0, 2**16):
        for message in decoder.feed(data):
            _answer(_tried(message["form"]))
    return 0


def _tried(form: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"kind": "good", "grammar": trial(form)}
    except (ShoalError, ValueError, RecursionError) as cause:
        return {"kind": "bad", "message": str(cause)}


def _answer(message: dict[str, Any]) -> None:
    sys.stdout.buffer.write(encode(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
