"""Closed forms beside the simulator: the mean over 100,000 equal prompts, within 3 %."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.cost.serving.fleet import SimulatedInstance, simulate_fleet
from shoal.cost.serving.queueing import busy_share, md1_ttft
from shoal.ir import Arrival, SchedulerLimits
from shoal.plan.batching.dispatch import LeastLoadedDispatcher


class Constant:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def seconds(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self._seconds


def mean_ttft(rate: float, service: float, *, stages: int = 1, count: int = 100_000) -> float:
    kv = table("kv").build({"name": "paged", "prefix_reuse": False}).build(1 << 14)
    limits = SchedulerLimits(max_running=1 << 14, max_step_tokens=1, max_position=64)
    built: Any = table("phase").build({"name": "prefill", "batch_tokens": 1}).build(kv, limits)
    gaps = generator(3, purpose="queueing").exponential(1 / rate, count)
    arrivals = [Arrival(float(at), (1,), 1) for at in np.cumsum(gaps)]
    front = SimulatedInstance(built, Constant(service), stages)
    seen = simulate_fleet([front], [], LeastLoadedDispatcher(1), arrivals)
    return float(np.mean([one.ttft for one in seen.served]))


@pytest.mark.slow
def test_one_device() -> None:
    assert mean_ttft(0.7, 1.0) == pytest.approx(md1_ttft(0.7, 1.0), rel=0.03)


@pytest.mark.slow
def test_two_stages() -> None:
    # Beyond what one device could compute: D + R D^2 / (4 (2 - R D)) of DistServe, equation 3.
    assert mean_ttft(1.4, 1.0, stages=2) == pytest.approx(1 + 1.4 / (4 * 0.6), rel=0.03)


@pytest.mark.slow
def test_two_devices_that_share_layers() -> None:
    # D / K + R D^2 / (2 K (K - R D)) of DistServe, equation 2, with K = 1.5.
    assert mean_ttft(1.0, 1.0 / 1.5) == pytest.approx(1 / 1.5 + 1 / (3 * 0.5), rel=0.03)


def test_the_closed_form_by_hand() -> None:
    assert md1_ttft(0.5, 1.0) == pytest.approx(1 + 0.5 / (2 * 0.5))


def test_what_has_no_mean() -> None:
    with pytest.raises(ConfigError, match=r"less than 2 a second, all that one device can compute"):
        md1_ttft(2.0, 0.5)
    with pytest.raises(ConfigError, match="the queue grows without end"):
        md1_ttft(1.5, 1.0)
    with pytest.raises(ConfigError, match="service"):
        md1_ttft(0.5, 0.0)


@pytest.mark.slow
def test_the_busy_share_is_where_the_wanted_share_waits_long_enough() -> None:
    service, target = 0.01, 0.06
    kv = table("kv").build({"name": "paged", "prefix_reuse": False}).build(1 << 14)
    limits = SchedulerLimits(max_running=1 << 14, max_step_tokens=1, max_position=64)
    built: Any = table("phase").build({"name": "prefill", "batch_tokens": 1}).build(kv, limits)
    rate = busy_share(service, [target - service], 0.9) / service
    gaps = generator(3, purpose="queueing").exponential(1 / rate, 20_000)
    arrivals = [Arrival(float(at), (1,), 1) for at in np.cumsum(gaps)]
    seen = simulate_fleet(
        [SimulatedInstance(built, Constant(service))], [], LeastLoadedDispatcher(1), arrivals
    )
    in_time = np.mean([one.ttft <= target for one in seen.served])
    assert 0.87 < in_time < 0.93


def test_the_busy_share_of_targets_that_nobody_or_everybody_meets() -> None:
    assert busy_share(0.01, [-0.001] * 10, 0.9) == 0
    assert busy_share(0.01, [1e9] * 9 + [-1.0], 0.9) == pytest.approx(1)
    with pytest.raises(ConfigError, match=r"queue\.service"):
        busy_share(0.0, [1.0], 0.9)
