"""Differential privacy: what is sent, what is released, and what it is said to cost."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.special import erfc

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.fields.federate.aggregate.mean import Mean
from shoal.fields.federate.exchange import Exchange
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.kind import FederateKind
from shoal.fields.federate.privacy.dp import DifferentialPrivacy, DpState
from shoal.fields.federate.privacy.guard import GuardedRule, guarded, pool_of
from shoal.fields.federate.privacy.protocols import PrivacyWork
from shoal.fields.federate.protocols import Arrived, FederationError, LocalJob
from shoal.fields.federate.schedule.fedasync import FedAsync
from shoal.fields.federate.schedule.fedavg import FedAvg
from shoal.machine import load

pytest.importorskip("dp_accounting")

NAMES = tuple(f"c{at}" for at in range(10))
SIZE = 20_000


def local(client: str = "c0", number: int = 1) -> LocalJob:
    return LocalJob(number=number, client=client, version=0, steps=1, started=0.0)


def arrived(deltas: list[np.ndarray], weights: list[float] | None = None) -> Arrived:
    given = weights or [1 / len(deltas)] * len(deltas)
    jobs = [local(NAMES[at], at) for at in range(len(deltas))]
    return Arrived(deltas=deltas, weights=np.array(given), jobs=jobs)


def state(**options: Any) -> DpState:
    return DifferentialPrivacy(repeatable=True, **options).start(NAMES, 0)


def long(length: float) -> np.ndarray:
    one = generator(4).standard_normal(SIZE).astype(np.float32)
    return one * np.float32(length / np.linalg.norm(one))


def work(aggregations: int = 10, updates: int = 10, pool: int = 10) -> PrivacyWork:
    return PrivacyWork(clients=10, aggregations=aggregations, updates=updates, pool=pool)


def test_updates_are_shortened_but_not_turned() -> None:
    short, far = long(0.5), long(70.0)
    assert (state(clip=1.0).bound(short) == short).all()
    bounded = state(clip=1.0).bound(far)
    assert 0.999 < np.linalg.norm(bounded.astype(np.float64)) <= 1.0
    assert bounded == pytest.approx(far / 70, abs=1e-6)


def test_the_server_adds_noise_for_the_largest_weight() -> None:
    given = arrived([np.zeros(SIZE, np.float32)] * 3, [0.5, 0.3, 0.2])
    released = state(clip=2.0, noise=1.5).release(np.zeros(SIZE, np.float32), given, 3)
    assert released.std() == pytest.approx(1.5 * 2.0 * 0.5, rel=0.03)
    assert released.dtype == np.float32


def test_noise_of_clients_adds_up_to_that_of_the_server() -> None:
    one = state(clip=2.0, noise=1.5, by="clients")
    zero = np.zeros(SIZE, np.float32)
    sent = [one.share(zero, local(name, at)) for at, name in enumerate(NAMES)]
    assert np.mean(sent, axis=0).std() == pytest.approx(1.5 * 2.0 / len(NAMES), rel=0.03)
    assert one.bound(long(9.0)) == pytest.approx(long(9.0))
    assert np.linalg.norm(state(by="clients", noise=1e-9).share(long(9.0), local())) <= 1.0001


def test_noise_is_never_the_same_unless_it_is_to_be_repeated() -> None:
    zero, given = np.zeros(8, np.float32), arrived([np.zeros(8, np.float32)])
    secret = [DifferentialPrivacy().start(NAMES, 0).release(zero, given, 1) for _ in "ab"]
    assert (secret[0] != secret[1]).all()
    again = [state().release(zero, given, 1) for _ in "ab"]
    assert (again[0] == again[1]).all()
    one = state()
    assert (one.release(zero, given, 1) != one.release(zero, given, 1)).all()


def exact(strength: float, epsilon: float) -> float:
    """Delta of a normal mechanism: Balle and Wang, 2018, theorem 8."""

    def below(x: float) -> float:
        return float(0.5 * erfc(-x / math.sqrt(2)))

    a, b = 1 / (2 * strength), epsilon * strength
    return below(a - b) - math.exp(epsilon) * below(-a - b)


@pytest.mark.parametrize("noise", [2.0, 8.0])
@pytest.mark.parametrize("aggregations", [1, 25])
def test_epsilon_is_above_the_exact_one_and_near_it(noise: float, aggregations: int) -> None:
    part = DifferentialPrivacy(noise=noise)
    epsilon, _ = part.predict(work(aggregations))
    # Replacing a client moves the sum by up to 2 clip; normal mechanisms add up to one.
    strength = noise / 2 / math.sqrt(aggregations)
    assert exact(strength, epsilon) <= part.delta <= exact(strength, 0.8 * epsilon)


def test_drawing_clients_costs_less() -> None:
    part = DifferentialPrivacy(noise=4.0)
    drawn, all_of_them = part.predict(work(20, 2, 10))[0], part.predict(work(20, 10, 10))[0]
    assert 0 < drawn < 0.7 * all_of_them


def test_the_prediction_is_what_the_account_says() -> None:
    part = DifferentialPrivacy(noise=3.0, repeatable=True)
    for updates, pool in ((10, 10), (2, 10)):
        one = part.start(NAMES, 0)
        for _ in range(6):
            one.release(np.zeros(3, np.float32), arrived([np.zeros(3, np.float32)] * updates), pool)
        assert one.measured()["epsilon"] == pytest.approx(part.predict(work(6, updates, pool))[0])


def test_clients_that_are_not_drawn_are_charged_when_they_take_part() -> None:
    one = state(noise=3.0)
    zero = np.zeros(3, np.float32)
    for name in NAMES:
        job = Arrived(deltas=[zero], weights=np.array([0.6]), jobs=[local(name)])
        one.release(zero, job, 1)
    once = DifferentialPrivacy(noise=3.0).predict(work(1, 1, 1))[0]
    assert one.measured()["epsilon"] == pytest.approx(once)


def test_an_account_goes_on() -> None:
    first, second = state(noise=3.0), state(noise=3.0)
    zero, given = np.zeros(3, np.float32), arrived([np.zeros(3, np.float32)] * 2)
    first.release(zero, given, 10)
    first.release(zero, given, 2)
    second.load({name: one.copy() for name, one in first.state().items()})
    assert second.measured() == first.measured()
    assert second._last == first._last
    assert (second.release(zero, given, 2) == first.release(zero, given, 2)).all()


def test_of_a_fraction_of_the_clients_the_pool_is_never_too_large() -> None:
    for clients in range(1, 40):
        for fraction in (0.1, 0.25, 0.5, 0.9):
            updates = max(1, math.ceil(fraction * clients - 1e-9))
            assert updates <= pool_of(FedAvg(fraction=fraction), updates) <= clients
    assert pool_of(FedAvg(), 7) == 7
    assert pool_of(FedAvg(fraction=0.5, spare=0.2), 5) == 5
    assert pool_of(FedAsync(), 1) == 1


def test_a_run_ends_before_the_budget_is_exceeded() -> None:
    one = state(noise=4.0, epsilon=6.0)
    zero, given = np.zeros(3, np.float32), arrived([np.zeros(3, np.float32)] * 10)
    rounds = 0
    while not one.refusal():
        one.release(zero, given, 10)
        rounds += 1
    assert 1 <= rounds < 50
    assert one.measured()["epsilon"] <= 6.0
    assert rounds == DifferentialPrivacy(noise=4.0, epsilon=6.0).predict(work(50))[1]
    assert "the budget is spent" in one.refusal()
    with pytest.raises(FederationError, match="the budget is spent"):
        one.release(zero, given, 10)


def test_a_budget_that_is_spent_refuses_to_start() -> None:
    common = {"data": "wine", "learner": "logistic", "clients": "4", "rounds": 3}
    for options, words in (
        ({"epsilon": 2.0, "spent": 2.0}, "earlier runs have spent 2"),
        ({"epsilon": 0.01, "noise": 0.5}, "is exceeded by the first aggregation"),
    ):
        job = FederateJob(**common, privacy={"name": "dp", **options})
        with pytest.raises(FederationError, match=words):
            FederateKind().plan(job, load("laptop"))


def test_the_plan_says_epsilon_and_where_the_budget_ends_the_run() -> None:
    job = FederateJob(
        data="wine", learner="logistic", clients="4", rounds=50, algorithm="fedavg",
        privacy={"name": "dp", "noise": 8.0, "epsilon": 3.0},
    )  # fmt: skip
    plan = FederateKind().plan(job, load("laptop"))[0]
    assert 0 < plan.predicted["epsilon"].value <= 3.0
    assert any("privacy budget ends it after" in note for note in plan.notes)


def test_rules_that_compare_updates_have_no_bound() -> None:
    with pytest.raises(FederationError, match="needs robust = mean"):
        guarded(table("robust_rule").build("median"), FedAvg(), state())


def test_the_rule_reports_what_has_been_spent() -> None:
    given = arrived([long(1.0), long(1.0)])
    rule = GuardedRule(Mean(), FedAvg(), state(noise=5.0))
    assert rule.covers(4) == 0
    rule.combine(given)
    assert given.report["epsilon"] > 0


def test_updates_pass_through_privacy_before_they_are_compressed() -> None:
    job = FederateJob(clients="10", privacy={"name": "dp", "by": "clients", "noise": 1e-9})
    exchange = Exchange(job, NAMES)
    sent = exchange.encode(local(), long(5.0))
    assert np.linalg.norm(exchange.decode(local(), sent, SIZE)) == pytest.approx(1.0, abs=1e-3)
    job = FederateJob(clients="10", privacy="dp")
    exchange = Exchange(job, NAMES)
    sent = exchange.encode(local(), long(5.0))
    assert np.linalg.norm(sent["delta"]) == pytest.approx(5.0, rel=1e-3)
    assert np.linalg.norm(exchange.decode(local(), sent, SIZE)) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("options", [{"clip": 0}, {"noise": 0}, {"delta": 1}, {"epsilon": 0}])
def test_options_have_bounds(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        DifferentialPrivacy(**options)  # type: ignore[arg-type]
