"""``shoal --help`` in groups, and what a shell completes."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal_command
from shoal.app.cli import PANELS, VERBS
from shoal.cost.score import Score


def completed(home: Path, line: str) -> list[str]:
    """What bash offers at the end of a line."""
    words = line.split(" ")
    done = shoal_command.shoal(
        _SHOAL_COMPLETE="complete_bash",
        COMP_WORDS=line,
        COMP_CWORD=str(len(words) - 1),
        SHOAL_HOME=str(home),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return [name for name in done.stdout.splitlines() if name]


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Commands that were made before this process completed anything."""
    from shoal.app import cli

    cli._command.cache_clear()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("shoal tra", {"train", "train diagnose"}),
        ("shoal plan train Qwen3-1", {"Qwen3-1.7B", "Qwen3-14B"}),
        ("shoal plan train x --machine 16xH10", {"16xH100"}),
        ("shoal plan train x -m loc", {"local"}),
        ("shoal plan train x --emit mega", {"megatron"}),
        ("shoal run train --model shoal-4", {"shoal-4m"}),
        ("shoal explain zb", {"zbv", "zb_h1"}),
        ("shoal explain schedule.zb", {"schedule.zbv"}),
        ("shoal claims run med", {"medusa"}),
        ("shoal serve x --scheduler fc", {"fcfs"}),
    ],
)
def test_names_are_completed(tmp_path: Path, line: str, offered: set[str]) -> None:
    found = completed(tmp_path, line)
    assert offered <= {*found}, found
    start = line.split(" ")[-1]
    assert all(name.startswith(start) for name in found), found


def test_runs_are_completed_from_here_and_from_the_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert completed(tmp_path / "home", "shoal train --dir ") == []
    assert not (tmp_path / "home").exists(), "nothing is made by completing"
    for name in ("runs/one", "elsewhere/two"):
        Path(name, "export").mkdir(parents=True)
        Path(name, "plan.yaml").touch()
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))
    Score().register(Path("elsewhere/two"), "train", "two")
    runs = {"runs/one", "elsewhere/two"}
    assert set(completed(tmp_path / "home", "shoal train --dir ")) == runs
    assert set(completed(tmp_path / "home", "shoal train diagnose ")) == runs
    models = {f"{run}/export" for run in runs}
    assert set(completed(tmp_path / "home", "shoal serve ")) == models


def test_a_broken_score_completes_nothing(tmp_path: Path) -> None:
    (tmp_path / "score.db").write_text("not a database" * 99)
    assert completed(tmp_path, "shoal train --dir nowh") == []


def test_help_has_three_groups_and_a_line_for_each_verb(tmp_path: Path) -> None:
    done = shoal_command.shoal("--help", SHOAL_HOME=str(tmp_path))
    shown = done.stdout.splitlines()
    for panel, verbs in PANELS.items():
        assert any(f" {panel} " in line for line in shown)
        for verb, says in verbs.items():
            assert any(f" {verb} " in line and says in line for line in shown), (verb, says)
    listed = [verb for verbs in PANELS.values() for verb in verbs]
    assert sorted([*listed, "study"]) == sorted(VERBS)
    assert "Usage: shoal " in done.stdout
