"""The interval between saves: the least loss, found by trying all, and failures from events."""

from __future__ import annotations

import pytest

from shoal.checkpoint.interval import choose, failures_seen
from shoal.core.errors import ConfigError


def test_what_is_chosen_follows_what_was_seen() -> None:
    calm = choose(stall_s=1.0, step_s=0.5, failures=0, observed_s=86_400.0)
    rough = choose(stall_s=1.0, step_s=0.5, failures=20, observed_s=86_400.0)
    cheap = choose(stall_s=0.01, step_s=0.5, failures=20, observed_s=86_400.0)
    assert cheap.steps < rough.steps < calm.steps
    assert rough.mtbf_s == pytest.approx(1.5 * 86_400.0 / 20.5)
    assert rough.seconds == rough.steps * 0.5
    assert choose(stall_s=0.0, step_s=1e4, failures=9, observed_s=1.0).steps == 1


def test_a_start_after_nothing_but_steps_follows_a_failure() -> None:
    kinds = ["start", "step", "start", "step", "stop", "start", "step", "end"]
    events = [{"kind": kind, "time": 10.0 * n} for n, kind in enumerate(kinds)]
    failures, seconds = failures_seen(events)
    assert failures == 1
    assert seconds == 50.0, "the time between two starts is not the run's"


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="step_s"):
        choose(stall_s=1.0, step_s=0.0, failures=0, observed_s=1.0)
