"""``shoal.serve``: answer requests over HTTP, for a block or until a signal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.jobs import JobSource, read_job
from shoal.api.loading import model_directory
from shoal.core.config import ResolvedValue
from shoal.core.errors import ConfigError
from shoal.core.extras import require_extra
from shoal.core.hub import fetched
from shoal.ir import ServeJob, kind_named

if TYPE_CHECKING:
    from shoal.serve.engine.launch import EngineProcess
    from shoal.serve.http.server import RunningServer, ServerOptions


def serve(
    model: JobSource, *, options: ServerOptions | None = None, **values: Any
) -> AbstractContextManager[RunningServer]:
    """A server that answers as OpenAI's API does, for as long as a block takes.

    Args:
        model: the directory of a model or of a training run, an id of the hub, a serving job in
            YAML, a mapping, or a job.
        options: address, key and limits; any free port of this host if None.
        **values: settings of the job, such as ``max_running=16``, ``parallel={"tp": 2}``,
            ``disagg="prefill=1,decode=1"`` or ``adapters={"sql": "runs/sql/adapter"}``.

    Returns:
        A context manager of the running server, whose ``url`` clients call.

    Raises:
        MissingExtraError: the packages of the extra ``run`` are not installed.
        ShoalError: it does not start.

    Examples:
        >>> with shoal.serve("runs/first") as server:
        ...     print(server.url)
    """
    _require_packages("serving")
    from shoal.serve.http.server import ServerOptions, running

    job = local_job(served_job(model, **values).value)
    return running(job, _for_job(options or ServerOptions(port=0), job))


def serve_until_stopped(
    job: ServeJob,
    options: ServerOptions,
    *,
    ready: Callable[[RunningServer], None],
    begun: EngineProcess | None = None,
) -> int | None:
    """Serve until a signal, and then until open answers have ended.

    Args:
        job: of this machine, see :func:`local_job`.
        options: address, key and limits.
        ready: called when the server answers.
        begun: a process for its engine that has been started already.

    Returns:
        The number of the signal.

    Raises:
        ShoalError: it does not start.
    """
    from shoal.serve.http.server import serve

    return serve(job, _for_job(options, job), ready=ready, begun=begun)


def served_job(
    source: JobSource | None,
    *,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    disagg: str | Mapping[str, int] | None = None,
    adapters: Iterable[str] | Mapping[str, str] | None = None,
    **values: Any,
) -> ResolvedValue[ServeJob]:
    """The job that a server does, and why each of its values is what it is; nothing is fetched.

    Args:
        source: see :func:`serve`; None where ``values`` say the model.
        sets: ``path=value`` texts over everything else.
        environment: variables that set values; none if not given.
        disagg: instances of both phases, or ``prefill=1,decode=1``.
        adapters: name -> directory or id of the hub, or such texts as ``sql=runs/sql/adapter``.
        **values: other settings of the job.

    Raises:
        ConfigError: a setting does not fit.
    """
    values["disagg"] = _phases(disagg) if isinstance(disagg, str) else disagg
    named = adapters if isinstance(adapters, Mapping) else _named(adapters or ())
    values["adapters"] = dict(named) or None
    if source is None and values.get("model") is None:
        raise ConfigError(
            "model: missing; give a model directory, a run, an id of the hub or a job in YAML"
        )
    return read_job(
        source, kind_named("serve"), None, values, sets=sets, environment=environment or {}
    )


def local_job(job: ServeJob) -> ServeJob:
    """The job with its model and adapters as directories of this machine.

    Raises:
        ShoalError: there is no such model, or it cannot be fetched; a package is missing.
    """
    _require_packages("shoal serve")
    return fetched(job.model_copy(update={"model": str(model_directory(job.model))}))


def _require_packages(purpose: str) -> None:
    for package in ("starlette", "uvicorn", "torch"):
        require_extra(package, purpose=purpose)


def _for_job(options: ServerOptions, job: ServeJob) -> ServerOptions:
    """The options with what builds the engine of the job, unless they name another."""
    from shoal.serve.engine.frames import DEFAULT_FACTORY
    from shoal.serve.engine.process import factory_of

    if options.factory != DEFAULT_FACTORY:
        return options
    return dataclasses.replace(options, factory=factory_of(job))


def _named(given: Iterable[str]) -> dict[str, str]:
    """Name -> place, of texts such as ``sql=runs/sql/adapter``."""
    adapters: dict[str, str] = {}
    for word in given:
        name, separator, place = word.partition("=")
        if not (separator and name and place) or name in adapters:
            raise ConfigError(
                f"--adapter {word}: expected NAME=DIRECTORY with a name of its own, such as "
                "sql=runs/sql/adapter"
            )
        adapters[name] = str(Path(place).absolute()) if Path(place).exists() else place
    return adapters


def _phases(text: str) -> dict[str, int]:
    """Instances of each phase."""
    phases = {}
    for word in text.split(","):
        name, _, number = word.strip().partition("=")
        if name not in ("prefill", "decode") or name in phases or not number.isdigit():
            raise ConfigError(
                f"--disagg {text}: expected both phases with a number, such as prefill=1,decode=1"
            )
        phases[name] = int(number)
    return phases
