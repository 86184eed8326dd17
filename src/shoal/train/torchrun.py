"""One rank of a run that torchrun started, or another launcher with the same variables.

``python -m shoal.train.torchrun`` is for launchers that keep a pipe to each rank, like the one of
Ray: it reads what to run as a line of JSON from its standard input (plan, dir, resume, start) and
ends when that does, and it writes each event, its error and its report as a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, ShoalError, require
from shoal.core.janitor import leave
from shoal.ir import TrainPlan, TrainReport
from shoal.parallel.comm.collectives import agent_store
from shoal.train.layout import RunDir
from shoal.train.nodes import PREPARE_LIMIT, RunNode, give, refuse, take
from shoal.train.report import report_of_ended
from shoal.train.run import Watch, conclude, prepare_run
from shoal.train.worker import run_rank


def execute_under_torchrun(
    plan: TrainPlan,
    run_dir: Path,
    *,
    resume: bool,
    start: str | None = None,
    watch: Watch | None = None,
    anyway: bool = False,
) -> TrainReport | None:
    """Prepare on rank 0 and from there on every node, train on every rank, report on rank 0.

    Nodes may have disks of their own; see :mod:`shoal.train.nodes` for what is sent to them.

    Args:
        plan: what to run; that of rank 0 holds.
        run_dir: directory of the run, on this node.
        resume: continue from the newest checkpoint; ranks that the agent has restarted do.
        start: begin from this checkpoint of another run.
        watch: called with every event, on rank 0.
        anyway: run on CPUs what was planned for GPUs; nothing of it is scored.

    Returns:
        The report, on rank 0.

    Raises:
        ShoalError: the run cannot start, or a rank failed.
    """
    require(
        plan.job.checkpoint.memory is None,
        "checkpoint.memory",
        str(plan.job.checkpoint.memory),
        expected="nothing under torchrun: its agent starts no snapshot processes",
        hint="start the ranks with shoal train, or leave checkpoint.memory out",
    )
    directory = RunDir(run_dir)
    number = int(os.environ["RANK"])
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    node = RunNode(
        number=int(os.environ.get("GROUP_RANK", "0")),
        nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        first=int(os.environ.get("LOCAL_RANK", "0")) == 0,
        address=os.environ["MASTER_ADDR"],
    )
    ended = number == 0 and resume and not restarts and report_of_ended(plan, directory)
    resume = resume or restarts > 0
    gate = agent_store("prepare", PREPARE_LIMIT)
    if number == 0:
        try:
            if ended:
                raise ConfigError(
                    f"{run_dir}: the run is finished, and its report is {directory.report}; "
                    "give it more --steps to go on"
                )
            prepare_run(plan, directory, resume=resume, watch=watch, start=start, anyway=anyway)
        except ShoalError as error:
            refuse(gate, error)
            raise
        give(plan, directory, gate, node)
    else:
        take(directory, gate, node, resume=resume)
    run_rank(directory, resume=resume, sinks=[] if watch is None else [_Watched(watch)])
    return conclude(plan, directory) if number == 0 else None


@dataclass(frozen=True)
class _Watched:
    """A sink, and its writer, that hands events to a function."""

    watch: Watch

    def open(self) -> _Watched:
        return self

    def event(self, record: Mapping[str, Any], labels: Mapping[str, str]) -> None:
        self.watch(dict(record))

    def counter(self, name: str, total: float, labels: Mapping[str, str]) -> None:
        """Counters are for live views."""

    def gauge(self, name: str, value: float, labels: Mapping[str, str]) -> None:
        """Gauges are for live views."""

    def close(self) -> None:
        """Nothing is open."""


def main() -> int:
    """Run the rank that the environment names; its status is the exit code."""
    task = json.loads(sys.stdin.readline())

    def orphaned() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=orphaned, daemon=True).start()
    # What libraries print goes to the log of the rank, not between the lines.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(record: Mapping[str, Any]) -> None:
        lines.write(json.dumps(record) + "\n")

    try:
        report = execute_under_torchrun(
            TrainPlan.model_validate(task["plan"]),
            Path(task["dir"]),
            resume=task["resume"],
            start=task["start"],
            watch=say if os.environ["RANK"] == "0" else None,
        )
    except ShoalError as error:
        say({"kind": "failed", "type": type(error).__name__, "message": str(error)})
        print(f"error: {error}", file=sys.stderr)
        return 2
    if report is not None:
        say({"kind": "report", "report": report.model_dump(mode="json")})
    return 0


if __name__ == "__main__":
    # Threads of a broken process group must not keep a rank alive.
    leave(main())
