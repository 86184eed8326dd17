"""What all tests share: ``tests/oracles``, one command line a process, and little to search.

The command line is put together once a process, not once a call: no call changes it. While tests
are collected nothing becomes garbage, and what is there then lasts as long as the process: the
search for cycles, which would go through all of it again and again, begins after it. Then it
comes every 20,000 objects: at Python's 700 it took a fifteenth of the time of all tests.
"""

from __future__ import annotations

import functools
import gc
import sys
from pathlib import Path
from typing import Any

import hypothesis
import typer.main
import typer.testing

gc.disable()

# A busy machine draws slowly; that is no fault of a test. All else is as it is, in CI too.
hypothesis.settings.register_profile(
    "busy",
    hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.too_slow]),
)
hypothesis.settings.load_profile("busy")

COMMAND: Any = functools.cache(typer.main.get_command)
setattr(typer.main, "get_command", COMMAND)  # noqa: B010 - a function of a module
setattr(typer.testing, "_get_command", COMMAND)  # noqa: B010

sys.path.insert(0, str(Path(__file__).with_name("oracles")))


def pytest_collection_finish() -> None:
    """Begin to search for cycles, in what comes from now on."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
