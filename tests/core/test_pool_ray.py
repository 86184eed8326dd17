"""A Ray cluster that the pool starts: the script's own functions, and nothing left of it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal.core.pool.session import PoolSession, end_those_in

SCRIPT = """
import os, signal, sys
from shoal.core.pool import POOLS

class Mine:
    def __init__(self, number):
        self.number = number
    def doubled(self):
        return Mine(2 * self.number)

class MineError(Exception):
    pass

def doubled(mine):
    return mine.doubled()

def fails():
    raise MineError("mine")

if __name__ == "__main__":
    with POOLS.build({"name": "ray", "workers": 2}).open() as pool:
        found = pool.submit(doubled, Mine(2)).result()
        assert type(found) is Mine and found.number == 4
        assert [one.number for one in pool.map(doubled, [Mine(1), Mine(3)])] == [2, 6]
        try:
            pool.submit(fails).result()
        except MineError as error:
            assert "Raised on pool worker" in error.__notes__[0]
        assert pool.actor(Mine, 5).call("doubled").result().number == 10
        print(pool._session.path, flush=True)
    print(os.path.exists(pool._session.path), flush=True)
    pool = POOLS.build({"name": "ray", "workers": 1}).open()
    print(pool._session.path, pool.submit(os.getpid).result(), flush=True)
    signal.pause()
"""


def users_of(folder: str) -> list[int]:
    """Processes that have files of a directory open, or name it."""
    users = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                words = (process / "cmdline").read_text(errors="replace")
                files = [str(fd.readlink()) for fd in (process / "fd").iterdir()]
            except OSError:
                continue
            if f"{folder}/" in words or any(file.startswith(f"{folder}/") for file in files):
                users.append(int(process.name))
    return users


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie of whoever reaps orphans here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def until_gone(folder: str) -> None:
    end = time.monotonic() + 60
    while Path(folder).exists() or users_of(folder):
        assert time.monotonic() < end, (folder, users_of(folder))
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.multi
def test_the_script_s_own_functions_and_nothing_left(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    shared = Path("/tmp/ray")  # where Ray leaves the sessions of others
    driver = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    try:
        closed, exists = driver.stdout.readline().strip(), driver.stdout.readline().strip()
        assert exists == "False"
        end = time.monotonic() + 60
        # What the driver is starting has its open files until it is another program.
        while others := [pid for pid in users_of(closed) if pid != driver.pid]:
            assert time.monotonic() < end, others
            time.sleep(0.05)
        killed, worker = driver.stdout.readline().split()
        assert Path(killed).stat().st_mode & 0o777 == 0o700
        assert int(worker) in users_of(killed)
    finally:
        driver.kill()
        driver.communicate()
    until_gone(killed)
    assert ended(int(worker))
    assert not list(shared.glob(f"session_*_{driver.pid}"))


def test_what_stays_in_a_session_is_ended_and_its_owner_spared(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        left = subprocess.Popen(["sleep", "600"], stdout=log)
        owner = subprocess.Popen(["sleep", "600"], stdout=log)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("shoal.core.pool.session._GRACE_S", 0.0)
            # Nobody waits for the one that is ended: as a zombie it has nothing open any more.
            end_those_in(tmp_path, owner.pid)
        assert left.wait(10) == -9
        assert owner.poll() is None
    finally:
        owner.kill()
        owner.wait()


def test_the_directory_of_a_session_is_short_and_goes_with_it(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / ("long" * 20)))
        session = PoolSession()
    assert session.path.exists() and len(str(session.path)) < 40
    session.close()
    assert not session.path.exists()
