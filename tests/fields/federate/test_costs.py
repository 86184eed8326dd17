"""What shared cores cost, and that a rehearsal is the run that it stands for."""

from __future__ import annotations

import pytest

from shoal.fields.federate import costs
from shoal.fields.federate.costs import load_of
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.kind import FederateKind
from shoal.fields.running import run_here
from shoal.machine import load
from shoal.machine.fingerprint import fingerprint


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_HOME", str(tmp_path / "home"))


def test_processes_that_always_compute_share_the_cores():
    assert load_of([1.0] * 6, 6, 2, 0.0) == pytest.approx(3.0, rel=1e-6)
    assert load_of([1.0] * 6, 6, 6, 0.0) == pytest.approx(1.0)
    # Two processes with three clients each: one at a time, on a core each.
    assert load_of([1.0] * 6, 2, 4, 0.0) == pytest.approx(3.0, rel=1e-6)
    # The server takes one of two cores.
    assert load_of([1.0] * 2, 2, 2, 1.0) == pytest.approx(1.5, rel=1e-6)


def test_a_client_that_sleeps_hides_what_its_neighbours_take():
    """Two that want half of a core each leave it no rest, and take twice as long in their sleep."""
    assert load_of([2.0, 2.0], 2, 1, 0.0) == pytest.approx(2.0, rel=0.02)
    assert load_of([100.0] * 5, 5, 2, 0.0) == pytest.approx(1.0, abs=1e-3)
    slow, quick = load_of([3.0] * 5, 5, 2, 0.0), load_of([1.5] * 5, 5, 2, 0.0)
    assert 1.0 < slow < quick < 2.5


@pytest.mark.parametrize("algorithm", ["fedavg", "tiered", "fedasync", "fedbuff", "fedcompass"])
def test_a_virtual_run_takes_what_its_plan_says(algorithm, tmp_path):
    job = FederateJob(
        data="wine", learner="logistic", clients="3@20Mbit+1@1Mbit", speeds="normal", rounds=5,
        steps=5, clock="virtual", algorithm=algorithm,
    )  # fmt: skip
    plan = FederateKind().plan(job, load("laptop"))[0]
    report = run_here(plan, tmp_path / "run", FederateKind().work(plan))
    for name in ("total_s", "round_s", "up_bytes", "staleness"):
        assert report.measured[name] == pytest.approx(plan.predicted[name].value, rel=1e-6), name


@pytest.mark.slow
def test_rates_of_this_machine_are_timed_and_kept(tmp_path):
    machine = load("laptop").model_copy(update={"fingerprint": fingerprint()})
    job = FederateJob(data="wine", learner="logistic", clients="2", rounds=2)
    first = FederateKind().plan(job, machine)[0]
    assert "steps timed on this machine" in first.notes
    assert (tmp_path / "home" / "federate.json").exists()
    assert FederateKind().plan(job, machine)[0] == first


@pytest.mark.parametrize("algorithm", ["fedavg", "fedasync", "fedcompass"])
@pytest.mark.parametrize("budget_s", [None, 20.0])
def test_a_long_run_is_planned_from_its_beginning(algorithm, budget_s, monkeypatch):
    job = FederateJob(
        data="wine", learner="logistic", clients="4@20Mbit", speeds="normal", rounds=600,
        clock="virtual", algorithm=algorithm, budget_s=budget_s,
    )  # fmt: skip
    whole = FederateKind().plan(job, load("laptop"))[0].predicted
    monkeypatch.setattr(costs, "_ARRIVALS", 400)
    begun = FederateKind().plan(job, load("laptop"))[0].predicted
    for name in ("total_s", "up_bytes", "down_bytes"):
        assert begun[name].value == pytest.approx(whole[name].value, rel=0.05), name
