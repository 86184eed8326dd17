"""What a federation costs: seconds of local steps, links and merging, and the time of a run.

The time of a run is found by driving the scheduler itself on a virtual clock, without learning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shoal.core.config import Value
from shoal.core.native import cpu_model
from shoal.core.parts import Choice, table
from shoal.fields.federate.clients import ClientSpec, parse_clients, slow_factors
from shoal.fields.federate.coordinator import Coordinator, Machinery
from shoal.fields.federate.exchange import Exchange
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.learn.protocols import LocalSettings
from shoal.fields.federate.planes.direct import LocalSum
from shoal.fields.federate.privacy.guard import guarded
from shoal.fields.federate.protocols import (
    ClientInfo,
    ClientScheduler,
    FederateWork,
    FederationError,
    FederationInfo,
    LocalJob,
    RobustRule,
)
from shoal.fields.federate.virtual import ClientTimes, Lazily, VirtualClock
from shoal.fields.rates import core_share, kept_rates, least_seconds
from shoal.ir import Machine

# FLOP/s of a core in small layers under torch, and of a large product, where nothing was timed.
_SMALL, _LARGE = 3e9, 1e11
# Seconds of a step whatever the model, and byte/s of adding an update to a model.
_CALL_S, _MERGE = 3e-4, 4e9
# Seconds of a request on one machine whatever its size, and byte/s of its body, both ends included.
_REQUEST_S, _BODY = 2e-3, 4e8
# Rounds in which the load of a machine and the speed of its clients are brought together.
_SETTLE = 50
# Updates after which a rehearsal has shown enough, and those of each client.
_ARRIVALS, _ARRIVALS_EACH = 4_000, 20


class StepRates(Value):
    """How long the computations of a federation take on a core.

    Args:
        step_s: seconds of a local step.
        test_s: seconds of a test of the model.
        request_s: seconds of a request, whatever its size.
        body_s: seconds of a byte of its body.
        measured: timed on this machine.
    """

    step_s: float
    test_s: float
    request_s: float = _REQUEST_S
    body_s: float = 1 / _BODY
    measured: bool = True


def step_rates(
    job: FederateJob, features: tuple[int, ...], classes: int, tests: int, machine: Machine
) -> StepRates:
    """Seconds of a step: timed and kept if it is this machine and torch is there, else derived.

    Args:
        job: the federation.
        features: shape of an example.
        classes: of the labels.
        tests: examples that the server tests on.
        machine: on which it runs.
    """
    learner = table("learner").build(job.learner, where="learner")
    _, flops = learner.shape(features, classes)
    share = core_share(machine, _LARGE)
    derived = StepRates(
        step_s=(_CALL_S + flops * job.batch / _SMALL) / share,
        test_s=(_CALL_S + flops / 3 * tests / _SMALL) / share,
        request_s=_REQUEST_S / share,
        measured=False,
    )
    if machine.fingerprint.get("cpu") != cpu_model():
        return derived
    try:
        import torch  # noqa: F401
    except ImportError:
        return derived

    def timed() -> StepRates:
        return _timed(job, features, classes, tests)

    key = f"{cpu_model()}, {job.learner}, {features}, {classes}, {job.batch}, {tests} tests"
    return kept_rates("federate.json", key, StepRates, timed)


def _timed(job: FederateJob, features: tuple[int, ...], classes: int, tests: int) -> StepRates:
    """Seconds of steps and tests on examples of noise with one thread, and of requests."""
    import torch

    from shoal.fields.federate.learn.protocols import Examples
    from shoal.fields.federate.wire.timing import request_rates

    draw = np.random.default_rng(0)
    count = max(4 * job.batch, tests)
    examples = Examples(
        x=draw.random((count, *features), np.float32),
        y=draw.integers(classes, size=count),
        classes=classes,
    )
    learning = table("learner").build(job.learner).build(features, classes)
    model = learning.start(0)
    local = LocalJob(number=1, client="c0", version=0, steps=20, started=0.0)
    settings = settings_of(job)
    tested = examples.rows(np.arange(tests))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        learning.fit(model, examples, local, settings)
        step, _ = least_seconds(lambda: learning.fit(model, examples, local, settings), 7)
        test, _ = least_seconds(lambda: learning.evaluate(model, tested), 5)
    finally:
        torch.set_num_threads(threads)
    request_s, body_s = request_rates()
    return StepRates(step_s=step / local.steps, test_s=test, request_s=request_s, body_s=body_s)


def load_of(slow: Sequence[float], hosts: int, cores: float, other: float) -> float:
    """How many times as long a computation takes where processes share cores.

    A client that is slower than the machine sleeps, so what its neighbours take from it is hidden
    as long as it is less than that.

    Args:
        slow: times as long as the machine that each client takes.
        hosts: processes, to which clients are dealt in turn; one computes for one client at a time.
        cores: that they share.
        other: cores that the server takes.

    Returns:
        1 where each has a core when it computes.
    """
    factors = np.array(slow)
    load = 1.0
    for _ in range(_SETTLE):
        # The share of its time in which each client wants to compute.
        wants = load / np.maximum(factors, load)
        of_host = np.array([wants[at::hosts].sum() for at in range(hosts)])
        running = [*np.minimum(of_host, 1.0), min(other, 1.0)]
        shared = [_slowed(running[:at] + running[at + 1 :], cores) for at in range(hosts)]
        queue = max(1.0, float(of_host.max()))
        load = 0.5 * (load + queue * float(np.average(shared, weights=running[:hosts])))
    return load


def _slowed(others: Sequence[float], cores: float) -> float:
    """Times as long that a process takes beside others that run with these probabilities."""
    chances = np.ones(1)
    for chance in others:
        chances = np.convolve(chances, [1 - chance, chance])
    return float(chances @ np.maximum(1.0, (1 + np.arange(len(chances))) / cores))


def settings_of(job: FederateJob) -> LocalSettings:
    """How the clients of a job learn."""
    return LocalSettings(
        lr=job.lr, momentum=job.momentum, batch=job.batch, prox=job.prox, seed=job.seed
    )


def work_of(
    job: FederateJob,
    samples: tuple[int, ...],
    parameters: int,
    rates: StepRates,
    share_of: Callable[[ClientSpec], float],
    load: float = 1.0,
) -> FederateWork:
    """What the schedulers' candidates and the virtual clock read.

    Args:
        job: the federation.
        samples: examples of each client.
        parameters: of the model.
        rates: of a client without a slow-down.
        share_of: how fast a client's device is, over the one of ``rates``.
        load: times as long that everything takes on a machine that clients share; their own
            slow-down hides it.
    """
    specs = parse_clients(job.clients)
    slow = slow_factors(job.speeds, len(specs), job.slowest, job.seed)
    size = 4.0 * parameters
    compressor = table("update_compressor").build(job.compressor, where="compressor")
    sent = compressor.bits(parameters) / 8
    up, down = (
        {
            spec.name: load * (rates.request_s + nbytes * rates.body_s)
            + (nbytes / spec.bytes_per_s if spec.bytes_per_s else 0.0)
            for spec in specs
        }
        for nbytes in (sent, size)
    )
    clients = tuple(
        ClientInfo(name=spec.name, samples=count)
        for spec, count in zip(specs, samples, strict=True)
    )
    return FederateWork(
        info=FederationInfo(clients=clients, steps=job.steps, seed=job.seed),
        step_s={
            spec.name: rates.step_s * max(factor / share_of(spec), load)
            for spec, factor in zip(specs, slow, strict=True)
        },
        up_s=up,
        down_s=down,
        up_bytes=sent,
        merge_s=size / _MERGE,
        rounds=job.rounds,
    )


def times_of(work: FederateWork, seed: int, jitter: float = 0.0) -> ClientTimes:
    """The same for the virtual clock."""
    return ClientTimes(
        step_s=work.step_s,
        up_s=work.up_s,
        down_s=work.down_s,
        merge_s=work.merge_s,
        jitter=jitter,
        seed=seed,
    )


def machinery(
    job: FederateJob, algorithm: Choice, info: FederationInfo, size: int, exchange: Exchange
) -> Machinery:
    """The parts of a federation, at work.

    Args:
        job: the federation.
        algorithm: its scheduler.
        info: its clients.
        size: parameters of the model.
        exchange: what updates pass through.

    Raises:
        FederationError: they do not fit it.
    """
    scheduler: ClientScheduler = table("client_scheduler").build(algorithm, where="algorithm")
    # A scheduler at work first: rounds are known before their sums.
    scheduling = exchange.scheduling(scheduler.start(info), scheduler, info)
    rule = exchange.rule(rule_of(job, algorithm, scheduler))
    return Machinery(
        scheduling=scheduling,
        rule=guarded(rule, scheduler, exchange.privacy),
        step=table("server_optimizer").build(job.server, where="server").start(size),
        plane=LocalSum(),
    )


def rule_of(job: FederateJob, algorithm: Choice, scheduler: ClientScheduler) -> RobustRule:
    """The rule of a job.

    Raises:
        FederationError: the scheduler does not bring it the updates that it compares.
    """
    rule: RobustRule = table("robust_rule").build(job.robust, where="robust")
    if not rule.linear and not scheduler.needs_majority:
        legal = [name for name, one in _classes("client_scheduler") if one.needs_majority]
        raise FederationError(
            f"robust = {job.robust.name} with algorithm = {algorithm.name}: the rule compares the "
            f"updates of most clients, and {algorithm.name} aggregates fewer; legal with it: "
            f"{', '.join(legal)}"
        )
    return rule


def _classes(kind: str) -> Iterator[tuple[str, Any]]:
    """Names and classes of the parts of a kind."""
    for name in table(kind):
        yield name, table(kind).load(name)


class FederationRehearsal(Value):
    """What a run without learning has shown.

    Args:
        total_s: seconds of the run.
        rounds: of work that was aggregated; the last aggregation may go beyond the end.
        versions: of the model.
        arrived: updates of clients.
        sent: models that clients were sent; those of the last moment are not.
        staleness: mean, in versions.
        idle: share of the clients' time in which they wait for the server.
    """

    total_s: float
    rounds: float
    versions: int
    arrived: int
    sent: int
    staleness: float
    idle: float


def rehearse(job: FederateJob, algorithm: Choice, work: FederateWork) -> FederationRehearsal:
    """Drive a scheduler on the virtual clock until the work of the run is done.

    A long run is driven for a while, and its numbers are those of that while, multiplied.
    """
    wanted = work.rounds * work.info.steps * len(work.info.clients)
    busy = 0.0
    begun: list[float] = []

    def fit(local: LocalJob, _: np.ndarray) -> Lazily:
        nonlocal busy
        busy += times.seconds(local)
        begun.append(local.started)
        return Lazily(lambda: (np.zeros(0, np.float32), 0.0))

    plain = job.model_copy(
        update={
            "robust": Choice(name="mean"), "server": Choice(name="sgd"), "attack": None,
            "attackers": 0, "privacy": None, "secure": False,
        }
    )  # fmt: skip
    names = tuple(client.name for client in work.info.clients)
    times = times_of(work, job.seed)
    coordinator = Coordinator(
        work.info,
        machinery(plain, algorithm, work.info, 0, Exchange(plain, names)),
        np.zeros(0, np.float32),
        lambda *_, **__: None,
    )
    clock = VirtualClock(coordinator, times, fit)
    clock.begin()
    budget = math.inf if job.budget_s is None else job.budget_s
    most = max(_ARRIVALS, _ARRIVALS_EACH * len(names))
    while coordinator.steps < wanted and clock.now <= budget and coordinator.arrived < most:
        if not clock.step():
            break
    times_more = 1.0
    if coordinator.steps < wanted and coordinator.arrived >= most:
        times_more = max(1.0, min(wanted / max(coordinator.steps, 1), budget / clock.now))
    span = clock.now * len(work.info.clients)
    return FederationRehearsal(
        total_s=max(clock.now * times_more, 1e-9),
        rounds=max(coordinator.steps * times_more * work.rounds / wanted, 1e-9),
        versions=round(coordinator.version * times_more),
        arrived=round(coordinator.arrived * times_more),
        sent=round(sum(at < clock.now for at in begun) * times_more),
        staleness=float(np.mean(coordinator.staleness or [0])),
        idle=min(1.0, max(0.0, 1 - busy / span)) if span else 0.0,
    )
