"""One rank of a run that torchrun started."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from shoal.core.errors import require
from shoal.ir import Plan
from shoal.train.layout import RunDir
from shoal.train.run import conclude, prepare_run
from shoal.train.worker import run_rank

__all__ = ["execute_under_torchrun"]

# Rank 0 tokenises while the others wait.
_PREPARE_LIMIT = timedelta(minutes=30)


def execute_under_torchrun(plan: Plan, run_dir: Path, *, resume: bool) -> None:
    """Prepare on rank 0, train on every rank, report on rank 0.

    Raises:
        ShoalError: the run cannot start, or a rank failed.
    """
    import torch.distributed as dist

    require(
        plan.job.checkpoint.memory is None,
        "checkpoint.memory",
        str(plan.job.checkpoint.memory),
        expected="nothing under torchrun: its agent starts no snapshot processes",
        hint="start the ranks with shoal train, or leave checkpoint.memory out",
    )
    directory = RunDir(run_dir)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=False,
        timeout=_PREPARE_LIMIT,
    )
    gate = dist.PrefixStore(  # type: ignore[attr-defined]
        f"shoal-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
    )
    if rank == 0:
        prepare_run(plan, directory, resume=resume)
        gate.set("prepared", "yes")
    else:
        gate.wait(["prepared"], _PREPARE_LIMIT)
    run_rank(directory, resume=resume)
    if rank == 0:
        conclude(plan, directory)
