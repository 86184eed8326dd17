"""Temporary directories: private, unguessable, and removed when their owner is gone."""

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from shoal.core import scratch as module
from shoal.core.errors import ConfigError, MachineError
from shoal.core.scratch import scratch, scratch_directory, scratch_name, shm_name, sweep

SOURCE = Path(module.__file__).parents[1]
OWNER = (
    "import sys, time; from pathlib import Path; from shoal.core.scratch import scratch, shm_name;"
    "place = Path(sys.argv[1]); made = scratch('engine', place); (made / 'socket').touch();"
    "(place / shm_name('ranks')).touch(); print(made, flush=True); time.sleep(100)"
)


def test_a_directory_is_of_its_user_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = scratch("engine", tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    assert made.stat().st_uid == os.geteuid()


def test_a_name_says_the_process_and_ends_in_what_cannot_be_guessed(tmp_path: Path) -> None:
    names = {scratch("replica0", tmp_path).name for _ in range(50)}
    assert len({name[-8:] for name in names}) == 50
    assert all(f"-{os.getpid()}-" in name for name in names)
    assert all(module._NAME.fullmatch(name) for name in names)
    assert module._NAME.fullmatch(shm_name("ranks"))
    assert shm_name("ranks") != shm_name("ranks")


@pytest.mark.parametrize("prefix", ["", "a/b", "../up", "a b", "Ä", "a.b"])
def test_a_prefix_that_is_not_a_plain_word_is_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scratch\.prefix"):
        scratch(prefix, tmp_path)


def test_a_block_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), scratch_directory("check", tmp_path) as folder:
        (folder / "deep").mkdir()
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="no temporary directory can be made"):
        scratch("engine", tmp_path / "absent")


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    mine = scratch("engine", tmp_path)
    (tmp_path / "shoal-notes").mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        assert sweep([tmp_path]) == []
        owner.send_signal(signal.SIGKILL)
        # Neither one that waits to be collected nor one that is gone owns anything.
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        removed = sweep([tmp_path])
    assert theirs in removed
    assert len(removed) == 2  # the file of shared memory too
    assert sweep([tmp_path]) == []
    assert sorted(tmp_path.iterdir()) == sorted([mine, tmp_path / "shoal-notes"])


def test_another_process_with_the_same_number_is_not_the_owner(tmp_path: Path) -> None:
    mine = scratch("engine", tmp_path)
    head, host, process, started, end = mine.name.rsplit("-", 4)
    earlier = "1" if started != "1" else "2"
    stale = tmp_path / "-".join([head, host, process, earlier, end])
    stale.mkdir()
    assert sweep([tmp_path]) == [stale]
    assert mine.exists()


def test_directories_of_another_host_are_left(tmp_path: Path) -> None:
    name = scratch_name("engine").replace(module._host(), "zzzz") + "abcdefgh"
    foreign = tmp_path / name.replace(f"-{os.getpid()}-", "-4194305-")
    foreign.mkdir()
    assert sweep([tmp_path]) == []
    assert foreign.exists()


def test_a_link_is_removed_and_not_what_it_points_to(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "file").touch()
    name = re.sub(r"-\d+-([a-z0-9]+)-$", r"-4194305-\1-", scratch_name("engine")) + "abcdefgh"
    (tmp_path / name).symlink_to(target)
    assert sweep([tmp_path]) == [tmp_path / name]
    assert (target / "file").exists()


def test_without_proc_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = re.sub(r"-\d+-([a-z0-9]+)-$", r"-4194305-\1-", scratch_name("engine")) + "abcdefgh"
    (tmp_path / name).mkdir()
    exists = Path.exists
    monkeypatch.setattr(
        Path, "exists", lambda path: path != Path("/proc/self/stat") and exists(path)
    )
    assert sweep([tmp_path]) == []


def test_a_directory_of_sockets_is_never_too_deep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of a socket has at most 107 bytes, wherever temporary files are."""
    deep = tmp_path / ("d" * 60) / ("ä" * 20)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    assert scratch("engine").parent == deep
    folder = scratch("replica99", sockets=True)
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(str(folder / "a-longer-socket"))
    finally:
        shutil.rmtree(folder)
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/short")
    with pytest.raises(MachineError, match="/tmp/short"):
        scratch("replica99", sockets=True)


def test_no_file_of_the_package_makes_temporary_names_by_itself() -> None:
    """Except beside a destination to be renamed to, and files that never have a name."""
    allowed = {
        "core/files.py",  # beside the destination
        "core/native.py",  # beside the destination
        "core/scratch.py",
        "core/pool/session.py",  # Ray's sockets leave no room for a long name; a guard removes it
        "app/commands/dash.py",  # a file, named by scratch_name
        "memory/tiers/disk.py",  # unlinked before it is used
        "machine/emulate.py",  # TemporaryFile: nameless
        "claims/bench/peer_process.py",  # TemporaryFile: nameless
    }
    made = re.compile(
        r"\b(mkdtemp|mkstemp|TemporaryDirectory|NamedTemporaryFile|TemporaryFile|mktemp)\("
        r"|[\"']/tmp\b|[\"']/dev/shm|memory\.SharedMemory\("
    )
    users = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if made.search(path.read_text(encoding="utf-8"))
    }
    looks_only = {"machine/doctor.py", "train/launchers/kubernetes.py"}
    assert users - allowed - looks_only == set()
