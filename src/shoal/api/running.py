"""``shoal.run``: do a job of any kind here, and say what it took."""

from __future__ import annotations

from os import PathLike
from typing import Any

from shoal.api.jobs import JobSource
from shoal.api.preparing import PreparedRun, prepare
from shoal.ir import Machine, Plan, Report, Watch


def run(
    job: JobSource | Plan[Any] | None = None,
    *,
    kind: str | None = None,
    machine: str | PathLike[str] | Machine = "local",
    directory: str | PathLike[str] | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    anyway: bool = False,
    **values: Any,
) -> Report[Any]:
    """Plan a job of any kind, do it on this host, and compare with the prediction.

    Args:
        job: see :func:`shoal.plan`; or a plan, which is run as it is. None with ``resume`` goes on
            with the run in ``directory``; None without it takes the kind's defaults.
        kind: of the job; what ``job`` says, or train.
        machine: what is planned for.
        directory: of the run; ``runs/NAME`` if None.
        resume: go on with the run that lies there.
        watch: called with every event as it happens.
        anyway: run here what is planned for another kind of device; it is not scored.
        **values: settings of the job.

    Returns:
        What was measured, beside the plan's prediction.

    Raises:
        ConfigError: a setting does not fit, or a run lies in the directory and is not resumed.
        ShoalError: it cannot run here.
    """
    ready = prepare(job, kind=kind, machine=machine, directory=directory, resume=resume, **values)
    return run_prepared(ready, resume=resume, watch=watch, anyway=anyway)


def run_prepared(
    ready: PreparedRun, *, resume: bool = False, watch: Watch | None = None, anyway: bool = False
) -> Report[Any]:
    """Do what is prepared; see :func:`run`."""
    return ready.kind.run(ready.plan, ready.directory, resume=resume, watch=watch, anyway=anyway)
