"""``shoal.train``: train over ranks of this host, or write what starts the ranks elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from shoal.api.jobs import JobSource
from shoal.api.preparing import PreparedRun, prepare
from shoal.core.errors import ConfigError, require
from shoal.core.extras import import_extra
from shoal.core.files import write_atomic
from shoal.core.parts import table
from shoal.ir import Machine, Plan, TrainPlan, TrainReport, Watch
from shoal.train.protocols import Starter


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """How a training run is executed; see :func:`train`.

    Args:
        resume: go on with the run in its directory.
        from_step: from this checkpoint of it.
        start: begin at this checkpoint of another run.
        restarts: lost ranks after which the run restarts by itself.
        robust: find faults while it runs, exclude what failed, go on: fields of
            :class:`~shoal.train.watch.robust.Robust`; None does not.
        chaos: what is killed on purpose, as :class:`~shoal.train.chaos.Chaos` reads it.
        launcher: what starts the ranks, if it is not this process.
        anyway: run a plan made for GPUs on this CPU.

    Raises:
        ConfigError: two of them exclude each other.
    """

    resume: bool = False
    from_step: int | None = None
    start: str | None = None
    restarts: int = 0
    robust: Mapping[str, Any] | None = None
    chaos: str | None = None
    launcher: str | None = None
    anyway: bool = False

    def __post_init__(self) -> None:
        if self.start is not None and (
            self.resume or self.from_step is not None or self.robust is not None
        ):
            raise ConfigError(
                "--from begins a new run; leave out --resume, --from-step and --robust"
            )
        if self.chaos is not None:
            require(
                self.robust is not None or self.restarts > 0,
                "--chaos",
                self.chaos,
                expected="--restarts N or --robust with it, to go on afterwards",
            )
        if self.launcher is not None:
            others = {"--robust": self.robust, "--chaos": self.chaos, "--from-step": self.from_step}
            for flag, value in others.items():
                if value is not None:
                    raise ConfigError(f"{flag} with --launch {self.launcher}: leave {flag} out")


def train(
    job: JobSource | Plan[Any] | None = None,
    *,
    machine: str | PathLike[str] | Machine = "local",
    directory: str | PathLike[str] | None = None,
    resume: bool = False,
    from_step: int | None = None,
    start: str | None = None,
    restarts: int = 0,
    robust: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    anyway: bool = False,
    **values: Any,
) -> TrainReport:
    """Train a model over ranks of this host; three minutes where no length is given.

    Args:
        job: see :func:`run`.
        machine: what is planned for.
        directory: of the run; ``runs/NAME`` if None.
        resume: go on with the run that lies there.
        from_step: go on from this checkpoint of it, not from the newest.
        start: begin where this checkpoint of another run stopped, whatever its format and split: a
            directory, ``universal:DIR``, or an address such as ``s3://bucket/run``.
        restarts: lost ranks after which the run restarts by itself.
        robust: find faults while it runs, exclude what failed and go on, in this way: fields of
            :class:`~shoal.train.watch.robust.Robust`, such as ``{"spares": 1}``.
        watch: called with every event as it happens.
        anyway: run a plan made for GPUs on this CPU; it is not scored.
        **values: settings of the job, such as ``steps=100``, ``data="notes/"``, ``ranks=2``.

    Raises:
        MissingExtraError: PyTorch is not installed.
        ShoalError: as of :func:`run`.

    Examples:
        >>> report = shoal.train("shoal-1m", steps=30, directory="runs/first")
        >>> report.measured["step_s"], report.errors["step_s"]
    """
    import_extra("torch", extra="run", purpose="training")
    options = TrainOptions(
        resume=resume,
        from_step=from_step,
        start=start,
        restarts=restarts,
        robust=robust,
        anyway=anyway,
    )
    ready = prepare(
        job,
        kind="train",
        machine=machine,
        directory=directory,
        resume=resume or from_step is not None,
        start=start,
        command="train",
        **values,
    )
    report = train_prepared(ready, options, watch=watch)
    assert report is not None
    return report


def starter_of(launcher: str | None) -> Starter | None:
    """The launcher of that name, if it starts the ranks itself instead of writing files.

    Raises:
        UnknownPartError: there is no such launcher.
    """
    if launcher is None:
        return None
    part = table("launch").build(launcher, where="--launch")
    return part if isinstance(part, Starter) else None


def write_launch(ready: PreparedRun, launcher: str) -> list[Path]:
    """Write what starts a training run elsewhere, and its plan; what was written.

    Raises:
        ShoalError: the launcher cannot start such a plan.
    """
    files = table("launch").build(launcher, where="--launch").files(ready.plan)
    ready.plan.save(ready.directory / "plan.yaml")
    for name, text in files.items():
        write_atomic(ready.directory / name, text)
    return [ready.directory / name for name in (*files, "plan.yaml")]


def train_prepared(
    ready: PreparedRun, options: TrainOptions, *, watch: Watch | None = None
) -> TrainReport | None:
    """Train what is prepared: under torchrun, by a launcher, or over ranks of this host.

    Returns:
        The report; None on the other ranks of torchrun.

    Raises:
        ShoalError: it cannot run here, or a rank failed.
    """
    plan, place = ready.plan, ready.directory
    assert isinstance(plan, TrainPlan)
    resume, start, anyway = options.resume, options.start, options.anyway
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from shoal.train.torchrun import execute_under_torchrun

        return execute_under_torchrun(
            plan, place, resume=resume, start=start, watch=watch, anyway=anyway
        )
    starter = starter_of(options.launcher)
    if starter is not None:
        return starter.run(
            plan, place, resume=resume, start=start, restarts=options.restarts, watch=watch
        )
    inject = None
    if options.chaos is not None:
        from shoal.checkpoint.inmemory import MEMORY_CODES
        from shoal.train.chaos import Chaos

        memory = plan.job.checkpoint.memory
        size = 1 if memory is None else MEMORY_CODES.build(memory).ranks_per_node
        inject = Chaos(options.chaos, ranks_per_node=size, seed=plan.job.seed)
    if options.robust is not None:
        from shoal.train.planning import plan_job
        from shoal.train.watch.robust import Robust, execute_robust

        return execute_robust(
            plan,
            place,
            Robust(**options.robust),
            resume=resume,
            watch=watch,
            replan=lambda job: plan_job(job, plan.machine),
            inject=inject,
            anyway=anyway,
        )
    from shoal.train.run import execute

    return execute(
        plan,
        place,
        resume=resume,
        from_step=options.from_step,
        start=start,
        restarts=options.restarts,
        watch=watch,
        inject=inject,
        anyway=anyway,
    )
