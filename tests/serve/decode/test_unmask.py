"""Unmasking policies against their definitions, written as loops."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from shoal.core.errors import ConfigError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.serve.decode.diffusion.protocols import UnmaskState  # noqa: E402

B, W, V = 3, 9, 5


def scene(seed, sharp=3.0):
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(B, W, V, generator=source, dtype=torch.float64) * sharp
    masked = torch.rand(B, W, generator=source) < 0.7
    masked[0, :] = seed % 3 != 0  # sometimes nothing is left of a request
    return logits, masked


def state(step=0, size=W, bar=None):
    return UnmaskState(
        step=torch.full((B,), step),
        size=torch.full((B,), size),
        bar=bar or (lambda tau: torch.full((B,), tau, dtype=torch.float64)),
    )


def softmax(row):
    top = max(row)
    weights = [math.exp(x - top) for x in row]
    return [w / sum(weights) for w in weights]


def places(logits, masked):
    """Of one request: (place, token, probability) of every mask."""
    places = []
    for place in range(W):
        if masked[place]:
            p = softmax(logits[place].tolist())
            best = max(p)
            places.append((place, p.index(best), best))
    return places


def surest(found):
    best = max(p for _, _, p in found)
    return next(place for place, _, p in found if p == best)


def fixed(found, masked, *, steps, step):
    steps = W if steps is None else min(steps, W)
    count = W // steps + (step < W % steps)
    return {place for place, _, _ in sorted(found, key=lambda x: -x[2])[:count]}


def threshold(found, masked, *, tau):
    return {place for place, _, p in found if p >= tau} | {surest(found)}


def factor(found, masked, *, f):
    ordered = sorted(found, key=lambda x: -x[2])
    most = 0
    for n in range(1, len(ordered) + 1):
        if (n + 1) * (1 - ordered[n - 1][2]) < f:
            most = n
    return {place for place, _, _ in ordered[:most]} | {surest(found)}


def hierarchical(found, masked, *, tau, low):
    kept = {place for place, _, p in found if p > tau} | {surest(found)}
    by_place = {place: p for place, _, p in found}
    run = []
    for place in range(W + 1):
        if place < W and masked[place]:
            run.append(place)
            continue
        if run:
            best = max(run, key=lambda one: by_place[one])
            if by_place[best] > low:
                kept.add(best)
        run = []
    return kept


def check(choice, reference, seed, **extra):
    logits, masked = scene(seed)
    tokens, chosen = table("unmask").build(choice).select(logits.clone(), masked, state(**extra))
    for row in range(B):
        result = places(logits[row], masked[row].tolist())
        wanted = reference(result, masked[row].tolist()) if result else set()
        assert set(chosen[row].nonzero()[:, 0].tolist()) == wanted
        for place, token, _ in result:
            assert tokens[row, place] == token


SEEDS = st.integers(0, 10**6)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, steps=st.sampled_from([None, 1, 2, 4, 9, 40]), step=st.integers(0, 3))
def test_fixed(seed, steps, step):
    reference = lambda found, masked: fixed(found, masked, steps=steps, step=step)  # noqa: E731
    check({"name": "fixed", "steps": steps}, reference, seed, step=step)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, tau=st.floats(0.05, 1.0))
def test_threshold(seed, tau):
    reference = lambda found, masked: threshold(found, masked, tau=tau)  # noqa: E731
    check({"name": "threshold", "tau": tau}, reference, seed)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, f=st.floats(0.05, 4.0))
def test_factor(seed, f):
    check({"name": "factor", "f": f}, lambda found, masked: factor(found, masked, f=f), seed)


@settings(max_examples=25, deadline=None)
@given(seed=SEEDS, tau=st.floats(0.5, 1.0), low=st.floats(0.0, 0.5))
def test_hierarchical(seed, tau, low):
    reference = lambda found, masked: hierarchical(found, masked, tau=tau, low=low)  # noqa: E731
    check({"name": "hierarchical", "tau": tau, "low": low}, reference, seed)


def test_hierarchical_takes_the_first_of_equals():
    logits = torch.zeros(1, W, V, dtype=torch.float64)
    logits[..., 0] = 1.0
    masked = torch.tensor([[1, 1, 0, 1, 1, 1, 0, 0, 1]]).bool()
    part = table("unmask").build({"name": "hierarchical", "tau": 0.99, "low": 0.1})
    _, chosen = part.select(logits, masked, state())
    assert chosen[0].nonzero()[:, 0].tolist() == [0, 3, 8]


@settings(max_examples=15, deadline=None)
@given(seed=SEEDS, alpha=st.floats(0, 2), gamma=st.floats(0, 1), beta=st.floats(0, 1))
def test_credit(seed, alpha, gamma, beta):
    """Over three iterations, with the matrix C kept as a dictionary."""
    options = {"alpha": alpha, "gamma": gamma, "beta": beta, "tau": 0.8}
    part = table("unmask").build({"name": "credit", **options})
    kept: list[dict[tuple[int, int], float]] = [{} for _ in range(B)]
    now = state()
    for turn in range(3):
        logits, masked = scene(seed + turn)
        tokens, chosen = part.select(logits.clone(), masked, now)
        for row in range(B):
            owned = {key: beta * value for key, value in kept[row].items()}
            for place, token, p in places(logits[row], masked[row].tolist()):
                owned[place, token] = owned.get((place, token), 0.0) + p**gamma
            kept[row] = owned
            fused = logits[row].clone()
            for (place, token), value in owned.items():
                fused[place, token] += alpha * math.log1p(value)
            result = places(fused, masked[row].tolist())
            wanted = threshold(result, masked[row], tau=0.8) if result else set()
            got = set(chosen[row].nonzero()[:, 0].tolist())
            close = any(abs(p - 0.8) < 1e-12 for _, _, p in result)
            assert got == wanted or close
            for place, token, _ in result:
                assert tokens[row, place] == token


def test_credit_without_weight_is_the_threshold():
    for seed in range(20):
        logits, masked = scene(seed)
        plain = table("unmask").build({"name": "threshold", "tau": 0.7})
        credit = table("unmask").build({"name": "credit", "alpha": 0.0, "tau": 0.7})
        for one, other in zip(
            plain.select(logits, masked, state()), credit.select(logits, masked, state()),
            strict=True,
        ):  # fmt: skip
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", list(table("unmask")))
def test_every_policy_moves_and_touches_only_masks(name):
    part = table("unmask").build(name)
    for seed in range(20):
        logits, masked = scene(seed, sharp=0.1)
        _, chosen = part.select(logits, masked, state(step=2))
        assert not (chosen & ~masked).any()
        assert torch.equal(chosen.any(1), masked.any(1))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"name": "threshold", "tau": 0.0}, r"unmask.threshold.tau = 0.0: expected in \(0, 1\]"),
        ({"name": "threshold", "tau": 1.2}, r"unmask.threshold.tau = 1.2"),
        ({"name": "credit", "tau": -1.0}, r"unmask.credit.tau"),
        ({"name": "credit", "beta": 2.0}, r"unmask.credit.beta"),
        ({"name": "hierarchical", "low": 0.95}, r"unmask.hierarchical.low"),
        ({"name": "factor", "f": 0.0}, r"unmask.factor.f"),
        ({"name": "fixed", "steps": 0}, r"unmask.fixed.steps"),
    ],
)
def test_options_are_refused(choice, message):
    with pytest.raises(ConfigError, match=message):
        table("unmask").build(choice)
