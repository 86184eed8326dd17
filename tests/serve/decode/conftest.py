"""A tiny model of masked diffusion, its engine, and what decodes prompts with it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from shoal.ir import Request, SamplingParams, ServeJob  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402

CONFIG = ModelConfig(
    family="mdlm",
    vocab_size=40,
    hidden=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_hidden=48,
    max_position=128,
    mask_token_id=39,
    eos_token_id=0,
    tied=True,
)
MASK = 39


@pytest.fixture(scope="session")
def mdlm(random_model):
    """Double precision, every parameter random."""
    return random_model(CONFIG.model_copy(update={"initializer_range": 0.3}), 3, torch.float64)


@pytest.fixture
def engine_by(mdlm):
    """Options of the decoder -> engine."""
    from shoal.serve.decode.diffusion.build import diffusion_engine

    def make(model=mdlm, **options):
        fields = {key: options.pop(key) for key in ("max_running", "kv_tokens") if key in options}
        job = ServeJob.model_validate(
            {
                "model": "tiny",
                "kv_tokens": 2048,
                "threads": 1,
                **fields,
                "decode": {"name": "diffusion", "block": 8, **options},
            }
        )
        return diffusion_engine(job, model)[0]

    return make


@pytest.fixture
def decode():
    """Engine and prompts -> the new tokens of each, all at once."""

    def run(engine, prompts, max_tokens=20, **sampling):
        requests = []
        for number, prompt in enumerate(prompts):
            params = SamplingParams(max_tokens=max_tokens, **sampling)
            requests.append(Request(f"r{number}", list(prompt), len(prompt), params))
            engine.add(requests[-1])
        steps = 0
        while engine.busy:
            engine.step()
            steps += 1
            assert steps < 2000
        return [request.tokens[request.n_prompt :] for request in requests]

    return run
