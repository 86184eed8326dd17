"""Clocks of claim TokenRing: what links carry, by hand; the ring in its place fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.claims.experiments.tokenring import TokenRingClaim, TokenRingSetting, passes
from shoal.claims.judge import judge
from shoal.claims.protocols import ExperimentContext
from shoal.claims.ranks import on_ranks
from shoal.core.errors import ConfigError


def test_passes_take_what_the_busiest_link_carries() -> None:
    setting = TokenRingSetting(tokens=4, heads=8, kv_heads=8, head_dim=16)
    ring = passes("zigzag", setting)
    # Chunks of keys and values make three hops; backward, their gradients make three more.
    assert ring.forward_s == pytest.approx(3 * 2 * setting.chunk_s)
    assert ring.backward_s == pytest.approx(3 * 4 * setting.chunk_s)
    token = passes("tokenring", setting)
    # Queries make three hops, and the last return, with its statistics, takes the link of a hop.
    assert token.forward_s == pytest.approx((3 + 1 + 1 / 16) * setting.chunk_s)
    assert token.backward_s == pytest.approx((3 * (2 + 2 / 16) + 1) * setting.chunk_s)


def test_holds_and_the_ring_in_its_place_does_not(tmp_path: Path) -> None:
    claim, context = TokenRingClaim(tokens=4, head_dim=128), ExperimentContext(work_dir=tmp_path)
    samples = claim.run(context, quick=True)
    baseline = claim.run(context, quick=True, as_baseline=True)
    verdict = judge(claim.metrics, samples, aa=baseline, quick=True)
    assert verdict.status == "modelled", verdict.reason  # without processes
    assert samples.metrics["byte_error"].method == (0.0,) * 12
    assert baseline.metrics["simulated_step"].method == baseline.metrics["simulated_step"].baseline
    assert max(baseline.metrics["byte_error"].method) > 0.1


def test_ranks_time_both_parts_and_blocks() -> None:
    given: dict[str, Any] = {"tokens": 8, "heads": 2, "head_dim": 4, "turns": 2}
    where = "shoal.claims.experiments.tokenring_ranks"
    parts = {"method": "tokenring", "baseline": "zigzag"}
    for rank in on_ranks(f"{where}:attention_s", 2, parts=parts, **given):
        arms = {f"{arm} {passes}" for arm in parts for passes in ("forward", "both")}
        assert set(rank) == arms
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in rank.values())
    assert all(min(one) > 0 for one in on_ranks(f"{where}:blocks_s", 2, **given))


@pytest.mark.parametrize(
    "options", [{"tokens": 3}, {"heads": 12}, {"head_dim": 0}, {"latency": -1.0}]
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"claim\.tokenring\.{next(iter(options))}"):
        TokenRingClaim(**options)
