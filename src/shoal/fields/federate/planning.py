"""Plans of a federation: every scheduler in every way it offers, rehearsed on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shoal.core.parts import Choice, table
from shoal.fields.federate.clients import ClientSpec, parse_clients
from shoal.fields.federate.costs import (
    FederationRehearsal,
    StepRates,
    load_of,
    rehearse,
    rule_of,
    step_rates,
    work_of,
)
from shoal.fields.federate.exchange import exchange_of
from shoal.fields.federate.job import FederateJob, FederatePlan
from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.federate.privacy.guard import guarded, pool_of
from shoal.fields.federate.privacy.protocols import PrivacyWork
from shoal.fields.federate.protocols import FederateWork
from shoal.fields.rates import core_share
from shoal.ir import Interval, Machine
from shoal.machine import load

# FLOP/s of the core of a described device whose share is 1.
_CORE = 1e11
# Of the predicted time, where steps were timed here, and where they were derived.
_SPREAD_TIMED, _SPREAD_DERIVED = 0.25, 2.0
# Of bytes, which have headers, and of the accuracy of a pilot.
_SPREAD_BYTES, _SPREAD_ACCURACY = 0.05, 0.05
# A process of a client with torch, and of the server.
_CLIENT_BYTES, _SERVER_BYTES = 2.6e8, 2.5e8


def divided(job: FederateJob) -> tuple[Examples, Examples, list[np.ndarray]]:
    """The examples, those of the test, and the rows of each client.

    Raises:
        ShoalError: the data cannot be read or divided like that.
    """
    train, test = table("example_source").build(job.data, where="data").load(job.seed)
    count = len(parse_clients(job.clients))
    rows = (
        table("partitioner").build(job.partition, where="partition").split(train, count, job.seed)
    )
    return train, test, rows


def device_shares(job: FederateJob, machine: Machine) -> dict[str, float]:
    """How fast a core of each described device is, over one of the machine on which it runs."""
    here = core_share(machine, _CORE)
    return {
        device: core_share(load(device), _CORE) / here if device else 1.0
        for device in {spec.device for spec in parse_clients(job.clients)}
    }


def plan_federate(job: FederateJob, machine: Machine) -> list[FederatePlan]:
    """The ways to do it, the shortest run first; all aggregate the same number of local steps.

    Raises:
        ShoalError: the data cannot be read or divided, or a client's device is unknown.
    """
    train, test, rows = divided(job)
    features = train.x.shape[1:]
    parameters, _ = (
        table("learner").build(job.learner, where="learner").shape(features, train.classes)
    )
    rates = step_rates(job, features, train.classes, len(test), machine)
    shares = device_shares(job, machine)

    def share_of(spec: ClientSpec) -> float:
        return shares[spec.device]

    samples = tuple(map(len, rows))
    work = work_of(job, samples, parameters, rates, share_of)
    known = _Known(
        job=job,
        machine=machine,
        samples=samples,
        parameters=parameters,
        rates=rates,
        share_of=share_of,
    )
    plans = [_plan(known, choice) for choice in _algorithms(job, work, machine)]
    return sorted(plans, key=lambda plan: plan.predicted["total_s"].value)


def _algorithms(job: FederateJob, work: FederateWork, machine: Machine) -> Iterator[Choice]:
    if job.algorithm is not None:
        yield job.algorithm
        return
    rule = table("robust_rule").build(job.robust, where="robust")
    schedulers = table("client_scheduler")
    for choice, _ in schedulers.offered(work, machine):
        if rule.linear or schedulers.load(choice.name).needs_majority:
            yield choice


@dataclass(frozen=True, kw_only=True)
class _Known:
    """What all plans of a job have in common."""

    job: FederateJob
    machine: Machine
    samples: tuple[int, ...]
    parameters: int
    rates: StepRates
    share_of: Callable[[ClientSpec], float]

    def work(self, load: float) -> FederateWork:
        """The work, where everything takes so many times as long."""
        return work_of(self.job, self.samples, self.parameters, self.rates, self.share_of, load)

    def rehearsed(self, algorithm: Choice) -> tuple[FederateWork, FederationRehearsal]:
        """A run without learning; processes on one machine take from each other."""
        work = self.work(1.0)
        run = rehearse(self.job, algorithm, work)
        if self.job.clock == "virtual":
            return work, run
        count, rates = len(self.samples), self.rates
        slow = [seconds / rates.step_s for seconds in work.step_s.values()]
        each = run.versions * rates.test_s + (run.sent + run.arrived) * rates.request_s
        work = self.work(
            load_of(
                slow,
                processes(self.job, count),
                self.machine.device.num_cores or 1,
                min(1.0, each / run.total_s),
            )
        )
        return work, rehearse(self.job, algorithm, work)


def _plan(known: _Known, algorithm: Choice) -> FederatePlan:
    job, machine, samples = known.job, known.machine, known.samples
    work, run = known.rehearsed(algorithm)
    scheduler = table("client_scheduler").build(algorithm, where="algorithm")
    exchange = exchange_of(job, tuple(client.name for client in work.info.clients))
    exchange.scheduling(scheduler.start(work.info), scheduler, work.info)
    rule = rule_of(job, algorithm, scheduler)
    guarded(exchange.rule(rule), scheduler, exchange.privacy)
    measured = known.rates.measured
    spread = _SPREAD_TIMED if measured else _SPREAD_DERIVED
    size = 4.0 * known.parameters
    count = len(samples)
    hosts = processes(job, count)
    memory = _SERVER_BYTES + size * 3 + (hosts * _CLIENT_BYTES if job.clock == "wall" else 0.0)
    capacity = machine.device.main_memory.capacity_bytes
    slowest = max(work.step_s.values()) / min(work.step_s.values())
    notes = [
        "steps timed on this machine" if measured else "steps derived from a description",
    ]
    if slowest > 1.005:
        notes.append(f"the slowest client takes {slowest:.3g} times as long as the fastest")
    if not rule.linear:
        merged = run.arrived // max(run.versions, 1)
        notes.append(
            f"{job.robust.name} covers {rule.covers(merged)} wrong ones of {merged} updates"
        )
    promised: dict[str, Interval] = {}
    if job.privacy is not None:
        privacy = table("privacy").build(job.privacy, where="privacy")
        merged = max(run.arrived // max(run.versions, 1), 1)
        account = PrivacyWork(
            clients=count,
            aggregations=run.versions,
            updates=merged,
            pool=pool_of(scheduler, merged),
        )
        epsilon, allowed = privacy.predict(account)
        promised["epsilon"] = Interval.around(epsilon, 0.1)
        if allowed < run.versions:
            notes.append(
                f"the privacy budget ends it after {allowed} of {run.versions} aggregations"
            )
    if job.secure:
        notes.append("keys, shares and opening of secure aggregation are not in the prediction")
    if job.target is not None:
        notes.append("the run may end sooner, at the target; its rounds are the most it makes")
    plan = FederatePlan(
        job=job.model_copy(update={"algorithm": algorithm}),
        machine=machine,
        predicted={
            "total_s": Interval.around(run.total_s, spread),
            "round_s": Interval.around(run.total_s / run.rounds, spread),
            "up_bytes": Interval.around(run.arrived * work.up_bytes, _SPREAD_BYTES),
            "down_bytes": Interval.around(run.sent * size, _SPREAD_BYTES),
            "staleness": Interval.around(run.staleness, 0.5),
            "idle": Interval.around(run.idle, 0.5) if run.idle else Interval.exact(0.0),
            **promised,
            "memory_bytes": Interval.around(memory, 0.4),
        },
        planner="client schedulers on a virtual clock",
        fits=not capacity or memory <= capacity,
        why=f"{algorithm}: {count} clients, {run.arrived} jobs, {run.versions} versions",
        notes=tuple(notes),
        parameters=known.parameters,
        samples=samples,
    )
    return _with_pilot(plan, work) if job.pilot else plan


def _with_pilot(plan: FederatePlan, work: FederateWork) -> FederatePlan:
    """The plan with what a run with real learning on the virtual clock has reached, and when.

    Raises:
        MissingExtraError: torch is not installed.
    """
    from shoal.fields.federate.execute import pilot

    rows = pilot(plan, work)
    best = max(row["accuracy"] for row in rows)
    predicted = {**plan.predicted, "best_accuracy": Interval.around(best, _SPREAD_ACCURACY)}
    target, note = plan.job.target, f"a pilot on the virtual clock reached {best:.1%}"
    if target is not None:
        reached = next((row["seconds"] for row in rows if row["accuracy"] >= target), None)
        if reached is None:
            note += f", and not the target of {target:.1%}"
        else:
            predicted["target_s"] = Interval.around(reached, _SPREAD_TIMED)
    return plan.model_copy(update={"predicted": predicted, "notes": (*plan.notes, note)})


def processes(job: FederateJob, clients: int) -> int:
    """Processes of clients on the wall clock."""
    return min(job.hosts or 16, clients)
