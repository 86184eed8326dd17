"""What malicious clients send."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

import shoal
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.fields.federate.attacks.little_is_enough import most
from shoal.fields.federate.attacks.protocols import Coalition
from shoal.fields.federate.exchange import Exchange
from shoal.fields.federate.job import FederateJob
from shoal.fields.federate.learn.protocols import Examples
from shoal.fields.federate.protocols import FederationError, LocalJob

KNOWN = generator(0, purpose="test of attacks").standard_normal((4, 500)).astype(np.float32)
DELTA = KNOWN[1]


def poisoned(attack: object, number: int = 1) -> np.ndarray:
    """What a malicious client sends in the place of DELTA."""
    coalition = Coalition(seed=3, clients=13, learned=lambda: KNOWN)
    job = LocalJob(number=number, client="c1", version=0, steps=1, started=0.0)
    result: np.ndarray = table("attack").build(attack).poison(DELTA, job, coalition)
    assert result.dtype == np.float32 and result.shape == DELTA.shape
    return result


@pytest.mark.parametrize("name", sorted(table("attack")))
def test_an_attack_changes_the_update_or_the_examples_and_is_repeatable(name: str) -> None:
    examples = Examples(x=np.zeros((6, 2), np.float32), y=np.arange(6) % 3, classes=3)
    learns = table("attack").build(name).examples(examples)
    assert (poisoned(name) == poisoned(name)).all()
    assert (poisoned(name) != DELTA).any() or (learns.y != examples.y).any()


def test_updates_are_flipped_scaled_and_dropped() -> None:
    assert poisoned({"name": "sign_flip", "scale": 2.0}) == pytest.approx(-2 * DELTA)
    assert poisoned("scaled") == pytest.approx(100 * DELTA)
    lost = poisoned({"name": "drop", "share": 0.1}) == 0
    assert 20 <= lost.sum() <= 90
    assert (lost != (poisoned({"name": "drop", "share": 0.1}, 2) == 0)).any()
    assert poisoned("drop")[~lost] == pytest.approx(DELTA[~lost])


def test_random_numbers_have_their_distribution() -> None:
    uniform = poisoned({"name": "random", "scale": 3.0})
    assert abs(uniform).max() <= 3 and 1.5 < uniform.std() < 2
    noise = poisoned({"name": "gaussian", "scale": 2.0})
    assert np.linalg.norm(noise) == pytest.approx(2 * np.linalg.norm(DELTA), rel=0.15)


def test_colluding_clients_use_what_all_of_them_have_learned() -> None:
    assert poisoned("fall_of_empires") == pytest.approx(-0.5 * KNOWN.mean(0), abs=1e-6)
    expected = KNOWN.mean(0) - 1.5 * KNOWN.std(0)
    assert poisoned({"name": "little_is_enough", "z": 1.5}) == pytest.approx(expected, abs=1e-6)


def test_the_deviations_of_a_little_is_enough_are_those_of_the_paper() -> None:
    # 50 workers, 24 of them malicious: s = 26 - 24 = 2 supporters of 26 honest ones.
    assert most(50, 24) == pytest.approx(NormalDist().inv_cdf(24 / 26))
    assert most(13, 4) == pytest.approx(NormalDist().inv_cdf(6 / 9))


def test_labels_are_reversed_and_the_data_of_others_is_not_touched() -> None:
    job = FederateJob(clients="3", attack="label_flip", attackers=1)
    exchange = Exchange(job, ("c0", "c1", "c2"))
    examples = Examples(x=np.zeros((4, 2), np.float32), y=np.array([0, 1, 2, 2]), classes=3)
    assert exchange.examples("c0", examples).y.tolist() == [2, 1, 0, 0]
    assert exchange.examples("c1", examples) is examples
    assert examples.y.tolist() == [0, 1, 2, 2]


def test_colluding_clients_learn_once_for_a_version_of_the_model() -> None:
    job = FederateJob(clients="5", attack="fall_of_empires", attackers=2)
    exchange = Exchange(job, tuple(f"c{at}" for at in range(5)))
    learned: list[str] = []

    def fit(client: str) -> tuple[np.ndarray, float]:
        learned.append(client)
        return np.full(3, -float(client[1:]), np.float32), 0.5

    def sent(number: int, client: str, version: int) -> list[float]:
        local = LocalJob(number=number, client=client, version=version, steps=1, started=0.0)
        delta: list[float] = exchange.learn(local, np.zeros(3, np.float32), fit)[0].tolist()
        return delta

    assert sent(1, "c0", 0) == sent(2, "c1", 0) == [-0.25] * 3
    assert learned == ["c0", "c0", "c1", "c1"]
    assert sent(3, "c4", 0) == [4.0] * 3
    assert sent(4, "c0", 1) == [-0.25] * 3


def test_a_rule_that_compares_updates_wants_a_scheduler_that_brings_them() -> None:
    wrong = {"data": "wine", "learner": "logistic", "clients": "4", "robust": "median"}
    with pytest.raises(FederationError, match="legal with it: fedavg"):
        shoal.plan(kind="federate", machine="laptop", **wrong, algorithm="fedasync")
    plans = shoal.plan(kind="federate", machine="laptop", **wrong)
    assert {plan.job.algorithm.name for plan in plans} == {"fedavg"}
    assert "median covers 1 wrong ones of 4 updates" in plans[0].notes


def test_too_few_clients_for_a_rule_are_an_error_of_the_plan() -> None:
    with pytest.raises(FederationError, match=r"bulyan.*4 f \+ 3"):
        shoal.plan(
            kind="federate", machine="laptop", data="wine", learner="logistic", clients="6",
            robust={"name": "bulyan", "f": 1},
        )  # fmt: skip
