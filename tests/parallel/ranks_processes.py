"""What the ranks of test_processes.py do."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from shoal.core.errors import DataError


def add(comm: Any, *, start: float, extra: dict[str, float]) -> dict[str, Any]:
    """Sum over the ranks, and what a rank sees of its surroundings once the ranks have met."""
    x = torch.tensor([start + comm.rank, extra["more"]])
    comm.all_reduce(x, tag="test").wait()
    connections = psutil.Process().net_connections("inet")
    comm.barrier()
    return {
        "sum": x.tolist(),
        "rank": comm.rank,
        "threads": torch.get_num_threads(),
        "listens": sorted({c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}),
    }


def go_wrong(comm: Any, *, how: str) -> None:
    """Rank 1 does ``how`` while rank 0 waits for it."""
    if comm.rank == 1:
        if how == "shoal":
            raise DataError("tokens = 9: expected 0 to 7")
        if how == "other":
            raise ValueError("no such thing")
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000)
    comm.barrier()


def unreadable(comm: Any) -> object:
    """Returns what is no JSON."""
    return torch.ones(1)


def sums(comm: Any, *, told: str) -> None:
    """Sums without end; the first rank tells in a file that they have begun."""
    x = torch.ones(2**16)
    while True:
        comm.all_reduce(x, tag="test").wait()
        x.fill_(1.0)
        if comm.rank == 0:
            Path(told).touch()
