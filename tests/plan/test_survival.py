"""Survival against brute force and simulation; intervals against their theory."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import ConfigError
from shoal.plan.memory.survival import SaveLevel, Survival, lost_share, sampled


@given(st.integers(1, 6), st.integers(0, 5), st.floats(1.0, 1e4), st.floats(0.5, 3.0))
def test_a_group_is_the_sum_over_all_outcomes(
    group: int, losses: int, hours: float, shape: float
) -> None:
    losses = min(losses, group - 1)
    job = Survival(nodes=2 * group, group=group, losses=losses, mtbf_h=1000.0, shape=shape)
    alive = job.node(hours)
    total = sum(
        math.prod(alive if up else 1 - alive for up in outcome)
        for outcome in itertools.product((True, False), repeat=group)
        if outcome.count(False) <= losses
    )
    assert job.of_group(hours) == pytest.approx(total, rel=1e-9, abs=1e-12)
    assert job.of_job(hours) == pytest.approx(total**2, rel=1e-9, abs=1e-12)
    assert job.uncoded(hours) <= job.of_job(hours) + 1e-12


def test_one_loss_is_the_papers_formula() -> None:
    job = Survival(nodes=64, group=4, mtbf_h=2000.0, shape=0.8)
    r, n = job.node(100.0), 4
    assert job.of_group(100.0) == pytest.approx(r**n + n * r ** (n - 1) * (1 - r))
    assert job.uncoded(100.0) == pytest.approx(r**64)


def test_the_mean_life_is_the_mean_life() -> None:
    for shape in (0.7, 1.0, 2.5):
        job = Survival(nodes=1, group=1, losses=0, mtbf_h=10.0, shape=shape)
        hours = [0.01 * i for i in range(60_000)]
        mean = sum(0.01 * job.node(hour) for hour in hours)  # the integral of survival
        assert mean == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize(("shape", "losses"), [(1.0, 1), (0.7, 0), (1.5, 2)])
def test_simulated_jobs_agree(shape: float, losses: int) -> None:
    job = Survival(nodes=64, group=8, losses=losses, mtbf_h=10_000.0, shape=shape)
    hours = 150.0
    assert sampled(job, hours, trials=40_000, seed=1) == pytest.approx(job.of_job(hours), abs=0.01)
    assert sampled(job, hours, trials=500, seed=1) == sampled(job, hours, trials=500, seed=1)


def test_what_is_lost_is_never_more_than_all() -> None:
    assert lost_share(1.0, 5.0, 2.0, 3.0) == 1.0


def test_memory_loses_less_than_storage() -> None:
    job = Survival(nodes=64, group=4)
    mtbf_s = 3600 * job.job_mtbf_h
    storage = SaveLevel.storage(30.0, mtbf_s, 360.0)
    memory = SaveLevel.memory(0.1, 10.0, job, 0.1, 60.0, (30.0, 360.0))
    assert memory.interval_s >= 10.0
    assert memory.lost < storage.lost / 3


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"survival\.nodes = 6: expected a multiple of the group"):
        Survival(nodes=6, group=4)
    with pytest.raises(ConfigError, match=r"survival\.losses = 4: expected 0 to 3"):
        Survival(nodes=8, group=4, losses=4)
    with pytest.raises(ConfigError, match=r"survival\.mtbf_h"):
        Survival(nodes=8, group=4, mtbf_h=0)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from shoal.app.cli import app

    done = CliRunner().invoke(
        app,
        ["explain", "survival", "--nodes", "16", "--group", "4", "--trials", "2000", "-o", "json"],
    )
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["chances"]["job, simulated"] == pytest.approx(data["chances"]["job"], abs=0.02)
    assert [one["name"] for one in data["levels"]] == ["memory", "storage"]
    shown = CliRunner().invoke(app, ["explain", "survival", "--trials", "0"])
    assert "job, no code" in shown.stdout
    assert "simulated" not in shown.stdout
