"""Runs with processes and sockets: predictions, clients that die, the pilot."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter

import numpy as np
import pytest

from shoal.core.meter import read_events
from shoal.fields.federate import hosts
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.kind import FederateKind
from shoal.fields.federate.protocols import FederationError
from shoal.fields.running import run_here
from shoal.machine import load
from shoal.machine.fingerprint import fingerprint

pytestmark = [pytest.mark.slow, pytest.mark.multi]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))


def here():
    """A machine with the cores and the processor of this one, so that its rates are timed."""
    machine = load("laptop")
    device = machine.device.model_copy(update={"num_cores": len(os.sched_getaffinity(0))})
    return machine.model_copy(update={"device": device, "fingerprint": fingerprint()})


def run(job, directory):
    plan = FederateKind().plan(job, here())[0]
    return run_here(plan, directory, FederateKind().work(plan))


class Killer(threading.Thread):
    """Kills a client's process now and then, once the run has begun."""

    def __init__(self, events, every_s, times):
        super().__init__(daemon=True)
        self.events, self.every_s, self.times = events, every_s, times
        self.killed, self.made = 0, []
        self.halt = threading.Event()

    def run(self):
        draw = np.random.default_rng(0)
        while not (self.events.exists() and '"assign"' in self.events.read_text()):
            if self.halt.wait(0.2):
                return
        while self.killed < self.times and not self.halt.wait(self.every_s):
            living = [one for one in self.made if one.poll() is None]
            if living:
                living[draw.integers(len(living))].send_signal(signal.SIGKILL)
                self.killed += 1


def with_deaths(job, directory, monkeypatch, every_s, times):
    killer, start = Killer(directory / "events.jsonl", every_s, times), hosts.children.start

    def started(*words, **options):
        process = start(*words, **options)
        killer.made.append(process)
        return process

    monkeypatch.setattr(hosts.children, "start", started)
    killer.start()
    try:
        report = run(job, directory)
    finally:
        killer.halt.set()
        killer.join()
        monkeypatch.setattr(hosts.children, "start", start)
    events = list(read_events(directory / "events.jsonl"))
    used = [one for event in events if event["kind"] == "aggregate" for one in event["numbers"]]
    assert len(used) == len(set(used)), "an update was counted twice"
    assert killer.killed > 0
    assert any(event["kind"] == "leave" for event in events)
    return report


JOB = {
    "data": "digits", "partition": {"name": "dirichlet", "alpha": 1.0}, "learner": "logistic",
    "clients": "3", "algorithm": "fedcompass", "speeds": (20.0, 30.0, 60.0), "lr": 0.5,
}  # fmt: skip


def test_a_client_that_dies_is_started_again(tmp_path, monkeypatch):
    job = FederateJob(**JOB, rounds=60, restarts=4)
    report = with_deaths(job, tmp_path / "run", monkeypatch, 3.0, 3)
    assert 1 <= report.details["restarted"] <= 3
    assert report.measured["accuracy"] > 0.8


def test_when_all_are_given_up_the_run_says_why(tmp_path, monkeypatch):
    job = FederateJob(**{**JOB, "clients": "1", "speeds": "equal"}, rounds=100_000, restarts=0)
    with pytest.raises(FederationError, match="all processes of clients have ended"):
        with_deaths(job, tmp_path / "run", monkeypatch, 4.0, 1)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_client_killed_every_five_seconds_for_two_minutes(tmp_path, monkeypatch):
    """The run ends, nothing is counted twice, and the loss is one that seeds could give."""
    job = {**JOB, "rounds": 100_000, "budget_s": 125.0, "restarts": 40}
    report = with_deaths(FederateJob(**job), tmp_path / "run", monkeypatch, 5.0, 24)
    assert report.details["restarted"] >= 12
    work = report.details["curve"][-1]["steps"]
    rounds = max(1, round(work / (20 * 3)))
    losses = [
        run(
            FederateJob(**{**JOB, "clock": "virtual", "rounds": rounds, "seed": seed}),
            tmp_path / f"seed-{seed}",
        ).measured["loss"]
        for seed in range(5)
    ]
    # The held-out examples differ from seed to seed, and so do the losses.
    low, high = min(losses), max(losses)
    assert low - (high - low) <= report.measured["loss"] <= high + (high - low)


def test_the_bytes_are_those_that_were_predicted(tmp_path):
    """The seconds of a round are a row of ``benchmarks/federate.py``."""
    same = {"clients": "4@20Mbit", "rounds": 6, "learner": "cnn_digits"}
    report = run(FederateJob(**same, algorithm="fedavg"), tmp_path / "fedavg")
    for name in ("up_bytes", "down_bytes"):
        said = report.plan.predicted[name].value
        assert report.measured[name] == pytest.approx(said, rel=0.01)
    update = report.plan.predicted["up_bytes"].value / (4 * 6)
    # How many updates come where nobody waits for all depends on how fast this machine is.
    job = FederateJob(**same, algorithm="fedcompass", speeds=(4.0, 6.0, 9.0, 16.0))
    report = run(job, tmp_path / "fedcompass")
    counts = Counter(one["kind"] for one in read_events(tmp_path / "fedcompass" / "events.jsonl"))
    assert report.plan.predicted["up_bytes"].value % update == pytest.approx(0)
    assert report.measured["up_bytes"] == pytest.approx(counts["arrive"] * update, rel=0.01)
    sent = report.measured["down_bytes"] / update
    assert 0.99 * counts["arrive"] <= sent <= 1.01 * counts["assign"]


def test_a_pilot_predicts_the_time_to_a_target_that_is_reached():
    job = FederateJob(
        clients="3", learner="logistic", lr=0.5, speeds=(10.0, 20.0, 30.0), algorithm="fedavg",
        target=0.85, rounds=60, pilot=True,
    )  # fmt: skip
    plan = FederateKind().plan(job, here())[0]
    assert 0 < plan.predicted["target_s"].value < plan.predicted["total_s"].value
    missed = FederateKind().plan(job.model_copy(update={"target": 0.999}), here())[0]
    assert "target_s" not in missed.predicted
    assert "not the target" in missed.notes[-1]
