"""A job from whatever a user has: a model's name, a file, a mapping, a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from shoal.core.config import ResolvedValue, parse, resolve
from shoal.core.errors import ConfigError, suggestion
from shoal.core.files import read_yaml
from shoal.ir import Job, JobKind, Machine, kind_named
from shoal.ir.job_kind import defaults_of
from shoal.machine.described import load
from shoal.plan.defaults import REASON

JobSource = str | PathLike[str] | Mapping[str, Any] | Job
"""A model's name, directory or shape in YAML; a job in YAML, a mapping of its keys, or a job."""


def machine_of(machine: str | PathLike[str] | Machine) -> Machine:
    """A machine, described or named.

    Args:
        machine: a value, ``local``, a shorthand such as ``16xH100``, or a file.

    Raises:
        MachineError: there is no such machine; names the nearest ones.
    """
    return machine if isinstance(machine, Machine) else load(str(machine))


def kind_of_source(source: JobSource | None, kind: str | None) -> JobKind:
    """The kind of job that a source says, ``kind`` where it says none, and train without either.

    Raises:
        UnknownPartError: there is no such kind.
        ConfigError: the source is of another kind than ``kind``.
    """
    said: Any = None
    file: Path | None = None
    if isinstance(source, Job):
        said = source.job
    elif isinstance(source, Mapping):
        said = source.get("job")
    elif (file := _file(source)) is not None:
        raw = read_yaml(file)
        said = raw.get("job") if isinstance(raw, Mapping) else None
    if said is not None and kind is not None and said != kind:
        where, instead = "", f"leave kind out, or give kind={said!r}"
        if file is not None:
            where, instead = f"{file}: ", f"use shoal plan {said} {file} or shoal run {said} {file}"
        raise ConfigError(f"{where}a job of kind {said}, not {kind}; {instead}")
    return kind_named(str(said or kind or "train"))


def read_job(
    source: JobSource | None,
    kind: JobKind,
    machine: Machine | None,
    values: Mapping[str, Any] | None = None,
    *,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ResolvedValue[Any]:
    """The job with the defaults of its machine, and why each of its values is what it is.

    Args:
        source: of the job; its defaults if None.
        kind: of the job.
        machine: where it is done; the defaults of the type hold if None.
        values: dotted path, or name of one of the kind's flags, -> value; ``parallel__tp`` is
            ``parallel.tp``. None leaves open.
        sets: ``path=value`` texts, the value in YAML.
        environment: variables that are read; ``os.environ`` if None.

    Raises:
        ConfigError: a value does not fit, or there is no such key.
    """
    flags = paths_of(kind, values or {})
    base: Job | None = None
    file = _file(source)
    if isinstance(source, Job):
        base = source
    elif isinstance(source, Mapping):
        base = parse(kind.job_type, dict(source), where="the job")
    elif source is not None and file is None:
        if (other := flags.get(kind.subject)) is not None:
            raise ConfigError(
                f"{kind.subject}: given twice, {source} and {other}; give one of the two"
            )
        flags = {**flags, kind.subject: str(source)}
    resolved = resolve(
        kind.job_type, base=base, file=file, environment=environment, flags=flags, sets=sets
    )
    if machine is None:
        return resolved
    return resolved.completed(defaults_of(kind, resolved.value, machine), REASON)


def _file(source: JobSource | None) -> Path | None:
    """The file of a job; a file of a model's shape names a model, as a directory does."""
    if not isinstance(source, str | PathLike) or not str(source).endswith(
        (".yaml", ".yml", ".json")
    ):
        return None
    raw = read_yaml(Path(source))
    return None if isinstance(raw, Mapping) and "num_layers" in raw else Path(source)


def paths_of(kind: JobKind, values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted path -> value, of keywords that are fields or flags.

    Raises:
        ConfigError: there is no such field or flag.
    """
    by_name = {flag.name: flag for flag in kind.flags}
    known = kind.job_type.model_fields
    result: dict[str, Any] = {}
    for name, value in values.items():
        path = name.replace("__", ".")
        flag = by_name.get(name)
        if flag is not None:
            path = flag.path
            if flag.read is not None and isinstance(value, str):
                value = flag.read(value)
        elif path.partition(".")[0] not in known:
            names = sorted({*known, *by_name})
            raise ConfigError(
                f"{name}: not a setting of this kind of job" + suggestion(name, names)
            )
        result[path] = value
    return result
