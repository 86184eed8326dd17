"""A run before it begins: what is planned, where it is done, and why each setting is what it is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from shoal.api.jobs import JobSource, kind_of_source, machine_of, read_job
from shoal.core.config import ResolvedValue
from shoal.core.errors import ConfigError, PlanError
from shoal.core.hub import fetched
from shoal.ir import JobKind, Machine, Plan, TrainJob, TrainPlan, kind_named, kind_of
from shoal.plan.defaults import REASON
from shoal.plan.saved import check_machine, check_model, read_plan

_LENGTH = ("steps", "tokens", "minutes")
_MINUTES = 3.0


@dataclass(frozen=True)
class PreparedRun:
    """What is run, before it begins.

    Args:
        plan: that is run.
        directory: of the run.
        resolved: the job and why each of its values is what it is; None of a plan that was saved.
        notes: about the plan.
    """

    plan: Plan[Any]
    directory: Path
    resolved: ResolvedValue[Any] | None = None
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> JobKind:
        """Of its job."""
        return kind_of(self.plan)


def prepare(
    job: JobSource | Plan[Any] | None = None,
    *,
    kind: str | None = None,
    plan: str | PathLike[str] | None = None,
    machine: str | PathLike[str] | Machine = "local",
    directory: str | PathLike[str] | None = None,
    resume: bool = False,
    start: str | None = None,
    fetch: bool = True,
    here: bool = True,
    anyway: bool = False,
    command: str | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **values: Any,
) -> PreparedRun:
    """Plan what a run does, and refuse what cannot be; nothing runs.

    Args:
        job: see :func:`shoal.run`.
        kind: of the job.
        plan: file of a plan that is run instead of a job.
        machine: what is planned for; what a plan in a file must be made for.
        directory: of the run; ``runs/NAME`` if None.
        resume: go on with the run that lies there; settings that are given change its job.
        start: the checkpoint of another run that training begins with.
        fetch: get what the job names on the Hugging Face hub.
        here: the run is on this machine.
        anyway: accept a plan for another kind of device.
        command: of the command line, for errors; ``run KIND`` if None.
        sets: ``path=value`` texts over everything else.
        environment: variables that set values; none if not given.
        **values: settings of the job.

    Raises:
        ConfigError: a setting does not fit, or there is nothing to resume.
        ShoalError: there is no such model or machine, or no plan.
    """
    changed = bool(sets) or any(value is not None for value in values.values())
    root = None if directory is None else Path(directory)
    old = root / "plan.yaml" if root is not None and resume else None
    resolved: ResolvedValue[Any] | None = None
    notes: tuple[str, ...] = ()
    if plan is not None:
        given = {"a job": job, **values, "set": sets or None}
        _refuse_beside(str(plan), given, kind or "train", flags=environment is not None)
        where = machine if here else None
        chosen, notes = _saved(Path(plan), kind, where, anyway=anyway)
    elif isinstance(job, Plan):
        if changed:
            names = ", ".join([*values, *sets])
            raise ConfigError(f"{names}: a plan already has all settings; plan the job again")
        chosen = job
    elif job is None and old is not None and old.exists() and not changed:
        chosen = _of_kind(read_plan(old), kind, old)
    else:
        source: JobSource | None = job
        if job is None and start is not None:
            source = _job_of_checkpoint(start)
        elif job is None and old is not None and old.exists():
            source = _job_again(_of_kind(read_plan(old), kind, old).job, values)
        elif job is None and resume and os.environ.get("RANK", "0") == "0":
            # Another node of a cluster has nothing before rank 0 has sent it.
            _refuse_to_resume(root, command or f"run {kind or 'train'}")
        of = kind_of_source(source, kind)
        target = machine_of(machine)
        layers = {} if source is not job else environment or {}
        resolved = read_job(source, of, target, values, sets=sets, environment=layers)
        if isinstance(resolved.value, TrainJob) and source is job:
            resolved = _with_length(resolved)
        wanted = resolved.value
        chosen = of.plan(fetched(wanted) if fetch else wanted, target)[0]
    if fetch:
        chosen = chosen.model_copy(update={"job": fetched(chosen.job)})
    return PreparedRun(chosen, root or Path("runs") / chosen.job.name, resolved, notes)


def _refuse_beside(plan: str, given: Mapping[str, object], kind: str, *, flags: bool) -> None:
    """Settings of a job beside a plan would be ignored: it has a job of its own."""
    paths = [name.partition(".") for name, value in given.items() if value is not None]
    names = list(dict.fromkeys(name for name, _, _ in paths))
    if flags:
        keys = {name for name, _, rest in paths if rest} | {"a job"}
        names = [n if n in keys else f"--{n.replace('_', '-')}" for n in names]
    if names:
        words = ", ".join(names)
        raise ConfigError(
            f"{words} with {'--plan' if flags else 'plan'} {plan}: the plan has all settings of "
            f"its job; plan another job with shoal plan {kind} --out FILE, or leave {words} out"
        )


def _with_length(resolved: ResolvedValue[TrainJob]) -> ResolvedValue[TrainJob]:
    """Three minutes where no length is given."""
    given = (name for name in _LENGTH if resolved.origins.get(name) != REASON)
    if any(getattr(resolved.value, name) is not None for name in given):
        return resolved
    return resolved.replace({"minutes": _MINUTES, "steps": None}, "default: three minutes")


def _job_again(job: Any, values: Mapping[str, Any]) -> Any:
    """The job of a run that goes on otherwise: what depends on what is changed is open."""
    if not isinstance(job, TrainJob):
        return job
    again: dict[str, object] = {"microbatch": None}  # ranks may be others now
    if values.get("minutes") is not None:
        again["steps"] = None
    return job.model_copy(update=again)


def _job_of_checkpoint(start: str) -> TrainJob | None:
    """The job of another run's checkpoint, for a run that begins there; None if it has none."""
    from shoal.train.start import job_of

    first = job_of(start)
    if first is None:
        return None
    # Ranks may be others now, and so may what each does at a time. Where the other run saves is
    # no place for this one.
    own = first.checkpoint.model_copy(update={"path": None, "levels": ()})
    return first.model_copy(update={"microbatch": None, "checkpoint": own})


