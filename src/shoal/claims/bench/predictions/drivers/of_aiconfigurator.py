"""Answers of AIConfigurator, in a process and an environment of its own: nothing of Shoal is here.

The first line that it writes is ``{"ready": version}``, or ``{"missing": why}``. Then every line
that it reads holds the arguments of ``cli_estimate`` as a JSON object, and its answer is
``{"ttft_ms": ms, "tpot_ms": ms, "seconds": s}``, or ``{"error": why, "seconds": s}``.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time


def main() -> None:
    """Answer until the input ends."""
    # Libraries print to standard output; only answers belong there.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        from importlib.metadata import version

        from aiconfigurator.cli.api import cli_estimate
        from aiconfigurator.sdk.perf_database import get_latest_database_version

        ready = version("aiconfigurator")
    except ImportError as cause:
        answers.write(json.dumps({"missing": str(cause)}) + "\n")
        return
    logging.disable(logging.WARNING)
    # Without a version, each call reads all version files three times: seconds, for one answer.
    latest = functools.cache(get_latest_database_version)
    answers.write(json.dumps({"ready": ready}) + "\n")
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        try:
            newest = latest(system=asked["system_name"], backend=asked["backend_name"])
            result = cli_estimate(**asked, backend_version=newest)
            answer: dict[str, object] = {
                "ttft_ms": float(result.ttft),
                "tpot_ms": float(result.tpot),
            }
        except Exception as cause:  # whatever it cannot answer is counted with its reason
            answer = {"error": f"{type(cause).__name__}: {cause}"[:600]}
        answers.write(json.dumps({**answer, "seconds": time.perf_counter() - began}) + "\n")


if __name__ == "__main__":
    main()
