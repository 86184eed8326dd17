"""``shoal.plan``: what a job will cost, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from shoal.api.jobs import JobSource, kind_of_source, machine_of, paths_of, read_job
from shoal.api.plans import Plans
from shoal.core.errors import ConfigError
from shoal.cost.calibration import calibrated
from shoal.ir import Machine
from shoal.ir.job_kind import rank_options, ranked


def plan(
    job: JobSource | None = None,
    machine: str | PathLike[str] | Machine = "local",
    *,
    kind: str | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    calibration: bool = True,
    **values: Any,
) -> Plans[Any]:
    """Rank the ways to do a job on a machine; nothing runs and no torch is needed.

    Args:
        job: a model's name or directory, a job in YAML, a mapping, or a job; None where
            ``values`` say the model.
        machine: ``local``, a shorthand such as ``16xH100`` or ``8xA100@IB200``, a file, or a value.
        kind: of the job: train, serve or another of ``shoal explain job``; what ``job`` says, or
            train.
        sets: ``path=value`` texts over everything else, as ``--set`` has them.
        environment: variables that set values; none if not given.
        calibration: correct times by what ``shoal score --calibrate`` has stored.
        **values: settings of the job (``tokens="20B"``, ``parallel={"tp": 2}``,
            ``parallel__tp=2``), and options of the kind's search (``planner="megatron"``,
            ``finetune="auto"``).

    Returns:
        The plans, best first, with what they rest on.

    Raises:
        ConfigError: a setting does not fit, or there is no such setting.
        ModelError: there is no such model.
        MachineError: there is no such machine.
        PlanError: no plan is legal.

    Examples:
        >>> plans = shoal.plan("Qwen3-14B", machine="16xH100", tokens="20B")
        >>> plans.best.job.parallel.tp
        2
    """
    chosen = kind_of_source(job, kind)
    if job is None and values.get(chosen.subject) is None:
        paths_of(chosen, values)  # a misspelled key is the cause of a missing one
        raise ConfigError(f"{chosen.subject}: missing; give a name, a directory or a job in YAML")
    target = machine_of(machine)
    notes: tuple[str, ...] = ()
    if calibration:
        target, wrong = calibrated(target)
        notes = (wrong,) if wrong else ()
    else:
        target = target.model_copy(update={"calibration": None})
    search, settings = _divided(rank_options(chosen), chosen.job_type.model_fields, values)
    resolved = read_job(
        job,
        chosen,
        target,
        settings,
        sets=sets,
        environment={} if environment is None else environment,
    )
    plans = ranked(chosen, resolved.value, target, **search)
    return Plans(chosen, plans, resolved, search=search, notes=notes)


def _divided(
    options: Sequence[str], fields: Mapping[str, Any], values: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(options of the search, settings of the job); ``auto`` of either is for the search."""
    search = {
        name: value
        for name, value in values.items()
        if name in options and value is not None and (name not in fields or value == "auto")
    }
    return search, {name: value for name, value in values.items() if name not in search}
