"""Measuring: pairs, intervals and noise, on a virtual clock."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import measure
from shoal.core.errors import ConfigError, NoisyMachineError
from shoal.core.measure import PairedTimes, bootstrap, check_quiet, interleave, noise_reasons
from shoal.core.random import generator


class Clock:
    """A clock that only the methods under test move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pairs_are_interleaved_and_every_method_runs_equally_often() -> None:
    clock = Clock()
    calls: list[str] = []

    def timed(name: str, seconds: float) -> Callable[[], object]:
        def run() -> None:
            calls.append(name)
            clock.now += seconds

        return run

    methods = {name: timed(name, seconds) for name, seconds in (("a", 2.0), ("b", 1.0), ("c", 4.0))}
    said: list[float] = []
    paired = interleave(
        methods, pairs=12, warmup=1, clock=clock, progress=lambda _, done: said.append(done)
    )
    assert len(calls) == 3 * 13
    rounds = [tuple(calls[start : start + 3]) for start in range(3, 39, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in rounds)
    assert len(set(rounds)) > 1  # not always the same order
    assert paired.order == tuple(rounds)
    assert said[-1] == 1.0
    ratio = paired.ratio("a", "b")
    assert (ratio.value, ratio.low, ratio.high, ratio.half_width) == (2.0, 2.0, 2.0, 0.0)
    assert paired.median("c").value == 4.0


def test_ratio_is_of_pairs_so_slow_drift_cancels() -> None:
    drift = np.linspace(1, 100, 15)
    paired = PairedTimes({"a": tuple(3 * drift), "b": tuple(drift)})
    assert paired.ratio("a", "b").value == pytest.approx(3)
    assert paired.ratio("a", "b").half_width < 1e-9


def test_bootstrap_covers_the_true_median() -> None:
    """90 % intervals of 300 samples from a known distribution hold its median about so often."""
    hits = 0
    for trial in range(300):
        values = generator(5, purpose="coverage", index=trial).exponential(size=41)
        spread = bootstrap(values, seed=trial, resamples=400)
        hits += spread.low <= np.log(2) <= spread.high
    assert 0.84 <= hits / 300 <= 0.96


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(0, 5))
def test_bootstrap_is_ordered_and_repeatable(values: list[float], seed: int) -> None:
    spread = bootstrap(values, seed=seed, resamples=50)
    assert spread.low <= spread.value <= spread.high
    assert min(values) <= spread.low
    assert spread.high <= max(values)
    assert spread == bootstrap(values, seed=seed, resamples=50)


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match=r"measure\.samples"):
        bootstrap([])
    with pytest.raises(ConfigError, match=r"measure\.methods"):
        interleave({})
    with pytest.raises(ConfigError, match=r"measure\.pairs"):
        interleave({"a": lambda: None}, pairs=0)
    with pytest.raises(ConfigError, match="expected one of a, b"):
        PairedTimes({"a": (1.0,), "b": (1.0,)}).ratio("a", "c")


def quiet(monkeypatch: pytest.MonkeyPatch, *, busy: float = 0.0, steal: float = 0.0) -> None:
    """Two cores over one window of 100 ticks each; shares of it are busy or stolen."""
    times = iter(
        [
            measure._CpuTimes(total=0.0, busy=0.0, steal=0.0, num_cores=2),
            measure._CpuTimes(total=200.0, busy=200 * busy, steal=200 * steal, num_cores=2),
        ]
    )
    monkeypatch.setattr(measure, "_cpu_times", lambda: next(times))
    monkeypatch.setattr(measure, "_own_seconds", lambda: 0.0)


def test_quiet_machine_has_no_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch, busy=0.1)
    assert noise_reasons(spin=lambda: 1.0, window_s=0.0) == []


def test_each_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch, busy=0.9, steal=0.1)
    laps = iter([1.0, 1.5] * 8)
    reasons = noise_reasons(spin=lambda: next(laps), window_s=1e-6)
    expected = ("other processes keep 1.8 of 2", "hypervisor", "fixed loop")
    assert len(reasons) == 3
    assert all(word in reason for word, reason in zip(expected, reasons, strict=True))


def test_own_work_is_not_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet(monkeypatch, busy=0.5)
    own = iter([0.0, 1e-6])
    monkeypatch.setattr(measure, "_own_seconds", lambda: next(own))
    assert noise_reasons(spin=lambda: 1.0, window_s=1e-6) == []


def test_check_quiet_waits_and_then_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([["busy"], ["busy"], []])
    monkeypatch.setattr(measure, "noise_reasons", lambda: next(answers))
    seen: list[tuple[str, float]] = []
    check_quiet(wait_s=60, poll_s=0.001, waiting=lambda why, left: seen.append((why, left)))
    assert [why for why, _ in seen] == ["busy", "busy"]
    assert 60 >= seen[0][1] > seen[1][1] > 0
    monkeypatch.setattr(measure, "noise_reasons", lambda: ["a compiler runs"])
    with pytest.raises(NoisyMachineError, match=r"a compiler runs; .*later, or give --anyway$"):
        check_quiet(hint="give --anyway")


def test_real_machine_can_be_looked_at() -> None:
    assert isinstance(noise_reasons(window_s=0.01), list)
    assert measure.num_cores() >= 1


def test_work_of_others_is_told_from_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = measure._TICKS
    times = {"now": measure._CpuTimes(1000.0, 500.0, 0.0, 2), "own": 10.0}
    monkeypatch.setattr(measure, "_cpu_times", lambda: times["now"])
    monkeypatch.setattr(measure, "_own_seconds", lambda: times["own"])
    look = measure.BackgroundLoad()
    times["now"] = measure._CpuTimes(1000.0 + 2 * ticks, 500.0 + 1.5 * ticks, 0.1 * ticks, 2)
    times["own"] = 11.0
    # Of two processor seconds 1.5 were busy, 1.0 of them ours, and 0.1 stolen.
    assert look.share() == pytest.approx(0.3)
    monkeypatch.setattr(measure, "_cpu_times", lambda: None)
    assert measure.BackgroundLoad().share() == 0.0


def test_children_are_not_others() -> None:
    look = measure.BackgroundLoad([os.getpid(), 2**30])
    assert look._own_ticks() >= measure._own_seconds() * measure._TICKS
