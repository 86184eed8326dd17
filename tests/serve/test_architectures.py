"""Models that differ from their family's: the engine gives the tokens of plain generation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from thread_ranks import thread_engine  # noqa: E402

from conftest import FAMILY_CONFIGS  # noqa: E402
from shoal.core.errors import ServeError  # noqa: E402
from shoal.core.random import generator  # noqa: E402
from shoal.ir import ServeJob  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.generate import generate  # noqa: E402


def changed(family="llama", **architecture):
    return ModelConfig(**{**dict(FAMILY_CONFIGS[family]), "architecture": architecture})


def job(**changes):
    fields = {"model": "tiny", "kv_tokens": 4096, "threads": 1, "max_step_tokens": 48}
    return ServeJob.model_validate({**fields, **changes})


def prompts(count=6):
    """Some longer than a step has room for."""
    made = []
    for number in range(count):
        source = generator(3, purpose="prompts", index=number)
        made.append(source.integers(0, 160, int(source.integers(1, 80))).tolist())
    return made


LADDERS = (
    {"name": "ladder"},
    {"name": "ladder", "layers": "upper_half"},
    {"name": "ladder", "layers": (0,)},
)


@pytest.mark.parametrize("residual", LADDERS)
def test_an_engine_of_a_ladder_gives_the_tokens_of_plain_generation(
    residual, random_model, engine_for, serve_all
):
    model = random_model(changed(residual=residual))
    want = [generate(random_model(changed(residual=residual)), one, 12) for one in prompts()]
    assert serve_all(engine_for(model, max_step_tokens=48), prompts(), max_tokens=12) == want
    plain = [generate(random_model(), one, 12) for one in prompts()]
    assert plain != want


@pytest.mark.parametrize("family", ["llama", "qwen3", "mixtral"])
def test_two_ranks_of_a_ladder_give_the_tokens_of_one(family, random_model, engine_for, serve_all):
    config = changed(family, residual={"name": "ladder"})
    want = serve_all(engine_for(random_model(config)), prompts(), max_tokens=12)
    engine, ranks = thread_engine(job(parallel={"tp": 2}), random_model(config))
    assert serve_all(engine, prompts(), max_tokens=12) == want
    ranks.close()


def test_stages_of_a_ladder_are_refused(random_model):
    config = changed(residual={"name": "ladder"})
    with pytest.raises(ServeError, match=r"parallel\.pp"):
        thread_engine(job(parallel={"pp": 2}), random_model(config))
