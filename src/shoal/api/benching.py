"""A workload served in real time, beside what was predicted of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

from shoal.api.jobs import JobSource, machine_of, read_job
from shoal.core.extras import require_extra
from shoal.core.hub import fetched
from shoal.cost.workloads.choose import choose
from shoal.ir import Machine, ServeJob, ServePlan, ServeReport, kind_named
from shoal.plan.serving.goodput import Slo, targets_of

_MODEL = "shoal-4m"


def bench_job(
    source: JobSource | None = None,
    *,
    workload: str | None = None,
    trace: str | PathLike[str] | None = None,
    sets: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    **values: Any,
) -> ServeJob:
    """The job whose workload is served.

    Args:
        source: a model's directory, name or id of the hub, a serving job in YAML, a mapping, or a
            job; a small model if None.
        workload: name of a workload.
        trace: file of requests.
        sets: ``path=value`` texts over everything else.
        environment: variables that set values; none if not given.
        **values: settings of the job.

    Raises:
        ConfigError: a setting does not fit.
    """
    chosen = choose(workload, None if trace is None else str(trace))
    values["workload"] = chosen and chosen.model_dump(mode="json")
    if source is None and values.get("model") is None:
        source = _MODEL
    job: ServeJob = read_job(
        source, kind_named("serve"), None, values, sets=sets, environment=environment or {}
    ).value
    return job


def with_known_model(job: ServeJob) -> ServeJob:
    """The job with its model on this machine, before anything is measured or waited for.

    Raises:
        ModelError: there is no such model.
    """
    from shoal.train.zoo import require_known

    job = fetched(job)
    require_known(job.model)
    return job


def slo_of(text: str | None) -> tuple[float, float] | None:
    """Most s to the first token and per further token, of ``ttft=0.25,tpot=0.03``."""
    if text is None:
        return None
    targets: Slo = targets_of(text)
    return targets.ttft, targets.tpot


def bench_serve(
    job: ServeJob,
    *,
    machine: str | PathLike[str] | Machine = "local",
    requests: int | None = None,
    rate: float | None = None,
    slo: str | None = None,
    profile_s: float = 5.0,
    score: bool = True,
    anyway: bool = False,
    progress: Callable[[str, float, float], None] | None = None,
    on_start: Callable[[str], None] | None = None,
    on_plan: Callable[[ServePlan], None] | None = None,
) -> tuple[ServeReport, dict[str, list[float]]]:
    """Serve a workload in real time here; the simulator predicts it before.

    Args:
        job: see :func:`bench_job`.
        machine: what is planned for.
        requests: so many of the workload; None for all.
        rate: requests per second; None for the workload's own times.
        slo: targets in s for goodput, such as ``ttft=0.25,tpot=0.03``.
        profile_s: about how many s steps are timed before.
        score: keep the report in the score.
        anyway: serve here what is planned for another kind of device; it is not scored.
        progress: called with (what is done, done, total).
        on_start: called with what is served, in words.
        on_plan: called with what is predicted, before anything is served.

    Returns:
        Prediction beside measurement, and the latencies of all requests by name.

    Raises:
        MissingExtraError: PyTorch is not installed.
        ShoalError: something of the job cannot be.
    """
    require_extra("torch", purpose="shoal bench serve")
    from shoal.cost.score import Score
    from shoal.serve.bench import replay
    from shoal.serve.ranks.spinning import spin_briefly

    spin_briefly()
    target, targets = machine_of(machine), slo_of(slo)
    job = fetched(job)
    weights, where = replay.weights_of(job)
    if on_start is not None:
        on_start(where)
    samples: dict[str, list[float]] = {}
    report = replay.bench_serve(
        job,
        requests=requests,
        rate=rate,
        machine=target,
        model=weights,
        profile_s=profile_s,
        progress=progress,
        on_plan=on_plan,
        targets=targets,
        seen=samples.update,
        anyway=anyway,
    )
    if score:
        Score().append(report)
    return report, samples
