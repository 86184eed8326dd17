"""What all tests share: ``tests/oracles``, one command line a process, and little to search.

The command line is put together once a process, not once a call: no call changes it. While tests
are collected nothing becomes garbage, and what is there then lasts as long as the process: the
search for cycles, which would go through all of it again and again, begins after it. Then it
comes every 20,000 objects: at Python's 700 it took a fifteenth of the time of all tests.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
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

ALL_SLOW = re.compile(r"^pytestmark = .*\bmark\.slow\b", re.MULTILINE)

sys.path[:0] = [str(Path(__file__).with_name("oracles")), str(Path(__file__).parent)]

import forked_children  # noqa: E402

forked_children.install()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Quick tests of a file run in one process: what they share is made once.

    So do all that read the source of the package, which is parsed once then. Slow ones go one by
    one to whoever is free, as files that take minutes would be waited for.
    """
    if config.getvalue("dist") == "load" and "not slow" in config.getvalue("markexpr"):
        from xdist.scheduler import LoadFileScheduling

        class Scheduling(LoadFileScheduling):
            def _split_scope(self, nodeid: str) -> str:
                file: str = super()._split_scope(nodeid)
                return "source" if file.startswith(("tests/contracts/", "tests/docs/")) else file

        return Scheduling(config, log)
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of which the marks leave nothing is not imported to find that out."""
    wanted = config.getvalue("markexpr").split(" and ")
    if not collection_path.match("test_*.py") or not {"slow", "not slow"} & {*wanted}:
        return None
    text = collection_path.read_text(encoding="utf-8")
    left = "mark.slow" in text if "slow" in wanted else not ALL_SLOW.search(text)
    return None if left else True


def pytest_collection_finish() -> None:
    """Begin to search for cycles, in what comes from now on."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()
