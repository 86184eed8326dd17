"""A kind of job from a wheel that somebody else built: planned, run, scored, shown."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from own_home import own_home
from shoal.core.tables import digits

SORTED = ("--numbers", "5000", "-m", "laptop")
HERE = Path(__file__).parent / "third_party"

# What a browser gets of the run, and of its plan, in the directory that is given.
PAGE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from dash_home import client_of, settings
from shoal.cost.score import run_id
client = client_of(settings(Path.cwd()))
for place in ("runs", "plans"):
    answer = client.get(f"/{place}/{run_id(Path(sys.argv[1]))}")
    assert answer.status_code == 200, answer.text
    print(answer.text)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A place with the wheel installed, as a user's environment has it."""
    place = tmp_path_factory.mktemp("third-party")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    built = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(place), str(HERE)]
    subprocess.run(built, check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    installed = [*pip, "install", "--no-deps", "--no-index", "--target", str(place / "site")]
    subprocess.run([*installed, str(wheel)], check=True, capture_output=True)
    return {
        **os.environ,
        "PYTHONPATH": str(place / "site"),
        "SHOAL_HOME": own_home(place / "home"),
    }


def shoal(
    environment: dict[str, str], *words: str, status: int = 0, cwd: Path
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", *words]
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def test_it_is_planned_run_scored_and_shown(environment: dict[str, str], tmp_path: Path) -> None:
    planned = shoal(environment, "plan", "sorting", *SORTED, "-o", "json", cwd=tmp_path)
    (plan,) = json.loads(planned.stdout)
    assert plan["job"]["numbers"] == 5000
    assert plan["predicted"]["total_s"]["value"] == pytest.approx(5000 * 12.2877e-7, rel=1e-4)
    run = shoal(environment, "run", "sorting", *SORTED, "--dir", "run", cwd=tmp_path)
    assert "sorted in run" in run.stdout
    again = shoal(
        environment, "run", "sorting", "--dir", "run", "-m", "laptop", status=2, cwd=tmp_path
    )
    assert "--resume" in again.stderr
    shoal(environment, "run", "sorting", "--dir", "run", "--resume", "-q", cwd=tmp_path)
    scored = json.loads(shoal(environment, "score", "-o", "json", cwd=tmp_path).stdout)
    assert [row["quantity"] for row in scored["rows"]] == ["total_s", "total_s"]
    assert scored["errors"][0]["count"] == 2
    shown = subprocess.run(
        [sys.executable, "-c", PAGE, str(tmp_path / "run"), str(HERE.parents[1] / "app")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    measured = json.loads((tmp_path / "run" / "report.json").read_text())["measured"]["total_s"]
    for text in ("5000 numbers", "comparisons are all there is", f"{digits(1e3 * measured)} ms"):
        assert text in shown.stdout


@pytest.mark.slow
def test_one_that_breaks_the_protocol_is_named_and_the_rest_works(
    environment: dict[str, str], tmp_path: Path
) -> None:
    listed = shoal(environment, "run", "--help", cwd=tmp_path)
    assert "sorting" in listed.stdout
    assert "job broken: shoal_sorting.kind:Broken is no kind of job" in listed.stderr
    assert "plan()" in listed.stderr
    refused = shoal(environment, "run", "broken", status=2, cwd=tmp_path)
    assert "no kind of job" in refused.stderr
