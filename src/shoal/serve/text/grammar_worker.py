"""The process in which grammars of strangers are tried; see :mod:`shoal.serve.text.confined`.

``python -m shoal.serve.text.grammar_worker`` answers each form with its grammar, or with what is
wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shoal.core.errors import ShoalError
from shoal.serve.text.confined import answer_all
from shoal.serve.text.grammar import trial

MEMORY_BYTES = 2**30


def main() -> int:
    """Answer until the input ends."""
    return answer_all(_tried, {"form": {"choice": ["yes"]}}, memory_bytes=MEMORY_BYTES)


def _tried(question: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"kind": "good", "grammar": trial(question["form"])}
    except (ShoalError, ValueError, RecursionError) as cause:
        return {"kind": "bad", "message": str(cause)}


if __name__ == "__main__":
    sys.exit(main())
