"""Ranks that are processes: their results, their errors, and that none is left."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError, DataError, RankError
from shoal.parallel.comm.processes import run_processes

RANKS = str(Path(__file__).with_name("ranks_processes.py"))

pytestmark = pytest.mark.multi


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What two ranks gave that were started once for all who look at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GLOO_SOCKET_IFNAME", raising=False)
        ranks: list[dict[str, Any]] = run_processes(
            f"{RANKS}:add", 2, {"start": 1.0, "extra": {"more": 2.5}}
        )
    return ranks


def test_every_rank_gives_its_result(results: list[dict[str, Any]]) -> None:
    assert [(one["rank"], one["sum"], one["threads"]) for one in results] == [
        (rank, [3.0, 5.0], 1) for rank in range(2)
    ]


def test_ranks_listen_on_this_machine_alone(results: list[dict[str, Any]]) -> None:
    listens = [one["listens"] for one in results]
    assert any(listens), "no rank listens at all: nothing was tested"
    assert {address for rank in listens for address in rank} <= {"127.0.0.1", "::1"}


def test_an_error_names_its_rank_and_keeps_its_class() -> None:
    with pytest.raises(DataError, match=r"rank 1 of 2, in .*: tokens = 9: expected 0 to 7"):
        run_processes(f"{RANKS}:go_wrong", 2, {"how": "shoal"})


@pytest.mark.slow
def test_other_ends_of_a_rank_are_told() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2, .*ValueError: no such thing \(.*py:"):
        run_processes(f"{RANKS}:go_wrong", 2, {"how": "other"})
    with pytest.raises(RankError, match=r"rank 1 of 2, .* was killed by SIGKILL"):
        run_processes(f"{RANKS}:go_wrong", 2, {"how": "killed"})
    started: list[subprocess.Popen[bytes]] = []

    def start(_rank, command, *, environment=None, **options):  # type: ignore[no-untyped-def]
        process = subprocess.Popen(
            command,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment},
            start_new_session=True,
            **options,
        )
        started.append(process)
        return process

    with pytest.raises(RankError, match=r"(?s)rank 1 of 2, .* hangs: not ended .*go_wrong"):
        run_processes(f"{RANKS}:go_wrong", 2, {"how": "hangs"}, timeout_s=12, start=start)
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)
    with pytest.raises(RankError, match="not JSON serializable"):
        run_processes(f"{RANKS}:unreadable", 1)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="target = 'nothing': expected module:function"):
        run_processes("nothing", 1)
    with pytest.raises(ConfigError, match=r"world = 0: expected at least 1"):
        run_processes(f"{RANKS}:add", 0)
    with pytest.raises(ConfigError, match="expected plain JSON"):
        run_processes(f"{RANKS}:add", 1, {"start": sys})
    with pytest.raises(ConfigError, match=r"rank 0 of 1, .*no attribute 'nothing'"):
        run_processes("shoal.core.errors:nothing", 1)
