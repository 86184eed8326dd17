"""Files are whole or absent, whatever goes wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.core.errors import CheckpointError, ConfigError, ShoalError
from shoal.core.files import (
    parse_yaml,
    read_yaml,
    shoal_home,
    write_atomic,
    write_dir_atomic,
    write_json,
    write_yaml,
)


def test_write_atomic_makes_directories_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_atomic(path, "one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["b.txt"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_disk_full_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_atomic(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"x: cannot be written \(No space left on device\)"):
        write_atomic(path, "new", error=CheckpointError)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ShoalError, match="cannot be written"):
        write_atomic(tmp_path / "file" / "x", "")


def test_directory_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    with write_dir_atomic(target) as inside:
        (inside / "a").write_text("a")
        assert not target.exists()
    assert (target / "a").read_text() == "a"
    with pytest.raises(ShoalError, match="exists already"), write_dir_atomic(target):
        pass
    with pytest.raises(ZeroDivisionError), write_dir_atomic(tmp_path / "step-2") as inside:
        (inside / "a").write_text("a")
        raise ZeroDivisionError
    with (
        pytest.raises(CheckpointError, match="cannot be written"),
        write_dir_atomic(tmp_path / "step-3", error=CheckpointError),
    ):
        raise OSError(28, "No space left on device")
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-1"]


def test_json_and_yaml_round_trip(tmp_path: Path) -> None:
    value = {"b": [1, 2.5, None, "ä"], "a": {"x": True}}
    write_json(tmp_path / "x.json", value)
    assert json.loads((tmp_path / "x.json").read_text()) == value
    write_yaml(tmp_path / "x.yaml", value)
    assert read_yaml(tmp_path / "x.yaml") == value
    assert list(read_yaml(tmp_path / "x.yaml")) == ["b", "a"]


def test_yaml_numbers_as_people_write_them() -> None:
    assert parse_yaml("[3e-4, 1E5, 1.5e3, -2e+3, 0.1, 7, 1e]", "x") == [
        3e-4, 1e5, 1.5e3, -2e3, 0.1, 7, "1e",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "text",
    ["a: 1\na: 2", "a: [", "\t- x", "!!python/object:os.system {}", "a: b: c", "? {a: 1}\n: 2"],
)
def test_bad_yaml_names_the_place(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^here"):
        parse_yaml(text, "here")


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path))
    assert shoal_home() == tmp_path
    monkeypatch.delenv("SHOAL_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert shoal_home() == tmp_path / "shoal"
    monkeypatch.delenv("XDG_DATA_HOME")
    assert shoal_home() == Path("~/.local/share/shoal").expanduser()
