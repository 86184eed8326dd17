"""Plans of coded training: every scheme with the options that logged times favour."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shoal.core.errors import PlanError
from shoal.core.parts import Choice, table
from shoal.fields.federate.coded.job import CodedJob, CodedPlan
from shoal.fields.federate.coded.protocols import CodedError, CodedScheme, CodedWork, check_models
from shoal.fields.federate.coded.times import WorkerTimes, read_times, slow_factors, timed_run
from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.rates import core_share
from shoal.ir import Interval, Machine

# FLOP/s of a core in small layers under torch, and of the core of that rate; byte/s of messages.
_SMALL, _CORE, _WIRE = 3e9, 1e11, 4e8
# Seconds of a worker's round whatever it does; rounds of the slow-downs that are drawn for a plan.
_ROUND_S, _DRAWN = 2e-3, 200
# A worker with torch; the server.
_WORKER_BYTES, _SERVER_BYTES = 2.6e8, 2.5e8


def examples_of(job: CodedJob) -> tuple[Examples, Examples]:
    """What is learned from, and what is tested on.

    Raises:
        DataError: the data cannot be read.
    """
    train, test = table("example_source").build(job.data, where="data").load(job.seed)
    return (train.rows(np.arange(min(job.examples, len(train)))) if job.examples else train), test


def plan_coded(job: CodedJob, machine: Machine) -> list[CodedPlan]:
    """The best options of each scheme, the shortest run first.

    Raises:
        ShoalError: data or log cannot be read, or the scheme does not fit.
    """
    train, _ = examples_of(job)
    learner = table("learner").build(job.learner, where="learner")
    parameters, flops = learner.shape(train.x.shape[1:], train.classes)
    cores = min(max(machine.device.num_cores or 1, 1), job.workers)
    # All workers share the cores: computing takes the same time, whichever of them is slow.
    rate = _SMALL * core_share(machine, _CORE) * cores
    message = job.workers * 4.0 * parameters / _WIRE / cores
    times = times_of(job, _ROUND_S * job.workers / cores, flops * len(train) * job.workers / rate)
    best: dict[str, tuple[float, CodedPlan]] = {}
    for choice in _schemes(job, machine):
        scheme: CodedScheme = table("coded_scheme").build(choice, where="scheme")
        coding = scheme.start(job.workers, job.gradients)
        try:
            check_models(job.models, coding.delay)
        except CodedError:
            if job.scheme is not None:
                raise
            continue
        load, delay = coding.load, coding.delay
        seconds, waited = timed_run(coding, times, job.gradients, job.mu)
        seconds += (job.gradients + delay) * message * (2 + delay)
        if choice.name not in best or seconds < best[choice.name][0]:
            plan = _plan(job, machine, choice, seconds, waited, load, delay, parameters)
            best[choice.name] = seconds, plan
    if not best:
        raise PlanError(f"workers = {job.workers}: no scheme fits; give more workers or models")
    return [plan for _, plan in sorted(best.values(), key=lambda one: one[0])]


def times_of(job: CodedJob, fixed_s: float, computed_s: float) -> WorkerTimes:
    """Times of workers: logged, or those of the described slow-downs.

    Args:
        job: with a log or slow-downs.
        fixed_s: seconds of a round that do not depend on the load.
        computed_s: seconds of computing on the whole data.
    """
    if job.log is not None:
        return read_times(job.log, job.workers, fixed_s)
    factors = slowness(job, max(_DRAWN, job.gradients + job.models), 1)
    return WorkerTimes(fixed_s=fixed_s, whole_s=computed_s + job.data_s * factors)


def slowness(job: CodedJob, rounds: int, draw: int = 0) -> np.ndarray:
    """Factors of the workers' sleep in each round [rounds, workers]; each draw has others."""
    return slow_factors(
        job.workers, rounds, chance=job.slow_chance, recovery=job.slow_recovery,
        factor=job.slow_factor, seed=job.seed, draw=draw,
    )  # fmt: skip


def _schemes(job: CodedJob, machine: Machine) -> Iterator[Choice]:
    if job.scheme is not None:
        yield job.scheme
        return
    work = CodedWork(workers=job.workers, models=job.models, most=job.most)
    for choice, _ in table("coded_scheme").offered(work, machine):
        yield choice


def _plan(
    job: CodedJob,
    machine: Machine,
    choice: Choice,
    seconds: float,
    waited: float,
    load: float,
    delay: int,
    parameters: int,
) -> CodedPlan:
    rounds = job.gradients + delay
    memory = _SERVER_BYTES + job.workers * _WORKER_BYTES + 12.0 * parameters * job.workers
    capacity = machine.device.main_memory.capacity_bytes
    return CodedPlan(
        job=job.model_copy(update={"scheme": choice}),
        machine=machine,
        predicted={
            "total_s": Interval.around(seconds, 0.5),
            "round_s": Interval.around(seconds / rounds, 0.5),
            "load": Interval.exact(load),
            "waited": Interval.around(waited, 1.0) if waited else Interval.exact(0.0),
            "memory_bytes": Interval.around(memory, 0.4),
        },
        planner="schemes driven through workers' times",
        fits=not capacity or memory <= capacity,
        why=f"{choice}: load {load:.3g}, gradients up to {delay} rounds late",
        notes=("times of the log" if job.log else "times of the described slow-downs",),
        worker_load=load,
        delay=delay,
    )
