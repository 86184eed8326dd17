"""The tests that want a GPU: those marked ``gpu``, and Triton's twins, which run on one if there.

Prediction: none fails.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu.frame import ROOT, Case, NotHereError
from gpu.place import Place

NEEDS = ("pytest", "pytest_timeout", "hypothesis")
# They choose the GPU by themselves, where there is one.
TWINS = ("tests/kernel/test_triton_twins.py", "tests/kernel/test_rnn_triton.py")


def marked() -> list[str]:
    """Files with tests marked ``gpu``."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        str(path.relative_to(ROOT))
        for path in paths
        if re.search(r"^@pytest\.mark\.gpu$", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]


def cases(place: Place) -> Iterator[Case]:
    """A case a file."""
    for path in marked():
        yield Case(path, 150.0, _predict, functools.partial(_run, place, path, "gpu"))
    for path in TWINS:
        yield Case(path, 150.0, _predict, functools.partial(_run, place, path, "not slow"))


def _predict() -> dict[str, Any]:
    return {"failed": 0}


def _run(place: Place, path: str, marks: str) -> dict[str, Any]:
    if not (ROOT / path).is_file():
        raise FileNotFoundError(path)
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise NotHereError(f"{', '.join(missing)} is not installed")
    if place.dry:
        raise NotHereError("a dry run starts no tests")
    report = place.scratch / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if not report.is_file():
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stderr[-300:]}")
    return counted(report)


def counted(report: Path) -> dict[str, Any]:
    """How many tests of a report failed, passed and were skipped, and which failed."""
    tests = list(ElementTree.parse(report).iter("testcase"))
    failed = [one for one in tests if one.find("failure") is not None]
    failed += [one for one in tests if one.find("error") is not None]
    skipped = sum(one.find("skipped") is not None for one in tests)
    names = {str(one.get("name")): _why(one) for one in failed}
    passed = len(tests) - len(failed) - skipped
    return {"failed": len(failed), "passed": passed, "skipped": skipped, "failures": names}


def _why(test: ElementTree.Element) -> str:
    parts = [test.find("failure"), test.find("error")]
    return next((str(one.get("message"))[:300] for one in parts if one is not None), "")
