"""Recorded steps give the tokens of the others."""

from __future__ import annotations

import copy
import random

import pytest

torch = pytest.importorskip("torch")

from shoal.core.native import cpu_flags  # noqa: E402
from shoal.ir import SamplingParams, SchedulerLimits  # noqa: E402
from shoal.kernel.kv import kv_format  # noqa: E402
from shoal.model.accelerate import accelerate  # noqa: E402
from shoal.model.lowbit import LowBitLinear  # noqa: E402
from shoal.serve.bench.profile import profile, spread  # noqa: E402
from shoal.serve.cache.paged import PagedCache  # noqa: E402

pytestmark = pytest.mark.skipif("avx512_bf16" not in cpu_flags(), reason="kernels want AVX-512")

KERNELS = {"linear": "cpp", "paged_attention": "cpp", "rms_norm": "cpp", "rope": "cpp"}
KERNELS["swiglu"] = "cpp"


@pytest.fixture
def engines(random_model, engine_for):
    """Family, dtype and fields of a job -> an engine that records, and one that does not."""

    def make(family, dtype, **fields):
        model = random_model(family, dtype=dtype)
        wanted = {op: backend for op, backend in KERNELS.items() if op != "paged_attention"}
        results = []
        for _ in range(2):
            fast = accelerate(copy.deepcopy(model), wanted, positions=512)
            results.append(engine_for(fast, kernel=KERNELS, **fields))
        results[1].runner.hooks["recording"].replay = lambda work: None
        return results

    return make


def asked(count=9):
    source = random.Random(3)
    prompts = [
        [source.randrange(160) for _ in range(source.randrange(1, 60))] for _ in range(count)
    ]
    params = [
        SamplingParams(
            max_tokens=source.randrange(1, 40),
            temperature=0.8 * (n % 2),
            seed=n,
            repetition_penalty=1.0 + 0.1 * (n % 3),
        )
        for n in range(count)
    ]
    return prompts, params


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        (torch.bfloat16, {}),
        (torch.float32, {"exact": True}),
        (torch.bfloat16, {"max_step_tokens": 16, "kv": {"name": "paged", "block_size": 1}}),
        (torch.bfloat16, {"kv_format": "int8"}),
    ],
)
def test_the_same_tokens(family, dtype, fields, engines, serve_all):
    records, plain = engines(family, dtype, **fields)
    prompts, params = asked()
    assert serve_all(records, prompts, params) == serve_all(plain, prompts, params)
    captured = records.runner.hooks["recording"]
    assert captured.reasons == {}
    assert len(captured._tapes) >= 3


@pytest.mark.parametrize("text", ["int8-channel", "int4-g32"])
def test_weights_of_few_bits_too(text, random_model, engine_for, serve_all):
    wanted = {"linear": "cpp", "linear_lowbit": "anybit"}

    def engine():
        model = random_model("llama", dtype=torch.bfloat16)
        for block in model.blocks:
            for owner, name in (
                (block.attention, "qkv_proj"),
                (block.attention, "o_proj"),
                (block.mlp, "gate_up_proj"),
                (block.mlp, "down_proj"),
            ):
                setattr(owner, name, LowBitLinear.from_linear(getattr(owner, name), text))
        return engine_for(accelerate(model, wanted, positions=512), kernel=KERNELS)

    records, plain = engine(), engine()
    plain.runner.hooks["recording"].replay = lambda work: None
    prompts, params = asked()
    assert serve_all(records, prompts, params) == serve_all(plain, prompts, params)
    assert records.runner.hooks["recording"].reasons == {}
    assert records.runner.hooks["recording"]._tapes


def test_what_cannot_be_recorded_is_computed(engines, serve_all):
    records, plain = engines("mixtral", torch.float32)
    prompts, params = asked()
    assert serve_all(records, prompts, params) == serve_all(plain, prompts, params)
    reasons = records.runner.hooks["recording"].reasons
    assert reasons
    assert all(reason.startswith("aten::") for reason in reasons.values())


def test_preempted_and_copied_blocks(engines, serve_all):
    fields = {"kv_tokens": 192, "host_tokens": 256, "preempt": "swap"}
    records, plain = engines("llama", torch.bfloat16, **fields)
    prompts, params = asked()
    assert serve_all(records, prompts, params) == serve_all(plain, prompts, params)
    assert records.stats()["preemptions_total"] > 0
    assert records.runner.hooks["recording"]._tapes


def test_a_kernel_that_is_not_seen_is_noticed(engines, serve_all):
    records, _ = engines("llama", torch.bfloat16)
    captured = records.runner.hooks["recording"]
    inner = captured._attention

    def attention(*given):
        out = inner(*given)
        numbers = out.view(torch.int16).numpy()  # what PyTorch is not asked for
        numbers[:] = numbers[..., ::-1].copy()
        return out

    captured._attention = attention
    prompts, params = asked(3)
    serve_all(records, prompts, params)
    assert set(captured.reasons.values()) == {"a kernel that is not seen"}
    assert not captured._tapes


def test_a_profile_measures_the_kernels_that_serve(engines):
    records, _ = engines("llama", torch.bfloat16, kv_format="int8")
    runner = records.runner
    cache = PagedCache(
        runner.model.config,
        8,
        runner.cache.block_size,
        dtype=torch.bfloat16,
        form=kv_format("int8"),
    )
    beside = runner.beside(cache)
    limits = SchedulerLimits(max_running=4, max_step_tokens=16, max_position=64)
    samples = profile(runner, spread(limits, 256), seconds=0.0)
    assert all(sample.seconds > 0 for sample in samples)
    assert beside.attention is runner.attention
    assert beside.hooks["recording"] is not runner.hooks["recording"]


def test_a_number_that_cannot_be_recorded_does_not_keep_others_from_it(engines, serve_all):
    records, plain = engines("llama", torch.bfloat16)
    captured = records.runner.hooks["recording"]
    captured.reasons[2] = "told"
    prompts, params = asked()
    assert serve_all(records, prompts, params) == serve_all(plain, prompts, params)
    assert captured.reasons == {2: "told"}
    assert 2 not in captured._tapes
    assert captured._tapes
