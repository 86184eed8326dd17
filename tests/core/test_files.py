"""Files are whole or absent, whatever goes wrong."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest

from shoal.core.errors import CheckpointError, ConfigError, ShoalError
from shoal.core.files import (
    locked,
    parse_yaml,
    read_yaml,
    reserve,
    shoal_home,
    use_reserved,
    write_atomic,
    write_dir_atomic,
    write_json,
    write_yaml,
)


def test_write_atomic_survives_a_reader_that_moves_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first rank does with a checkpoint as soon as the last rank's report is there."""
    replace = os.replace

    def replaced(source: Path, target: Path) -> None:
        replace(source, target)
        (tmp_path / "draft").rename(tmp_path / "final")

    monkeypatch.setattr(os, "replace", replaced)
    write_atomic(tmp_path / "draft" / "vote", "written")
    assert (tmp_path / "final" / "vote").read_text() == "written"


def test_write_atomic_makes_directories_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_atomic(path, "one")
    write_atomic(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["b.txt"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_modes_are_those_of_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "file", "text")
        with write_dir_atomic(tmp_path / "directory") as inside:
            (inside / "file").write_text("text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode
    assert (tmp_path / "directory").stat().st_mode & 0o777 == 0o777 & ~umask
    assert (tmp_path / "directory" / "file").stat().st_mode & 0o777 == mode


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    path.chmod(0o640)
    write_atomic(path, "new")
    assert path.read_text() == "new" and path.stat().st_mode & 0o777 == 0o640


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


def test_reserved_room_is_written_though_the_disk_is_full(tmp_path: Path) -> None:
    spare, path = tmp_path / "spare", tmp_path / "error"
    reserve(spare, 256)
    # No file may grow any more in this process, as on a full disk.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ShoalError, match="cannot be written"):
            write_atomic(tmp_path / "other", "x" * 100)
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, before[1]))
        use_reserved(spare, path, json.dumps({"message": "why"}).encode())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert json.loads(path.read_text()) == {"message": "why"}
    assert not spare.exists()
    use_reserved(tmp_path / "none", path, b"{}")  # nothing was reserved, and the disk has room
    assert json.loads(path.read_text()) == {}


def test_a_lock_that_is_held_for_ever_is_given_up(tmp_path: Path) -> None:
    """As of a process that has stopped: a second open file is another holder."""
    path = tmp_path / "lock"
    waits: list[None] = []
    with (
        locked(path, lambda: None),
        pytest.raises(ConfigError, match=r"another process has held this lock for 0\.3 s"),
        locked(path, lambda: waits.append(None), error=ConfigError, limit_s=0.3),
    ):
        pass
    assert waits
    with locked(path, lambda: None, limit_s=0.3):
        pass


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_path_without_a_name_is_refused(path: str) -> None:
    with pytest.raises(ShoalError, match="a directory, not a file's name"):
        write_atomic(Path(path), "x")
    with pytest.raises(ShoalError), write_dir_atomic(Path(path)):
        pass
