"""Robust rules against their definitions, written out at small size."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import ConfigError
from shoal.core.parts import table
from shoal.core.random import generator
from shoal.fields.federate.protocols import Arrived, FederationError, LocalJob
from shoal.fields.federate.robust.flag import FlagAggregator
from shoal.fields.federate.robust.updates import gram, sort_columns

RULES = sorted(table("robust_rule"))
ROBUST = [name for name in RULES if name != "mean"]


def arrived(updates: Any, weight: float = 1.0) -> Arrived:
    """An aggregation of updates with equal weights that add up to ``weight``."""
    jobs = [
        LocalJob(number=at, client=f"c{at}", version=0, steps=1, started=0.0)
        for at in range(len(updates))
    ]
    weights = np.full(len(updates), weight / len(updates))
    return Arrived(
        deltas=[np.asarray(one, np.float32) for one in updates], weights=weights, jobs=jobs
    )


def combined(rule: Any, updates: Any, weight: float = 1.0) -> np.ndarray:
    """What a rule, a name or a choice with options, makes of updates."""
    built = table("robust_rule").build(rule)
    result: np.ndarray = built.combine(arrived(updates, weight))
    assert result.dtype == np.float32
    return result


def drawn(count: int, size: int, seed: int = 0) -> np.ndarray:
    """Honest updates [count, size] around a common direction, then a third that is far away."""
    draw = generator(seed, purpose="test of rules", index=count)
    updates = draw.standard_normal(size) + 0.3 * draw.standard_normal((count, size))
    updates[: (count - 1) // 4] += 5 * draw.standard_normal(((count - 1) // 4, size))
    return updates.astype(np.float32)


@pytest.mark.parametrize("rule", RULES)
def test_equal_updates_are_returned_as_they_are(rule: str) -> None:
    one = drawn(1, 40)[0]
    assert combined(rule, [one] * 9) == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_the_result_has_the_scale_of_the_weights(rule: str) -> None:
    updates = drawn(11, 30)
    assert combined(rule, updates, 0.4) == pytest.approx(0.4 * combined(rule, updates), abs=1e-5)


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_clients_does_not_matter(rule: str) -> None:
    updates = drawn(11, 30)
    order = generator(1).permutation(len(updates))
    assert combined(rule, updates[order]) == pytest.approx(combined(rule, updates), abs=1e-5)


@pytest.mark.parametrize("rule", ["mean", "krum", "multi_krum", "geometric_median", "flag"])
def test_a_rotation_of_the_updates_rotates_the_result(rule: str) -> None:
    updates = drawn(11, 30)
    turn = np.linalg.qr(generator(2).standard_normal((30, 30)))[0]
    expected = combined(rule, updates) @ turn
    assert combined(rule, updates @ turn) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_updates_that_are_not_finite_are_excluded_and_reported(rule: str, wrong: float) -> None:
    updates = drawn(12, 30)
    updates[4, 7] = wrong
    given = arrived(updates)
    result = table("robust_rule").build(rule).combine(given)
    assert given.report["excluded"] == ["c4"]
    assert result == pytest.approx(combined(rule, np.delete(updates, 4, axis=0)), abs=1e-6)


@pytest.mark.parametrize("rule", ROBUST)
def test_far_updates_move_the_result_less_than_the_mean(rule: str) -> None:
    updates = drawn(15, 50)
    honest = updates[3:].mean(0)
    far = np.linalg.norm(combined("mean", updates) - honest)
    assert np.linalg.norm(combined(rule, updates) - honest) < 0.8 * far


@pytest.mark.parametrize("count", [*range(1, 18), 33])
def test_the_network_sorts(count: int) -> None:
    block = generator(count).standard_normal((count, 50)).astype(np.float32)
    assert np.stack(sort_columns(block.copy())) == pytest.approx(np.sort(block, axis=0))


@pytest.mark.parametrize("count", [4, 7])
def test_median_and_trimmed_mean_are_those_of_numpy(count: int) -> None:
    updates = drawn(count, 3000)
    assert combined("median", updates) == pytest.approx(np.median(updates, axis=0), abs=1e-6)
    middle = np.sort(updates, axis=0)[1:-1].mean(0)
    rule = {"name": "trimmed_mean", "f": 1}
    assert combined(rule, updates) == pytest.approx(middle, abs=1e-6)


def krum_by_hand(updates: np.ndarray, f: int) -> list[float]:
    """Scores as the paper defines them."""
    near = len(updates) - f - 2
    return [
        sum(sorted(float(((a - b) ** 2).sum()) for j, b in enumerate(updates) if j != i)[:near])
        for i, a in enumerate(updates)
    ]


def test_krum_is_its_definition() -> None:
    updates, f = drawn(9, 20).astype(np.float64), 2
    scores = np.array(krum_by_hand(updates, f))
    krum, multi = {"name": "krum", "f": f}, {"name": "multi_krum", "f": f, "m": 4}
    assert combined(krum, updates) == pytest.approx(updates[scores.argmin()], abs=1e-6)
    best = updates[np.argsort(scores)[:4]].mean(0)
    assert combined(multi, updates) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize(("count", "f"), [(11, 2), (12, 2), (7, 1), (6, 0)])
def test_bulyan_is_its_definition(count: int, f: int) -> None:
    updates = drawn(count, 25).astype(np.float64)
    left, chosen = list(range(count)), []
    while len(chosen) < count - 2 * f:
        near = max(1, len(left) - f - 2)
        scores = [
            sum(
                sorted(float(((updates[a] - updates[b]) ** 2).sum()) for b in left if b != a)[:near]
            )
            for a in left
        ]
        ties = [at for at, score in enumerate(scores) if score <= min(scores) * (1 + 1e-9)]
        far = [float(((updates[left] - updates[left[at]]) ** 2).sum()) for at in ties]
        chosen.append(left.pop(ties[int(np.argmin(far))]))
    kept, expected = updates[chosen], []
    for column in kept.T:
        order = np.argsort(np.abs(column - np.median(column)), kind="stable")
        expected.append(column[order[: len(kept) - 2 * f]].mean())
    assert combined({"name": "bulyan", "f": f}, updates) == pytest.approx(expected, abs=1e-5)


def test_no_point_near_the_geometric_median_is_better() -> None:
    updates = drawn(9, 4).astype(np.float64)

    def total(point: np.ndarray) -> float:
        return float(np.linalg.norm(updates - point, axis=1).sum())

    best = combined("geometric_median", updates).astype(np.float64)
    draw = generator(3)
    for reach in (1.0, 0.1, 0.01):
        others = [best + reach * draw.standard_normal(4) for _ in range(200)]
        assert min(map(total, others)) >= total(best) - 1e-6


# Flag


def flag_by_hand(updates: np.ndarray, part: FlagAggregator) -> tuple[np.ndarray, list[float]]:
    """By singular vectors of the updates themselves, P x q, and the objective of each iterate."""
    count = len(updates)
    lengths = np.linalg.norm(updates, axis=1)
    columns, price = [one / norm for one, norm in zip(updates, lengths, strict=True)], [1.0] * count
    for i, j in itertools.permutations(range(count), 2) if part.pairs else ():
        apart = updates[i] - updates[j]
        columns.append(apart / np.linalg.norm(apart))
        price.append(part.pairs / (count * (count - 1)))
    whole, cost = np.array(columns).T, np.array(price)
    m = -(-(count + 1) // 2) if part.m == "auto" else part.m
    weight, bases, values = np.sqrt(cost), [], []
    for _ in range(part.iterations + 1):
        basis = np.linalg.svd(whole * weight, full_matrices=False)[0][:, :m]
        share = ((basis.T @ whole) ** 2).sum(0)
        bases.append(basis)
        values.append(float(cost @ np.sqrt(1 - share + 1e-7)))
        weight = np.sqrt(cost) * (1 - share + 1e-7) ** -0.25
    basis = bases[int(np.argmin(values))]
    if part.scale == "median":
        updates = updates * np.minimum(1, np.median(lengths) / lengths)[:, None]
    return basis @ (basis.T @ updates.mean(0)), values


@pytest.mark.parametrize("pairs", [0.0, 3.0])
@pytest.mark.parametrize("scale", ["median", "raw"])
@pytest.mark.parametrize("m", ["auto", 3])
def test_flag_from_the_gram_matrix_is_flag_from_singular_vectors(
    pairs: float, scale: Any, m: Any
) -> None:
    part = FlagAggregator(pairs=pairs, scale=scale, m=m, tolerance=0.0)
    updates = drawn(9, 60).astype(np.float64)
    expected, values = flag_by_hand(updates, part)
    _, fit = part.weights(gram(list(updates)))
    assert fit.history == pytest.approx(values, rel=1e-5)
    assert part.combine(arrived(updates)) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("pairs", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("seed", range(4))
def test_the_objective_of_flag_does_not_grow(pairs: float, seed: int) -> None:
    part = FlagAggregator(pairs=pairs, iterations=20)
    _, fit = part.weights(gram(list(drawn(11, 40, seed))))
    assert len(fit.history) > 1
    assert all(b <= a + 1e-6 for a, b in itertools.pairwise(fit.history))
    assert fit.objective == min(fit.history)


def test_the_best_iterate_of_flag_is_kept() -> None:
    _, fit = FlagAggregator(alpha=3.0, iterations=10).weights(gram(list(drawn(11, 40))))
    assert fit.objective == min(fit.history)


def test_flag_with_all_dimensions_is_the_mean() -> None:
    updates = drawn(9, 60)
    rule = {"name": "flag", "m": 9, "scale": "raw"}
    assert combined(rule, updates) == pytest.approx(updates.mean(0), abs=1e-5)


def test_flag_shortens_long_updates_to_the_median() -> None:
    updates = drawn(9, 60)
    updates[0] *= 1e6
    lengths = np.linalg.norm(updates, axis=1)
    assert np.linalg.norm(combined("flag", updates)) <= np.median(lengths)


def test_blocks_of_flag_are_rules_of_their_own() -> None:
    updates = drawn(9, 60)
    parts = [combined("flag", updates[:, at : at + 25]) for at in (0, 25, 50)]
    rule = {"name": "flag", "block": 25}
    assert combined(rule, updates) == pytest.approx(np.concatenate(parts), abs=1e-6)


def test_flag_reports_what_it_explains() -> None:
    given = arrived(drawn(9, 60))
    FlagAggregator().combine(given)
    shares = given.report["explained"]
    assert set(shares) == {f"c{at}" for at in range(9)}
    assert all(0 <= share <= 1 for share in shares.values())


def test_zero_updates_count_as_zeros() -> None:
    updates = drawn(9, 60)
    updates[:2] = 0
    assert np.isfinite(combined("flag", updates)).all()
    assert combined({"name": "flag", "m": 9, "scale": "raw"}, updates) == pytest.approx(
        updates.mean(0), abs=1e-5
    )
    assert not combined("flag", np.zeros((5, 10))).any()


# Bad input


@pytest.mark.parametrize(
    ("rule", "count", "words"),
    [
        ("flag", 2, "2 updates; at least 3"),
        ({"name": "flag", "m": 6}, 5, "m = 6 dimensions of 5 updates"),
        ("krum", 2, "2 f \\+ 3 are needed. Take more clients"),
        ({"name": "krum", "f": 4}, 9, "9 updates with f = 4.*Take f = 3"),
        ({"name": "multi_krum", "m": 12}, 9, "m = 12 of 9 updates"),
        ({"name": "bulyan", "f": 3}, 14, "4 f \\+ 3 are needed. Take f = 2"),
        ({"name": "trimmed_mean", "f": 3}, 6, "2 f \\+ 1 are needed"),
    ],
)
def test_too_few_updates_are_an_error(rule: Any, count: int, words: str) -> None:
    with pytest.raises(FederationError, match=words):
        combined(rule, drawn(count, 5))


@pytest.mark.parametrize(
    "rule", [{"name": "flag", "m": 0}, {"name": "krum", "f": -1}, {"name": "flag", "pairs": -1.0}]
)
def test_options_have_bounds(rule: Any) -> None:
    with pytest.raises(ConfigError):
        table("robust_rule").build(rule)


def test_updates_of_which_none_is_finite_are_an_error() -> None:
    with pytest.raises(FederationError, match="0 updates"):
        combined("flag", np.full((5, 3), np.nan))
