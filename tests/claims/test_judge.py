"""Verdicts follow from samples and thresholds alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.claims.catalogue import row_of
from shoal.claims.judge import judge, measure
from shoal.claims.protocols import Attempt, ClaimSamples, Metric, PairedSamples
from shoal.core.config import parse
from shoal.core.errors import ConfigError


def metric(**changes: Any) -> Metric:
    given: dict[str, Any] = {
        "name": "gain",
        "unit": "x",
        "statistic": "ratio",
        "comparison": ">=",
        "threshold": 2.0,
        "baseline": "plain",
        "evidence": "mechanism",
    }
    return Metric(**{**given, **changes})


def samples(method: list[float], baseline: list[float] | None = None, **more: Any) -> ClaimSamples:
    return ClaimSamples(
        metrics={"gain": PairedSamples(method=method, baseline=baseline or [])}, **more
    )


GOOD = samples([2.0, 2.2, 2.1], [1.0, 1.0, 1.0])
AA = samples([1.0, 1.0, 1.0], [1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("statistic", "expected"),
    [
        ("ratio", 2.0),
        ("speedup", 0.5),
        ("difference", 4.0),
        ("relative_error", 1.0),
        ("value", 8.0),
        ("mean", 22 / 3),
        ("max", 10.0),
        ("min", 4.0),
    ],
)
def test_statistics_by_hand(statistic: Any, expected: float) -> None:
    paired = PairedSamples(method=(4.0, 8.0, 10.0), baseline=(2.0, 4.0, 2.0))
    result = measure(metric(statistic=statistic), paired)
    assert result.value == pytest.approx(expected)
    assert result.low <= result.value <= result.high


@pytest.mark.parametrize(
    ("evidence", "status"),
    [
        ("same_regime", "works"),
        ("mechanism", "works"),
        ("simulated", "modelled"),
        ("arithmetic", "modelled"),
    ],
)
def test_status_follows_the_grade(evidence: Any, status: str) -> None:
    verdict = judge([metric(evidence=evidence)], GOOD, aa=AA)
    assert (verdict.status, verdict.evidence) == (status, evidence)


def test_evidence_is_that_of_the_weakest_headline() -> None:
    metrics = [
        metric(name="a", evidence="same_regime"),
        metric(name="b", evidence="mechanism"),
        metric(name="c", evidence="arithmetic", check=True),
    ]
    better = dict.fromkeys("abc", PairedSamples(method=(3.0,), baseline=(1.0,)))
    equal = dict.fromkeys("abc", PairedSamples(method=(1.0,), baseline=(1.0,)))
    verdict = judge(metrics, ClaimSamples(metrics=better), aa=ClaimSamples(metrics=equal))
    assert (verdict.status, verdict.evidence) == ("works", "mechanism")
    # A speed-up that is computed makes the claim computed, whatever was run beside it.
    metrics[2] = metric(name="c", evidence="arithmetic")
    verdict = judge(metrics, ClaimSamples(metrics=better), aa=ClaimSamples(metrics=equal))
    assert (verdict.status, verdict.evidence) == ("modelled", "arithmetic")


@pytest.mark.parametrize(
    ("pairs", "status"),
    [
        ([2.1, 2.2, 2.3, 2.4], "works"),
        ([1.9, 1.8, 2.2, 2.3, 2.4], "noisy"),  # 2.2 in the median, 1.8 at the conservative end
        ([1.6, 1.7, 1.8, 1.9], "falls_short"),
    ],
)
def test_the_conservative_end_decides(pairs: list[float], status: str) -> None:
    verdict = judge([metric()], samples(pairs, [1.0] * len(pairs)), aa=AA)
    assert verdict.status == status
    turned = metric(statistic="speedup", comparison="<=", threshold=0.5)
    verdict = judge([turned], samples(pairs, [1.0] * len(pairs)), aa=AA)
    assert verdict.status == status
    inside = metric(comparison="within", threshold=2.0, upper=3.0)
    assert judge([inside], samples(pairs, [1.0] * len(pairs)), aa=AA).status == status


def test_falls_short_says_what_it_owes() -> None:
    short = samples([1.5, 1.4, 1.6], [1.0, 1.0, 1.0])
    verdict = judge([metric()], short, aa=AA)
    assert verdict.status == "falls_short"
    assert verdict.reason == "gain is 1.5, wanted >= 2 x"
    assert len(verdict.missing) == 3
    complete = judge(
        [metric()],
        samples([1.5], [1.0], bounds={"gain": 3.0}, profile="all of it in copying"),
        aa=AA,
        attempts=[Attempt(metric="gain", tried=word, value=1.2) for word in ("wide", "tall")],
    )
    assert complete.missing == ()
    assert complete.metrics[0].share_of_bound == pytest.approx(0.5)


def test_wide_timing_is_noisy_never_a_pass() -> None:
    wide = samples([2.1, 9.0, 4.0, 2.5, 8.0], [1.0] * 5)
    timing = metric(timing=True)
    assert judge([timing], wide, aa=AA).reason.startswith("the interval of gain is wider than")
    assert judge([metric()], wide, aa=AA).status == "works"
    # A sure failure of another metric is reported, noise or not.
    both = ClaimSamples(
        metrics={**wide.metrics, "count": PairedSamples(method=(1.0,), baseline=(1.0,))},
    )
    assert judge([timing, metric(name="count", check=True)], both, aa=AA).status == "falls_short"
    # However wide: no value of the interval meets the threshold.
    missed = samples([0.1, 1.0, 0.5, 1.9, 0.2], [1.0] * 5)
    assert judge([timing], missed, aa=AA).status == "falls_short"


@pytest.mark.parametrize("statistic", ["ratio", "value", "min"])
def test_a_timing_needs_five_samples(statistic: Any) -> None:
    timing = metric(timing=True, statistic=statistic)
    few = judge([timing], samples([3.0] * 4, [1.0] * 4), aa=AA)
    assert (few.status, few.reason) == ("noisy", "gain has 4 of 5 samples; run it again")
    assert judge([timing], samples([3.0] * 5, [1.0] * 5), aa=AA).status == "works"


def test_the_extreme_of_times_is_noisy_where_it_is_one_time_alone() -> None:
    timing = metric(timing=True, statistic="min")
    verdict = judge([timing], samples([2.1, 3.0, 3.0, 3.0, 3.0]), aa=samples([1.0]))
    assert verdict.status == "noisy"
    counted = judge([metric(statistic="min")], samples([2.1, 3.0, 3.0]), aa=samples([1.0]))
    assert counted.status == "works"


def test_noise_of_an_error_is_in_points_not_in_shares_of_the_error() -> None:
    error = metric(statistic="relative_error", comparison="<=", threshold=0.5, timing=True)
    wrong = samples([2.0, 2.0], [1.0, 1.0])
    close = samples([1.01, 1.02, 1.03, 1.04, 1.05], [1.0] * 5)
    assert judge([error], close, aa=wrong).status == "works"
    wide = samples([1.01, 1.4, 1.01, 1.4, 1.2], [1.0] * 5)
    assert judge([error], wide, aa=wrong).status == "noisy"


def test_a_limit_that_is_exceeded_is_wrong() -> None:
    faster = GOOD.model_copy(update={"bounds": {"gain": 1.9}})
    assert judge([metric()], faster, aa=AA).reason == (
        "void: gain is beyond its physical limit of 1.9: the limit is wrong"
    )
    shorter = samples([1.0], [2.0], bounds={"gain": 0.6})
    assert "the limit is wrong" in judge([metric(comparison="<=")], shorter, aa=GOOD).reason
    within = GOOD.model_copy(update={"bounds": {"gain": 2.3}})
    assert judge([metric()], within, aa=AA).metrics[0].share_of_bound == pytest.approx(2.1 / 2.3)


def test_every_headline_must_fail_with_the_baseline_in_its_place() -> None:
    assert judge([metric()], GOOD, aa=GOOD).reason == (
        "void: with plain in its place gain is 2.1, and >= 2 x holds too"
    )
    assert judge([metric()], GOOD, aa=None).status == "skipped"
    assert "has no samples of gain" in judge([metric()], GOOD, aa=ClaimSamples()).reason
    pairs = dict.fromkeys(("gain", "other"), GOOD.metrics["gain"])
    aa = ClaimSamples(metrics={**AA.metrics, "other": GOOD.metrics["gain"]})
    for check, status in ((False, "skipped"), (True, "works")):
        metrics = [metric(), metric(name="other", check=check)]
        assert judge(metrics, ClaimSamples(metrics=pairs), aa=aa).status == status


def test_void_when_our_baseline_is_slower_than_its_peer() -> None:
    peered = metric(peer="numpy", timing=True)
    slow = GOOD.model_copy(
        update={"peers": {"gain": PairedSamples(method=(0.8,), baseline=(1.0,))}}
    )
    fair = GOOD.model_copy(
        update={"peers": {"gain": PairedSamples(method=(0.95,), baseline=(1.0,))}}
    )
    assert "0.80x numpy" in judge([peered], slow, aa=AA).reason
    assert "not run beside numpy" in judge([peered], GOOD, aa=AA).reason
    assert judge([peered], fair, aa=AA).status != "skipped"


def test_a_headline_that_is_skipped_is_no_pass() -> None:
    some = GOOD.model_copy(update={"skipped": {"gpu": "no GPU"}})
    metrics = [metric(), metric(name="gpu", evidence="same_regime", check=True)]
    verdict = judge(metrics, some, aa=AA)
    assert (verdict.status, verdict.skipped) == ("works", {"gpu": "no GPU"})
    metrics[1] = metric(name="gpu", evidence="same_regime")
    verdict = judge(metrics, some, aa=AA)
    assert (verdict.status, verdict.reason) == ("skipped", "gpu: no GPU")
    none = judge([metrics[1]], ClaimSamples(skipped={"gpu": "no GPU"}), aa=None)
    assert (none.status, none.reason) == ("skipped", "no GPU")


def test_checks_alone_must_not_all_hold_in_the_aa_run() -> None:
    """A quick run may have no headline."""
    metrics = [metric(check=True), metric(name="other", check=True)]
    pairs = ClaimSamples(metrics=dict.fromkeys(("gain", "other"), GOOD.metrics["gain"]))
    half = ClaimSamples(metrics={**AA.metrics, "other": GOOD.metrics["gain"]})
    assert judge(metrics, pairs, aa=half).status == "works"
    assert "every check holds too" in judge(metrics, pairs, aa=pairs).reason


def test_quick_judges_counts_only() -> None:
    metrics = [metric(), metric(name="seconds", timing=True)]
    assert judge(metrics, GOOD, aa=AA, quick=True).status == "works"
    with pytest.raises(ConfigError, match="nothing of seconds"):
        judge(metrics, GOOD, aa=AA)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (ClaimSamples(), "nothing of gain"),
        (ClaimSamples(metrics={"gian": PairedSamples(method=(1.0,))}), "did you mean 'gain'"),
        (samples([1.0]), "expected pairs"),
        (samples([1.0], [0.0]), "no zero where samples divide"),
    ],
)
def test_bad_samples(bad: ClaimSamples, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        judge([metric()], bad, aa=AA)


@pytest.mark.parametrize(
    "changes",
    [
        {"comparison": "within"},
        {"upper": 3.0},
        {"comparison": "within", "upper": 1.0},
        {"timing": True, "quick": True},
    ],
)
def test_bad_metric(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="metric gain"):
        metric(**changes)


def test_uneven_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="equally many"):
        PairedSamples(method=(1.0, 2.0), baseline=(1.0,))
    with pytest.raises(ConfigError, match="at least one"):
        PairedSamples(method=())


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=1, max_size=20),
    st.sampled_from([">=", "<="]),
)
def test_verdict_is_a_function_of_the_samples(pairs: list[tuple[float, float]], how: Any) -> None:
    claimed = metric(comparison=how)
    seen = samples([a for a, _ in pairs], [b for _, b in pairs])
    first, second = (judge([claimed], seen, aa=AA) for _ in range(2))
    assert first == second
    one = first.metrics[0]
    assert one.low <= one.value <= one.high
    assert one.holds == (claimed.holds(one.low) and claimed.holds(one.high))
    assert one.noisy == (claimed.holds(one.low) != claimed.holds(one.high))
    assert math.isfinite(one.value)


@pytest.mark.parametrize(
    ("wants", "expected"),
    [
        (">= 1.5 x", {"comparison": ">=", "threshold": 1.5, "unit": "x"}),
        ("<= 0", {"comparison": "<=", "threshold": 0.0, "unit": "1"}),
        ("0.9 .. 1.1 x", {"comparison": "within", "threshold": 0.9, "upper": 1.1, "unit": "x"}),
        ("<= -1e-06 nats a byte", {"threshold": -1e-6, "unit": "nats a byte"}),
    ],
)
def test_a_threshold_as_people_write_it(wants: str, expected: dict[str, object]) -> None:
    stated = {"name": "a", "statistic": "value", "baseline": "b", "evidence": "mechanism"}
    result = Metric.model_validate({**stated, "wants": wants})
    assert expected.items() <= result.model_dump().items()
    assert result.condition == wants


@pytest.mark.parametrize("wants", ["1.5 x", "> 1", ">= much", "1 .. x", "", None, 3])
def test_a_threshold_that_cannot_be_read(wants: object) -> None:
    stated = {"name": "a", "statistic": "value", "baseline": "b", "evidence": "mechanism"}
    with pytest.raises(ConfigError, match=r"metric a: wants = .*expected such as"):
        parse(Metric, {**stated, "wants": wants}, where="catalogue.yaml")


def test_a_row_that_is_not_there() -> None:
    with pytest.raises(
        ConfigError, match=r"row 146: not in catalogue\.yaml; its rows are 0 to 145"
    ):
        row_of(146)
