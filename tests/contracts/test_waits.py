"""Every call that waits without a limit of its own is known, with what ends the wait."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import unlimited_waits as waits

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "waits.md"


def allowed() -> dict[tuple[str, str, str], tuple[str, int]]:
    """(file, function, call) -> (kind, how often)."""
    result = {}
    for line in (HERE / "waits_allowed.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            kind, file, function, call, number = line.split(" | ")
            result[file, function, call] = kind, int(number)
    return result


def test_no_wait_without_a_limit_is_new():
    result, known = waits.everywhere(), allowed()
    new = {
        place: number for place, number in result.items() if number > known.get(place, ("", 0))[1]
    }
    assert not new, (
        "waits without a limit: give them one, or say in waits_allowed.txt what ends them: "
        + "; ".join(f"{file}, {function}: {call}" for file, function, call in new)
    )
    gone = [place for place, (_, number) in known.items() if result[place] < number]
    assert not gone, f"no longer there: {gone}"


def test_every_kind_is_a_row_of_the_page():
    rows = Counter(re.findall(r"^\| `([a-z]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert set(rows) == {kind for kind, _ in allowed().values()}
    assert set(rows.values()) == {1}


@pytest.mark.parametrize(
    "call",
    [
        "thread.join()",
        "event.wait()",
        "condition.wait_for(lambda: True)",
        "future.result()",
        "things.get()",
        "child.communicate(data)",
        "lock.acquire()",
        "sock.recv(4)",
        "sock.accept()",
        "pipe.recv_bytes()",
        "select.select([a], [], [])",
        "subprocess.run(['x'], check=True)",
        "asyncio.wait([a])",
        "comm.all_reduce(x, tag='sum').wait()",
        "fcntl.flock(file, fcntl.LOCK_EX)",
        "process.stdout.readline()",
        "dist.barrier(group=one)",
    ],
)
def test_a_wait_without_a_limit_is_noticed(call):
    assert waits.unlimited(ast.parse(f"def f():\n    {call}\n")).total() == 1


@pytest.mark.parametrize(
    "call",
    [
        "thread.join(5)",
        "', '.join(words)",
        "event.wait(timeout=1)",
        "condition.wait_for(lambda: True, 3)",
        "future.result(limit_s)",
        "options.get('name')",
        "child.communicate(data, timeout=3)",
        "select.select([a], [], [], 0.5)",
        "subprocess.run(['x'], timeout=3)",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "file.readline()",
    ],
)
def test_a_wait_with_a_limit_is_not(call):
    assert waits.unlimited(ast.parse(f"def f():\n    {call}\n")).total() == 0
