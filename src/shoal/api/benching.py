"""A workload served in real time: here beside what was predicted of it, elsewhere, or by peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.jobs import JobSource, machine_of, read_job
from shoal.api.loading import model_directory
from shoal.core.extras import require_extra
from shoal.core.hub import fetched
from shoal.core.measure import num_cores
from shoal.core.scratch import scratch_directory
from shoal.cost.workloads.choose import choose
from shoal.ir import Machine, ServeJob, ServePlan, ServeReport, kind_named
from shoal.plan.serving.goodput import Slo, targets_of

if TYPE_CHECKING:
    from shoal.claims.bench.serving.values import ServingTable
    from shoal.serve.bench.remote import RemoteReport

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

    Examples:
        >>> shoal.bench_job("shoal-4m", workload="code", max_running=16).workload.name
        'code'
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

    Examples:
        >>> job = shoal.bench_job("shoal-4m", workload="chat")
        >>> report, latencies = shoal.bench_serve(job, requests=60, rate=20)
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


def bench_url(
    job: ServeJob,
    url: str,
    *,
    model: str = "",
    key: str | None = None,
    requests: int | None = None,
    rate: float | None = None,
    slo: str | None = None,
    chat: bool = False,
    text: bool = False,
    ignore_eos: bool = True,
    vocab: int = 1000,
    timeout_s: float = 600.0,
    progress: Callable[[float, float, str], None] | None = None,
    on_start: Callable[[str], None] | None = None,
) -> RemoteReport:
    """Replay a workload against an OpenAI-compatible server that runs elsewhere.

    Args:
        job: its workload and its ``max_position`` are used; see :func:`bench_job`.
        url: of the server.
        model: what it calls the model; the first that it lists if empty.
        key: what it wants in ``Authorization: Bearer``.
        requests: so many of the workload; None for all.
        rate: requests per second; None for the workload's own times.
        slo: targets in s for goodput, such as ``ttft=0.25,tpot=0.03``.
        chat: ask ``chat/completions``, with text prompts.
        text: send prompts as text, not token ids.
        ignore_eos: ask for outputs of exactly the trace's lengths.
        vocab: token ids are below it.
        timeout_s: s after which a request counts as hung.
        progress: called with (done, total, text).
        on_start: called with what is sent, in words.

    Raises:
        ServeError: no such server or model, or no request was answered.

    Examples:
        >>> job = shoal.bench_job(workload="azure")
        >>> report = shoal.bench_url(job, "http://127.0.0.1:8000", requests=200)
        >>> report.measured["ttft_p99_s"]
    """
    from shoal.serve.bench.remote import RemoteServer, measure_remote
    from shoal.serve.bench.replay import with_workload

    remote = RemoteServer(
        url=url,
        model=model,
        key=key,
        chat=chat,
        text=text,
        ignore_eos=ignore_eos,
        timeout_s=timeout_s,
    )
    return measure_remote(
        remote,
        with_workload(job, requests=requests, rate=rate),
        requests=requests,
        vocab=vocab,
        targets=slo_of(slo),
        progress=progress,
        on_start=on_start,
    )


def bench_peers(
    model: str | PathLike[str] | None = None,
    *,
    environments: str | PathLike[str] | None = None,
    rounds: int = 6,
    threads: int = 0,
    progress: Callable[[str, float, float], None] | None = None,
    on_ready: Callable[[], None] | None = None,
) -> ServingTable:
    """Measure serving engines beside each other on this machine.

    Args:
        model: a model directory or an id of the hub; random weights of 205.6 M parameters if None.
        environments: directory where ``scripts/peers`` installed them.
        rounds: timed rounds.
        threads: of every engine; 0 for all cores.
        progress: called with (what is done, done, total).
        on_ready: called when the model is there, before anything is measured.

    Raises:
        ServeError: Shoal itself fails.

    Examples:
        >>> table = shoal.bench_peers("runs/first/export", environments="peers")
        >>> table.versions
    """
    from shoal.claims.bench.serving.run import bench, random_directory

    given = None if model is None else model_directory(model)
    if on_ready is not None:
        on_ready()
    with scratch_directory("peers") as place:
        return bench(
            given or random_directory(place),
            environments=None if environments is None else Path(environments),
            rounds=rounds,
            threads=threads or num_cores(),
            progress=progress,
        )
