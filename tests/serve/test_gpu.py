"""Serving on a GPU: recorded steps give the tokens of others; as far as possible without one."""

from __future__ import annotations

import copy
import random

import pytest

torch = pytest.importorskip("torch")

from fake_cuda import fake_cuda, placed  # noqa: E402

from shoal.ir import SamplingParams, ServeJob  # noqa: E402
from shoal.model.accelerate import accelerate  # noqa: E402
from shoal.model.config import ModelConfig  # noqa: E402
from shoal.model.transformer import Transformer  # noqa: E402
from shoal.serve.cache.attention import PagedAttention, RequestContext  # noqa: E402
from shoal.serve.cache.paged import PagedCache  # noqa: E402
from shoal.serve.engine import captured, sampler  # noqa: E402
from shoal.serve.engine.build import computes_on  # noqa: E402

CONFIG = ModelConfig(
    vocab_size=160,
    hidden=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_hidden=128,
    max_position=128,
)
# Triton's programs want a card or real numbers.
PLAIN = {"rms_norm": "reference", "rope": "reference", "swiglu": "reference", "linear": "torch"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_step_of_single_tokens_neither_mixes_devices_nor_waits(dtype, qk_norm):
    """Which is what a CUDA graph can record."""
    with fake_cuda():
        config = CONFIG.model_copy(update={"qk_norm": qk_norm})
        model = accelerate(placed(Transformer(config), dtype).eval(), PLAIN, positions=64)
        cache = PagedCache(config, 8, 16, dtype=dtype, device="cuda")
        slots = torch.zeros(3, dtype=torch.int64, device="cuda")
        seen = []

        def mixer(layer, q, k, v):
            cache.write(layer, slots, k, v)
            seen.append((layer, q.device.type))
            return q

        x_ND = model.weight.new_zeros(3, config.hidden)
        logits = model.logits(model.finished(*model.through(x_ND, slots, mixer)))
        assert logits.shape == (3, config.vocab_size) and logits.is_cuda
        assert seen == [(0, "cuda"), (1, "cuda")]


def test_prompts_and_copied_pages_do_not_mix_devices():
    with fake_cuda():
        cache = PagedCache(CONFIG, 8, 16, dtype=torch.bfloat16, device="cuda")
        contexts = [RequestContext(20, 1, [0, 1]), RequestContext(0, 5, [2]),
                    RequestContext(3, 4, [3])]  # fmt: skip
        rows = sum(one.length for one in contexts)
        slots = torch.zeros(rows, dtype=torch.int64, device="cuda")
        mixer = PagedAttention(cache, contexts, slots, torch.bfloat16)
        q, k, v = (torch.zeros(rows, n, 16, dtype=torch.bfloat16, device="cuda") for n in (4, 2, 2))
        out = mixer(0, q, k, v)
        assert out.is_cuda and out.shape == q.shape


def test_sampling_does_not_mix_devices():
    with fake_cuda():
        params = [
            SamplingParams(max_tokens=4, temperature=1.0, top_k=k, top_p=0.9, min_p=0.1)
            for k in (0, 3)
        ]
        tokens, sure = sampler._pick(torch.zeros(2, 160, device="cuda"), params, [0.5, 0.5])
        assert tokens.is_cuda and sure.is_cuda


def test_a_training_pass_does_not_mix_devices():
    with fake_cuda():
        model = placed(Transformer(CONFIG))
        tokens = torch.zeros(2, 16, dtype=torch.int64, device="cuda")
        loss = model.loss_sum(tokens, tokens)
        assert loss.is_cuda and loss.shape == ()


def test_the_fake_sees_mixed_devices_and_waits():
    with fake_cuda():
        there = torch.zeros(3, device="cuda")
        with pytest.raises(RuntimeError, match="cuda"):
            there + torch.zeros(3)
        with pytest.raises(RuntimeError):
            there.tolist()
        assert there[None, ..., 1:].shape == (1, 2)
        assert there.view(3, 1)[torch.zeros(2, dtype=torch.int64, device="cuda")].shape == (2, 1)


def test_what_computes_on_the_gpu_of_a_host(monkeypatch):
    fields = [
        {},
        {"weights": "int4-g128"},
        {"speculative": {"name": "ngram"}},
        {"memory": {"name": "superpipeline"}},
        {"parallel": {"tp": 2}},
    ]
    jobs = [ServeJob.model_validate({"model": "tiny", **one}) for one in fields]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {computes_on(job) for job in jobs} == {"cpu"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [computes_on(job) for job in jobs] == ["cuda", "cpu", "cpu", "cpu", "cpu"]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 70])
def test_recorded_steps_give_the_tokens_of_others(batch, random_model, engine_for, serve_all):
    source = random.Random(batch)
    prompts = [[source.randrange(160) for _ in range(20)] for _ in range(batch)]
    params = [
        SamplingParams(max_tokens=24, temperature=0.8 * (n % 2), seed=n) for n in range(batch)
    ]
    results = {}
    for name in ("recorded", "eager"):
        model = random_model("llama", dtype=torch.float32).cuda()
        engine = engine_for(accelerate(copy.deepcopy(model), positions=512), max_running=batch)
        recording = engine.runner.hooks["recording"]
        if name == "eager":
            recording.replay = lambda work: None
        results[name] = serve_all(engine, prompts, params)
        if name == "recorded":
            assert recording.reasons == {} and recording._tapes
    assert results["recorded"] == results["eager"]
    cpu = engine_for(random_model("llama", dtype=torch.float32), max_running=batch)
    others = serve_all(cpu, prompts, params)
    same = [a == b for a, b in zip(others, results["eager"], strict=True)]
    # Two devices sum in two orders, and a tie may go the other way.
    assert sum(same) >= 0.9 * batch


@pytest.mark.gpu
def test_what_waits_for_the_gpu_is_not_recorded():
    from shoal.kernel.graph import record

    x = torch.ones(4, device="cuda")
    computed, why = record(lambda: x * float(x.sum()))
    assert torch.equal(computed, 4 * x) and "waits for the GPU" in why
    computed, graph = record(lambda: x + 1)
    x.fill_(2.0)
    assert graph.play() and torch.equal(graph.result, torch.full_like(x, 3.0))
    assert torch.equal(computed, torch.full_like(x, 2.0))


def test_recordings_on_a_gpu_are_close_and_on_a_cpu_equal(monkeypatch):
    a = torch.tensor([1.0, 2.0])
    assert captured._same(a, a.clone()) and not captured._same(a, a + 1e-6)
