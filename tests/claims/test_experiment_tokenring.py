"""Clocks of claim TokenRing: what links carry, by hand; the ring in its place fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.claims.experiments.tokenring import TokenRingClaim, TokenRingSetting, passes
from shoal.claims.judge import judge
from shoal.claims.protocols import ExperimentContext
from shoal.core.errors import ConfigError


def test_passes_take_what_the_busiest_link_carries() -> None:
    setting = TokenRingSetting(tokens=4, heads=8, kv_heads=8, head_dim=16)
    ring = passes("zigzag", setting)
    # Chunks of keys and values make three hops; backward, their gradients make three more.
    assert ring.forward_s == pytest.approx(3 * 2 * setting.chunk_s)
    assert ring.backward_s == pytest.approx(3 * 4 * setting.chunk_s)
    token = passes("tokenring", setting)
    # Queries make three hops, and the last return takes the link of a hop; every return waits
    # for the one before, so that three statistics are seen.
    assert token.forward_s == pytest.approx((3 + 1 + 3 / 16) * setting.chunk_s)
    assert token.backward_s == pytest.approx((3 * (2 + 2 / 16) + 1) * setting.chunk_s)


def test_holds_and_the_ring_in_its_place_does_not(tmp_path: Path) -> None:
    claim, context = TokenRingClaim(tokens=4, head_dim=128), ExperimentContext(work_dir=tmp_path)
    samples = claim.run(context, quick=True)
    baseline = claim.run(context, quick=True, as_baseline=True)
    verdict = judge(claim.metrics, samples, aa=baseline, quick=True)
    assert verdict.status == "works", verdict.reason
    assert samples.metrics["byte_error"].method == (0.0,) * 12
    assert baseline.metrics["step_speedup"].method == baseline.metrics["step_speedup"].baseline
    assert max(baseline.metrics["byte_error"].method) > 0.1


@pytest.mark.parametrize(
    "options", [{"tokens": 3}, {"heads": 12}, {"head_dim": 0}, {"latency": -1.0}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"claim\.tokenring\.{next(iter(options))}"):
        TokenRingClaim(**options)
