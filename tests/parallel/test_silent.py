"""Links that carry nothing any more, from tables of sockets as the kernel writes them."""

import os
import re
import threading
import time
from pathlib import Path

import pytest

from shoal.core.errors import MachineError, RankError
from shoal.machine.emulate import emulate, unavailable
from shoal.parallel.comm import silent
from shoal.parallel.comm.processes import run_processes
from shoal.parallel.comm.silent import SilentLink, said, silent_links

HEAD = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt uid timeout inode"
)
# Addresses of three ranks, of which the last two share a host.
A, B, C = "01004D0A:9C40", "02004D0A:9C41", "02004D0A:9C42"


def row(local: str, remote: str, inode: int, *, unsent: int = 0, timer: str = "00", again=0) -> str:
    queues = f"{unsent:08X}:00000000 {timer}:00000012 {again:08X}"
    return f"   0: {local} {remote} 01 {queues}     0        0 {inode} 1 0"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(silent, "_PROC", tmp_path)

    def process(pid: int, rows: list[str], inodes: list[int]) -> None:
        (tmp_path / str(pid) / "fd").mkdir(parents=True)
        (tmp_path / str(pid) / "net").mkdir()
        (tmp_path / str(pid) / "net" / "tcp").write_text("\n".join([HEAD, *rows]) + "\n")
        for number, inode in enumerate(inodes):
            (tmp_path / str(pid) / "fd" / str(number)).symlink_to(f"socket:[{inode}]")

    return process


def test_only_what_is_sent_again_and_not_acknowledged_counts(proc) -> None:
    there = [row(B, A, 20), row(C, A, 30, unsent=9, timer="04", again=7)]
    proc(11, [row(A, B, 10, unsent=65536, timer="01", again=3), row(A, C, 11, unsent=5)], [10, 11])
    # Rank 2 waits for a window that rank 0 does not open: rank 0 is slow, the link works.
    proc(12, there, [20])
    proc(13, there, [30])
    result = silent_links({0: 11, 1: 12, 2: 13})
    assert result == [SilentLink(0, 1, 65536)]
    assert said(result, 4.2, "all_reduce of step 7").startswith(
        "rank 0 -> rank 1: nothing arrived for 4 s in all_reduce of step 7; 65536 bytes"
    )


def test_a_first_sending_is_no_loss(proc) -> None:
    proc(11, [row(A, B, 10, unsent=100, timer="01")], [10])
    proc(12, [row(B, A, 20)], [20])
    assert silent_links({0: 11, 1: 12}) == []


def test_whom_nobody_knows_or_who_has_ended_is_not_named(proc) -> None:
    proc(11, [row(A, B, 10, unsent=100, timer="01", again=2)], [10])
    assert silent_links({0: 11, 1: 99}) == []


def test_this_process_has_no_silent_link() -> None:
    assert silent_links({0: os.getpid(), 1: os.getpid()}) == []


def test_many_links_are_counted() -> None:
    links = [SilentLink(rank, rank + 1, 10) for rank in range(6)]
    result = said(links, 3.0, "reduce of step 1")
    assert "rank 3 -> rank 4 and 2 more: nothing arrived" in result
    assert "60 bytes" in result


@pytest.mark.multi
@pytest.mark.slow
def test_the_host_whose_cable_is_pulled_is_in_every_pair(tmp_path: Path) -> None:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    began = tmp_path / "began"
    with emulate(3, bandwidth=2e7) as network:
        with pytest.raises(MachineError, match="host = 3: expected 0 to 2"):
            network.plug(3, into=False)

        def pull() -> None:
            while not began.exists():
                time.sleep(0.02)
            network.plug(2, into=False)

        thread = threading.Thread(target=pull, daemon=True)
        thread.start()
        ranks = str(Path(__file__).with_name("ranks_processes.py"))
        with pytest.raises(RankError) as caught:
            run_processes(
                f"{ranks}:sums", 3, {"told": str(began)}, start=network.start, timeout_s=16
            )
        thread.join()
    pairs = re.findall(r"rank (\d) -> rank (\d)", str(caught.value))
    assert pairs and all("2" in pair for pair in pairs)
    assert "in all_reduce in" in str(caught.value)
