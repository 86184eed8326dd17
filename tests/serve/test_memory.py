"""Layers in a neighbour's memory: the same tokens, a bounded arena, copies in order."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from shoal.core.errors import ConfigError  # noqa: E402
from shoal.ir import ServeJob  # noqa: E402
from shoal.serve.cache.weights import PeerMemory, PeerPool, elsewhere, least_resident  # noqa: E402
from shoal.serve.engine.build import engine_of, prepare  # noqa: E402

PROMPTS = [[5, 6, 7], list(range(40)), [9] * 20]


@pytest.fixture
def deep(random_model):
    config = random_model().config.model_copy(update={"num_layers": 10})
    return lambda: random_model(config)


@pytest.mark.parametrize("prefetch", [True, False])
def test_tokens_are_those_of_resident_weights(deep, engine_for, serve_all, prefetch):
    want = serve_all(engine_for(deep()), PROMPTS, max_tokens=12)
    memory = {"name": "peer", "prefetch": prefetch, "bytes_per_s": 1e9}
    job = ServeJob(model="tiny", kv_tokens=512, threads=1, memory=memory)
    engine, _, _ = engine_of(job, prepare(job, deep()))
    assert serve_all(engine, PROMPTS, max_tokens=12) == want


def test_copies_and_bytes_are_those_of_the_plan(deep):
    job = ServeJob(model="tiny", kv_tokens=512, threads=1)
    model = prepare(job, deep())
    whole = [model.blocks[layer].attention.qkv_proj.weight.clone() for layer in range(10)]
    slept = []
    pool = PeerPool(
        model, (2, 5, 9), slots=2, bytes_per_s=1e6, clock=lambda: 0.0, sleep=slept.append
    )
    assert pool.arena_bytes == 2 * pool.layer_bytes
    assert pool.saved_bytes == pool.layer_bytes
    for _ in range(4):
        for place, layer in enumerate(pool.layers):
            pool._await(place)
            assert torch.equal(model.blocks[layer].attention.qkv_proj.weight, whole[layer])
            pool._start(pool._next(place))
    pool.close()
    assert pool.copies == 2 + 4 * 3
    assert slept == [pytest.approx(pool.layer_bytes / 1e6)] * pool.copies


@given(st.integers(2, 60), st.floats(0.05, 0.5))
def test_layers_elsewhere_are_spread_evenly(num_layers, fraction):
    result = elsewhere(num_layers, fraction)
    assert len(result) == int(fraction * num_layers + 1e-9)
    gaps = [b - a - 1 for a, b in zip((-1, *result), result, strict=False)]
    assert all(gap >= 1 for gap in gaps)
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_the_least_resident_set():
    assert least_resident(20, 1.5, 1.0) == 14  # two layers hide a copy: one of three can go
    assert least_resident(20, 0.5, 1.0) == 10
    assert least_resident(20, 100.0, 1.0) == 20


def test_what_cannot_lie_elsewhere(random_model, deep):
    with pytest.raises(ConfigError, match=r"memory\.peer\.fraction = 0\.7"):
        PeerMemory(fraction=0.7)
    job = ServeJob(model="tiny", kv_tokens=512, threads=1)
    with pytest.raises(ConfigError, match="fewer than the 3 layers that lie elsewhere"):
        PeerMemory(slots=3).apply(prepare(job, deep()))
    experts = random_model("mixtral").config.model_copy(update={"num_layers": 8})
    with pytest.raises(ConfigError, match="expected a dense model with plain weights"):
        PeerMemory(fraction=0.5).apply(prepare(job, random_model(experts)))
    assert PeerMemory().apply(prepare(job, random_model())) is None
