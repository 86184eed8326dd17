"""The wheel: verdicts travel with it, and the commands that show them need no clone."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from shoal.claims import shipped
from shoal.claims.catalogue import catalogue
from shoal.claims.gallery import index_rows, write_gallery
from shoal.claims.standing import standing
from shoal.core.errors import StoreError

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "scripts/hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(hook: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package as a wheel has it."""
    file = tmp_path / "verdicts.json"
    file.write_text(hook.compact(ROOT / "results"))
    monkeypatch.setattr(shipped, "FILE", file)
    shipped.shipped_records.cache_clear()
    yield file
    shipped.shipped_records.cache_clear()


def test_a_shipped_verdict_is_that_of_the_results(installed: Path, tmp_path: Path) -> None:
    assert installed.stat().st_size < 2**20
    assert '"method"' not in installed.read_text(), "no raw samples"
    rows = [row for row in catalogue() if row.claim in ("medusa", "gpipe", "peft")]
    assert len(rows) >= 3
    for row in rows:
        here, there = standing(row, ROOT / "results"), standing(row, tmp_path / "none")
        assert here.record is not None and there.record is not None
        assert there.shipped and not here.shipped
        assert there.record.verdict == here.record.verdict
        assert there.stale == here.stale


@pytest.mark.slow
def test_the_gallery_is_written_from_shipped_verdicts(installed: Path, tmp_path: Path) -> None:
    page = write_gallery(tmp_path / "none", tmp_path / "gallery")
    assert page.is_file()
    paper = next(one for one in index_rows(tmp_path / "none") if one.row.claim == "medusa")
    text = (page.parent / f"paper-{paper.row.id}.html").read_text()
    assert "came with the package" in text
    assert "Every sample" not in text and "0 samples" not in text


def test_an_edited_record_is_not_shipped(hook: ModuleType, tmp_path: Path) -> None:
    text = (ROOT / "results" / "gpipe.json").read_text()
    (tmp_path / "gpipe.json").write_text(text.replace('"works"', '"noisy"', 1))
    (tmp_path / "other.json").write_text("[1]")
    assert json.loads(hook.compact(tmp_path))["records"] == []


def test_a_damaged_file_is_named(installed: Path) -> None:
    installed.write_text("{")
    with pytest.raises(StoreError, match=r"verdicts\.json: damaged .*install"):
        shipped.shipped_records()


_OUTSIDE = """
import json, sys
from pathlib import Path
from typer.testing import CliRunner
import shoal
assert Path(shoal.__file__).is_relative_to(sys.argv[1]), shoal.__file__
from shoal.app.cli import app
from shoal.claims.run import commit_of_code
assert commit_of_code() == ("", False)
def run(*words):
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.stdout
rows = json.loads(run("claims", "list", "-o", "json"))
assert sum(row["status"] != "planned" for row in rows) > 40, rows
assert "works" in run("claims", "report", "--out", "gallery")
assert Path("gallery/index.html").is_file()
assert "gpipe: works" in run("claims", "run", "gpipe", "--quick", "-q")
from shoal.app.demo import _gallery
_gallery(Path("demo-gallery"), print)
assert Path("demo-gallery/index.html").is_file()
"""


@pytest.mark.slow
def test_the_wheel_works_outside_a_clone(tmp_path: Path) -> None:
    """Built, unpacked, and run where there is no repository, inside one of something else."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site, work = tmp_path / "site", tmp_path / "work"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    assert "shoal/claims/verdicts.json" in names
    assert not [name for name in names if name.startswith(("results/", "tests/"))]
    work.mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", _OUTSIDE, str(site)],
        cwd=work,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(site),
            "SHOAL_HOME": str(tmp_path / "home"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
