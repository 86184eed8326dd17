"""Tiny models of the four families, and one thread."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))

from cpp_first import cpp_first  # noqa: E402

from shoal.kernel import dispatch  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.serve.decode import build, costs  # noqa: E402

BASE = {
    "vocab_size": 160,
    "hidden": 64,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "ffn_hidden": 96,
    "max_position": 512,
    "initializer_range": 0.15,
}

FAMILY_CONFIGS = {
    "llama": ModelConfig(**BASE, family="llama", tied=True),
    "qwen2": ModelConfig(**BASE, family="qwen2", attention_bias=True),
    "qwen3": ModelConfig(**{**BASE, "head_dim": 32}, family="qwen3", qk_norm=True),
    "mixtral": ModelConfig(**BASE, family="mixtral", num_experts=4, top_k=2),
}


@pytest.fixture(scope="session", autouse=True)
def quick_costs():
    """An engine that guesses measures its costs in as few rounds as there can be.

    It took longer than what the tests of such engines ask of them, whose answers do not depend
    on it.
    """
    quick = functools.partial(costs.measure_costs, rows=(1, 2, 4, 8, 16, 64), seconds=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "measure_costs", quick)
        yield


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def random_model():
    """Family, or configuration -> a model in which every parameter is random."""
    from shoal.model.transformer import Transformer

    def make(family="llama", seed=0, dtype=None):
        config = FAMILY_CONFIGS[family] if isinstance(family, str) else family
        model = Transformer(config).requires_grad_(False)
        source = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            parameter.normal_(0, config.initializer_range, generator=source)
            if name.endswith("norm.weight"):
                parameter.add_(1)
        return model if dtype is None else model.to(dtype)

    return make


@pytest.fixture(scope="session")
def engine_for():
    """Model and fields of a job -> an engine."""
    from shoal.ir import ServeJob
    from shoal.serve.engine.build import engine_of

    def make(model, **fields):
        fields = {"model": "tiny", "kv_tokens": 4096, "threads": 1, **fields}
        return engine_of(ServeJob.model_validate(fields), model)[0]

    return make


@pytest.fixture(scope="session")
def serve_all():
    """Engine, prompts and sampling -> the new tokens of each prompt."""
    from shoal.ir import Request, SamplingParams

    def run(engine, prompts, params=None, **sampling):
        params = params or [SamplingParams(**{"max_tokens": 64, **sampling})] * len(prompts)
        requests = [
            Request(f"r{number}", list(prompt), len(prompt), one)
            for number, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        for request in requests:
            engine.add(request)
        steps = 0
        while engine.busy:
            engine.step()
            steps += 1
            assert steps < 100_000
        return [request.tokens[request.n_prompt :] for request in requests]

    return run


@pytest.fixture
def recordable(monkeypatch, request):
    """Passes are recorded of kernels in C++: where this machine has none, there is nothing to test.

    Where it has, they compute all that nobody wants of another kernel, whatever a probe of the
    machine measured, and a pass that is not recorded is a failure.

    The parameter, if there is one, is the backend that goes before ``cpp``: such as ``amx``.
    """
    from shoal.kernel.calls import LinearCall, PagedAttentionCall, PointwiseCall
    from shoal.kernel.dispatch import kernels_of

    first = getattr(request, "param", "cpp")
    call = PagedAttentionCall(
        batch=1,
        context=64,
        heads=4,
        kv_heads=2,
        head_dim=8,
        block_size=16,
        dtype="fp32",
        format="plain",
        tree=True,
    )
    reasons = [
        kernels_of("linear")[first].refuses(LinearCall(1, 64, 64, "bf16")),
        kernels_of("rms_norm")["cpp"].refuses(PointwiseCall("rms_norm", 1, 64, 64, "fp32")),
        kernels_of("paged_attention")["cpp"].refuses(call),
    ]
    for reason in filter(None, reasons):
        pytest.skip(reason)
    monkeypatch.setattr(dispatch, "_remembered", cpp_first(first))
