"""A model of four times its device's memory: the same tokens."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, PlanError, ServeError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.ir import ServeJob  # noqa: E402
from shoal.serve.engine.build import engine_of, prepare  # noqa: E402

PROMPTS = [[5, 6, 7], list(range(40)), [9] * 20]


def job(**memory):
    return ServeJob(model="tiny", kv_tokens=512, threads=1, memory=memory or "resident")


@pytest.fixture
def deep(random_model):
    config = random_model().config.model_copy(update={"num_layers": 24})
    return lambda: random_model(config)


def test_tokens_are_those_of_resident_weights(deep, engine_for, serve_all):
    want = serve_all(engine_for(deep()), PROMPTS, max_tokens=12)
    size = sum(p.nbytes for p in deep().parameters())
    result = {}
    for k in (24, 2):
        budget = None if k == 24 else size // 4
        wanted = job(name="superpipeline", k=k, k_prime=1, device_budget=budget)
        engine, _, _ = engine_of(wanted, prepare(wanted, deep()))
        result[k] = serve_all(engine, PROMPTS, max_tokens=12)
    assert result[2] == result[24] == want


def test_what_cannot_be(deep):
    with pytest.raises(PlanError, match=r"superpipeline: k = 20.*device_budget is 100 kB"):
        prepare(job(name="superpipeline", k=20, device_budget=100_000), deep())
    with pytest.raises(ConfigError, match=r"superpipeline.k = 25: expected 1 to 24"):
        prepare(job(name="superpipeline", k=25), deep())
    exact = job(name="superpipeline", k=2).model_copy(update={"exact": True})
    with pytest.raises(ServeError, match=r"memory = 'superpipeline': expected resident with"):
        prepare(exact, deep())
    with pytest.raises(ConfigError, match=r"memory.superpipeline.k = 0"):
        table("memory").build({"name": "superpipeline", "k": 0})