def _refuse_to_resume(directory: Path | None, command: str) -> None:
    if directory is None:
        raise ConfigError(
            f"resume: needs the directory of a run: shoal {command} --dir DIR --resume"
        )
    raise ConfigError(
        f"{directory}: contains no run to resume; start one with shoal {command} --dir {directory}"
    )


def _of_kind(plan: Plan[Any], kind: str | None, path: Path) -> Plan[Any]:
    """A plan of a file, which is one of the kind."""
    if kind is not None and not isinstance(plan, kind_named(kind).plan_type):
        other = plan.job.job
        raise ConfigError(
            f"{path}: a plan of the job {other}, not {kind}; run it with "
            f"shoal run {other} --plan {path}"
        )
    return plan


def _saved(
    path: Path, kind: str | None, machine: str | PathLike[str] | Machine | None, *, anyway: bool
) -> tuple[Plan[Any], tuple[str, ...]]:
    """A plan from a file, with notes; one of training if it is for its model and this machine."""
    result = _of_kind(read_plan(path), kind, path)
    if not isinstance(result, TrainPlan):
        return result, ()
    from shoal.machine.probing import saved_path
    from shoal.parallel.legal import check_split
    from shoal.train.planning import with_kernels, with_rounds

    check_model(result, str(path))
    try:
        check_split(result.job, result.shape)
    except PlanError as cause:
        raise PlanError(f"{path}: {cause}; correct the file, or plan again") from cause
    if machine is not None and (machine != "local" or saved_path().exists()):
        target = machine_of(machine)
        # Whether its GPUs are here is asked when it starts.
        if not anyway or target.device.kind == result.machine.device.kind:
            check_machine(result, target, str(path))
    result = with_rounds(with_kernels(result))
    why = "" if result.fits else f"{path}: {result.why or 'it does not fit, says its planner'}"
    return result, (why,) if why else ()
