"""Replay a workload on the real engine, beside what the simulator said before.

The engine is profiled, and its first requests are rehearsed with other tokens. The simulator
predicts the workload with the same scheduler, the same cache bookkeeping and the cost that was
fitted to both, and then the workload is served in real time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.core.errors import ConfigError, require
from shoal.core.files import write_json
from shoal.core.measure import check_quiet
from shoal.core.parts import Choice, options_of, table
from shoal.cost.score import Score
from shoal.cost.serving.simulator import ServedRequest, request_of
from shoal.cost.step_cost.fitted import StepSample
from shoal.ir import Arrival, Machine, Output, ServeJob, ServeReport, Watch, errors_of
from shoal.machine import host
from shoal.serve.bench.latencies import measured_of, samples_of
from shoal.serve.engine.loop import Engine

if TYPE_CHECKING:
    from shoal.ir import ServePlan
    from shoal.model.transformer import Transformer

Progress = Callable[[float, float, str], None]

# s that a run waits for a quiet machine, and how not to wait.
_WAIT_S = 60.0
_ANYWAY = "--anyway (anyway=True in Python)"


def weights_of(job: ServeJob, *, seed: int = 0) -> tuple[Transformer, str]:
    """The model of a job, and in words where its weights are from.

    Args:
        job: its ``model`` is a Hugging Face directory, or a model of the zoo: trained if it
            lies there already, with fresh weights otherwise.
        seed: of fresh weights.

    Raises:
        ShoalError: there is no such model, or it cannot be read.
    """
    from shoal.serve.engine.build import load_model, prepare
    from shoal.train import zoo

    if Path(job.model).is_dir():
        return load_model(job), f"the weights of {job.model}"
    zoo.require_known(job.model)
    there = zoo.trained_directory(job.model)
    if there is not None:
        model = load_model(job.model_copy(update={"model": str(there)}))
        return model, f"{job.model}, trained before"
    fresh = zoo.random(job.model, seed)
    return prepare(job, fresh), f"{job.model} with random weights: same speed, meaningless text"


def with_workload(
    job: ServeJob, *, requests: int | None = None, rate: float | None = None
) -> ServeJob:
    """The job with another number or rate of requests in its workload.

    Raises:
        ConfigError: the workload has no such option, or the value is wrong.
    """
    options = dict(job.workload.options)
    known = options_of(table("workload").load(job.workload.name, where="workload"))
    for name, value in (("requests", requests), ("rate", rate)):
        if value is None:
            continue
        require(
            name in known,
            f"workload.{job.workload.name}",
            name,
            expected=f"one of its options: {', '.join(known)}",
        )
        options[name] = value
    return job.model_copy(update={"workload": Choice(name=job.workload.name, options=options)})


def bench_serve(
    job: ServeJob,
    *,
    requests: int | None = None,
    rate: float | None = None,
    machine: Machine | None = None,
    model: Transformer | None = None,
    profile_s: float = 5.0,
    progress: Callable[[str, float, float], None] | None = None,
    on_plan: Callable[[ServePlan], None] | None = None,
    targets: tuple[float, float] | None = None,
    seen: Callable[[dict[str, list[float]]], None] | None = None,
    anyway: bool = False,
) -> ServeReport:
    """Profile, rehearse, predict, then serve for real.

    Args:
        job: model, limits and workload.
        requests: so many of the workload; None for all.
        rate: requests per second; None for the workload's own times.
        machine: what the plan is for; the saved probe of this one if not given.
        model: to serve; that of the job if not given.
        profile_s: about how many s the profile takes, and at most the rehearsal of the first
            requests; with 0 there is none.
        progress: called with (what is done, done, total).
        on_plan: called with the plan, before anything is served.
        targets: most s to the first token and per further token, for goodput.
        seen: called with what :func:`~shoal.serve.bench.latencies.samples_of` gives.
        anyway: serve on this host's device what is planned for another kind; nothing is scored.

    Raises:
        PlanError: planned for GPUs, and the model lies on the CPU.
        ShoalError: something of the job cannot be.
    """
    from shoal.cost.step_cost.fitted import fit
    from shoal.machine.described import load
    from shoal.machine.fingerprint import versions
    from shoal.plan.serving.inputs import arrivals_of
    from shoal.plan.serving.plans import plan_serve
    from shoal.plan.serving.simulation import simulate_plan
    from shoal.serve.bench.profile import profile, spread
    from shoal.serve.bench.rehearse import learned, opening, others
    from shoal.serve.engine.build import concrete, engine_of

    def bar(title: str) -> Progress:
        return lambda done, total, _: progress(title, done, total) if progress else None

    machine = machine if machine is not None else load("local")
    job = with_workload(job, requests=requests, rate=rate)
    if model is None:
        model, _ = weights_of(job)
    device = _checked_device(job, machine, model, anyway=anyway)
    job = concrete(job, model.config, model.embed.weight.dtype)
    assert job.kv_tokens is not None and job.max_position is not None
    arrivals = arrivals_of(job, model.config.shape(), count=requests)
    engine, limits, runner = engine_of(job, model)
    samples = profile(
        runner, spread(limits, job.kv_tokens), seconds=profile_s, progress=bar("profile")
    )
    cost = fit(samples)
    first = opening(simulate_plan(job, machine, cost, arrivals).served, profile_s)
    if first:
        steps: list[StepSample] = []
        rehearsed = others(arrivals[:first], model.config.vocab_size)
        replay(engine, rehearsed, progress=bar("rehearsal"), steps=steps)
        cost = learned(steps, samples)
    cost = cost.model_copy(
        update={
            "machine": machine.name,
            "model": model.config.name,
            "precision": job.precision,
            "threads": job.threads,
        }
    )
    plan = plan_serve(job, machine, cost=cost, trace=arrivals)
    if on_plan is not None:
        on_plan(plan)
    before = engine.stats()
    gaps = _Gaps()
    served = replay(engine, arrivals, progress=bar("requests"), watch=gaps)
    measured = measured_of(served, gaps.seconds, targets=targets)
    if seen is not None:
        seen(samples_of(served, gaps.seconds))
    measured["memory_bytes"] = float(host.peak_memory())
    stats = {name: value - before[name] for name, value in engine.stats().items()}
    measured["step_s"] = stats["step_seconds_total"] / max(1.0, stats["steps_total"])
    measured["preemptions"] = stats["preemptions_total"]
    if stats["prefix_query_tokens"]:
        measured["prefix_hit_share"] = stats["prefix_hit_tokens"] / stats["prefix_query_tokens"]
    return ServeReport(
        plan=plan,
        measured=measured,
        errors=errors_of(plan, measured) if device == machine.device.kind else {},
        versions=versions(),
        device=device,
    )


def _checked_device(
    job: ServeJob, machine: Machine, model: Transformer, *, anyway: bool
) -> Literal["cpu", "gpu"]:
    """What the model lies on, if that is what was planned for."""
    from shoal.plan.saved import check_device

    device: Literal["cpu", "gpu"] = "gpu" if model.embed.weight.is_cuda else "cpu"
    check_device(machine, device, f"the plan of {job.name}", anyway=anyway)
    return device


def run_plan(
    plan: ServePlan,
    directory: Path,
    *,
    resume: bool = False,
    watch: Watch | None = None,
    anyway: bool = False,
) -> ServeReport:
    """Serve the workload of a plan, and keep plan and report in a directory and in the score.

    The report's prediction is computed again from a profile of the engine on this host.

    Args:
        plan: what to serve.
        directory: of the run.
        resume: a run may lie there; a workload begins again from its first request.
        watch: called with events of kind ``prepare``, whose state is (done, total, text).
        anyway: measure on a busy machine too, and what is planned for another kind of device.

    Raises:
        ConfigError: a run lies there and is not resumed.
        NoisyMachineError: the machine stays busy for a minute.
        ShoalError: it cannot be served.
    """
    files = {name: directory / name for name in ("plan.yaml", "report.json")}
    if files["plan.yaml"].exists() and not resume:
        raise ConfigError(
            f"{directory}: already contains a run; serve it again with --resume, or choose "
            "another name with --set name=..."
        )

    def progress(text: str, done: float, total: float) -> None:
        if watch is not None:
            watch({"kind": "prepare", "state": (done, total, text)})

    # Nothing is written of what cannot be served.
    model, _ = weights_of(plan.job)
    _checked_device(plan.job, plan.machine, model, anyway=anyway)
    if not anyway:
        check_quiet(
            wait_s=_WAIT_S,
            waiting=lambda why, left: progress(
                f"waiting for a quiet machine ({why}; {_ANYWAY} measures at once)",
                _WAIT_S - left,
                _WAIT_S,
            ),
            hint=f"measure all the same with {_ANYWAY}",
        )
    Score().register(directory, plan.job.job, plan.job.name, plan.job.model)
    plan.save(files["plan.yaml"], header="What will be served, and what it is predicted to take.")
    report = bench_serve(
        plan.job, machine=plan.machine, model=model, progress=progress, anyway=anyway
    )
    write_json(files["report.json"], report.model_dump(mode="json"))
    Score().append(report, directory)
    return report


class _Gaps:
    """Seconds between two outputs of a request, of all of them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: dict[str, float] = {}

    def __call__(self, output: Output, now: float) -> None:
        before = self._last.get(output.request_id)
        if before is not None:
            self.seconds.append(now - before)
        self._last[output.request_id] = now


