"""Weak and strong efficiency of a training job, predicted."""

from __future__ import annotations

import pytest

from shoal.core.errors import ConfigError
from shoal.core.parts import Choice
from shoal.cost.scaling_reports import scaling_report
from shoal.ir import Parallel, TrainJob
from shoal.machine.described import load

JOB = TrainJob(
    model="Llama-3-8B",
    seq_len=2048,
    global_batch=64,
    microbatch=1,
    parallel=Parallel(dp=1, tp=8),
    shard=Choice(name="zero1"),
)


def test_weak_keeps_the_batch_of_a_replica() -> None:
    result = scaling_report(JOB, load("8xH100"), (1, 2, 4), kind="weak")
    assert [p.global_batch for p in result] == [64, 128, 256]
    assert [p.devices for p in result] == [8, 16, 32]
    assert result[0].efficiency == 1.0
    for point in result:
        assert point.efficiency == pytest.approx(result[0].step_s / point.step_s)


def test_strong_keeps_the_batch() -> None:
    result = scaling_report(JOB, load("8xH100"), (1, 2, 8), kind="strong")
    assert {p.global_batch for p in result} == {64}
    for point in result:
        speedup = result[0].step_s / point.step_s
        assert point.efficiency == pytest.approx(speedup * result[0].devices / point.devices)
        assert point.efficiency <= 1.001
    assert result[-1].efficiency < result[1].efficiency


def test_bad_input() -> None:
    machine = load("8xH100")
    with pytest.raises(ConfigError, match=r"scaling\.replicas"):
        scaling_report(JOB, machine, (), kind="weak")
    with pytest.raises(ConfigError, match=r"scaling\.replicas = 3"):
        scaling_report(JOB, machine, (1, 3), kind="strong")
