"""The table of promises: every test that it names exists, and it is made from what is on file."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import ROOT, script

RELIABILITY = script("reliability")
ROWS = RELIABILITY.rows()
TESTS = sorted({test for row in ROWS for test in row["tests"]})


def test_rows_are_whole() -> None:
    assert len(ROWS) >= 24
    assert len({row["id"] for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert {"id", "lesson", "promise", "tests"} <= set(row)
        assert set(row) <= {"id", "lesson", "promise", "tests", "benchmarks", "record", "pending"}
        assert row["tests"], row["id"]


@pytest.mark.parametrize("file", sorted({test.partition("::")[0] for test in TESTS}))
def test_every_test_that_is_named_exists(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {test.partition("::")[2] for test in TESTS if test.startswith(f"{file}::")} <= there


@pytest.mark.slow
def test_every_test_that_is_named_is_collected() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-n", "0", *TESTS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = {line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    assert set(TESTS) <= collected


def test_benchmarks_that_are_named_are_on_file() -> None:
    data = json.loads((ROOT / "results" / "benchmarks.json").read_text())
    names = {item["name"] for item in data["rows"]}
    assert {name for row in ROWS for name in row.get("benchmarks", ())} <= names


def test_results_on_file_are_of_rows_that_exist_and_hold() -> None:
    data = json.loads(RELIABILITY.RESULTS.read_text())["rows"]
    assert set(data) <= {row["id"] for row in ROWS}
    for row in ROWS:
        assert row["id"] in data or row.get("benchmarks"), f"{row['id']}: run scripts/reliability"
    assert {name: one["failed"] for name, one in data.items() if one["failed"]} == {}


def test_what_tests_report_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(record_property):\n    record_property('figure', '3 of 3')\n"
        "def test_bad(record_property):\n    record_property('figure', 'no')\n    assert 0\n"
        "@pytest.mark.skip\ndef test_left_out():\n    pass\n"
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", "-c", "/dev/null"]
    subprocess.run(
        [*command, "--rootdir", str(tmp_path), f"--junitxml={report}", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
    )
    result = RELIABILITY.outcome(report)
    assert (result["passed"], result["skipped"], result["figures"]) == (1, 1, ["3 of 3"])
    assert result["failed"] == ["test_some::test_bad"]


def test_failures_are_shown_first_and_gaps_by_name(tmp_path: Path) -> None:
    results = tmp_path / "results"
    (tmp_path / "tests").mkdir()
    results.mkdir()
    rows = [
        {"id": "a", "lesson": "l|1", "promise": "p", "tests": ["tests/x.py::test_y"]},
        {"id": "b", "lesson": "l2", "promise": "p", "tests": ["t"], "pending": "much"},
    ]
    (tmp_path / "tests" / "reliability.yaml").write_text(json.dumps(rows))
    one = {"passed": 2, "failed": ["x"], "skipped": 1, "seconds": 1.0, "figures": ["7 of 9"],
           "date": "2026-01-02", "commit": "c"}  # fmt: skip
    fields = {"machine": {"cpu": "A CPU"}, "rows": {"a": one}}
    (results / "reliability.json").write_text(json.dumps(fields))
    text = script("results").promises(results)
    assert "| l\\|1 | p | **1 tests fail**; 7 of 9; 2 tests pass; 1 skipped | 2026-01-02 |" in text
    assert "| **not proven yet**: much |  |" in text
    assert "`x.py::test_y`" in text