def replay(
    engine: Engine,
    arrivals: Sequence[Arrival],
    *,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
    progress: Progress | None = None,
    watch: Callable[[Output, float], None] | None = None,
    steps: list[StepSample] | None = None,
) -> list[ServedRequest]:
    """Serve ``arrivals`` in real time: each is added when its time has come.

    Args:
        engine: one without requests.
        arrivals: what comes, in the order of time.
        clock: s.
        sleep: waits so many s.
        progress: called with (done, total, text).
        watch: called with every output and when it came, s.
        steps: takes in what each step was, and how long.

    Raises:
        ServeError: a request that can never run.
    """
    live: dict[str, ServedRequest] = {}
    seen: list[ServedRequest] = []
    place = finished = 0
    requests = [request_of(str(number), arrival) for number, arrival in enumerate(arrivals)]
    began = clock()
    while place < len(arrivals) or engine.busy:
        now = clock() - began
        while place < len(arrivals) and arrivals[place].at <= now:
            request = requests[place]
            engine.add(request)
            live[request.id] = ServedRequest(request.id, arrivals[place].at, request.n_prompt)
            seen.append(live[request.id])
            place += 1
        if not engine.busy:
            sleep(max(0.0, arrivals[place].at - (clock() - began)))
            continue
        started = clock()
        outputs = engine.step()
        now = clock() - began
        if steps is not None and engine.last_chunks:
            chunks = tuple((one.start, one.length) for one in engine.last_chunks)
            steps.append(StepSample(chunks=chunks, seconds=clock() - started))
        for output in outputs:
            if watch is not None:
                watch(output, now)
            served = live[output.request_id]
            request = requests[int(output.request_id)]
            if served.n_output == 0:
                served.first, served.n_cached = now, request.n_cached
            served.n_output += len(output.tokens)
            if output.finish is not None:
                served.finish, served.preemptions = now, request.preemptions
                served.switch_s = request.switch_s
                del live[output.request_id]
                finished += 1
                if progress is not None:
                    progress(finished, len(arrivals), "")
    return seen
