"""The loop, its runner and how it is built."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")

from shoal.core.errors import ConfigError, ModelError, ServeError  # noqa: E402
from shoal.ir import Chunk, Request, SamplingParams, ServeJob, Step  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.config import ModelConfig, RopeScaling  # noqa: E402
from shoal.model.generate import generate  # noqa: E402
from shoal.serve.cache.paged import PagedCache  # noqa: E402
from shoal.serve.engine.build import build_engine, concrete, positions  # noqa: E402
from shoal.serve.engine.runner import LocalRunner  # noqa: E402

SMALL = ModelConfig(
    vocab_size=160,
    hidden=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    ffn_hidden=48,
    max_position=128,
    initializer_range=0.15,
)


def prompts(count, longest=40, seed=0):
    source = random.Random(seed)
    return [
        [source.randrange(160) for _ in range(source.randrange(1, longest))] for _ in range(count)
    ]


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_sampled_tokens_do_not_depend_on_the_batch(family, random_model, engine_for, serve_all):
    model = random_model(family)
    request = prompts(8)
    params = [
        SamplingParams(
            max_tokens=20, temperature=0.6 + 0.1 * n, top_k=n * 9, top_p=1 - n / 50, seed=n
        )
        for n in range(8)
    ]
    expected = [
        generate(
            model,
            p,
            20,
            temperature=k.temperature,
            top_k=k.top_k,
            top_p=k.top_p,
            seed=k.seed,
            eos=(),
        )
        for p, k in zip(request, params, strict=True)
    ]
    together = engine_for(model, max_step_tokens=24)
    assert serve_all(together, request, params) == expected
    one_by_one = engine_for(model, max_running=1)
    assert serve_all(one_by_one, request, params) == expected
    tight = engine_for(model, kv_tokens=96, max_position=96)
    assert serve_all(tight, request[::-1], params[::-1]) == expected[::-1]
    assert tight.stats()["preemptions_total"] > 0


@pytest.mark.parametrize("kind", ["llama3", "yarn", "linear", "dynamic"])
def test_rope_scalings(kind, random_model, engine_for, serve_all):
    original = 32 if kind in ("llama3", "yarn") else None
    scaling = RopeScaling(rope_type=kind, factor=4.0, original_max_position_embeddings=original)
    model = random_model(SMALL.model_copy(update={"rope_scaling": scaling}))
    request = prompts(5, longest=90)
    expected = [generate(model, prompt, 16, eos=()) for prompt in request]
    engine = engine_for(model, max_step_tokens=32)
    assert serve_all(engine, request, max_tokens=16) == expected


def test_bf16_logits_are_those_of_the_whole_pass(random_model, engine_for):
    model = random_model("qwen3", dtype=torch.bfloat16)
    engine = engine_for(model)
    runner = engine.runner
    (prompt,) = prompts(1, seed=3)
    seen = []
    flat = model.flat
    model.flat = lambda *a: seen.append(flat(*a)) or seen[-1]
    request = Request("a", prompt, len(prompt), SamplingParams(max_tokens=1), blocks=[4, 2, 9])
    for start, stop in ((0, 5), (5, len(prompt) - 1), (len(prompt) - 1, len(prompt))):
        runner.execute(Step((Chunk(request, start, stop - start),)))
    with torch.inference_mode():
        logits = seen[-1] @ model.output_weight.T
        whole = model(torch.tensor([prompt]))[0, -1:]
    assert (logits - whole).abs().max() <= 3e-2 * (whole.max() - whole.min())


def test_log_probabilities_come_with_the_tokens(random_model, engine_for):
    model = random_model("qwen2")
    engine = engine_for(model)
    (prompt,) = prompts(1)
    request = Request("a", list(prompt), len(prompt), SamplingParams(max_tokens=5, logprobs=2))
    engine.add(request)
    outputs = []
    while engine.busy:
        outputs += engine.step()
    assert [token for output in outputs for token in output.tokens] == request.tokens[len(prompt) :]
    assert outputs[-1].finish == "length"
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([request.tokens]))[0], -1)
    for place, output in enumerate(outputs, len(prompt) - 1):
        (info,) = output.infos
        assert info.logprob == pytest.approx(float(logs[place, output.tokens[0]]), abs=1e-4)
        assert [token for token, _ in info.top] == logs[place].topk(2).indices.tolist()


def test_stop_abort_and_counters(random_model, engine_for):
    model = random_model()
    engine = engine_for(model)
    assert engine.step() == []
    assert not engine.busy
    prompt = list(range(20))
    text = generate(model, prompt, 30, eos=())
    stop = text[7]
    first = text.index(stop)
    engine.add(
        Request("a", list(prompt), 20, SamplingParams(max_tokens=30, stop_ids=frozenset({stop})))
    )
    engine.add(Request("b", list(prompt), 20, SamplingParams(max_tokens=30)))
    engine.step()
    assert engine.stats()["requests_running"] == 2
    assert engine.stats()["blocks_used"] > 0
    aborted = engine.abort("b")
    assert aborted is not None
    assert aborted.finish == "abort"
    assert engine.abort("b") is None
    last = None
    while engine.busy:
        for output in engine.step():
            last = output
    assert last.finish == "stop"
    assert last.tokens == (stop,)
    stats = engine.stats()
    assert stats["tokens_prompt_total"] == 40
    assert stats["tokens_generated_total"] == first + 2  # one of them went to the aborted one
    assert stats["steps_total"] == first + 1
    assert stats["blocks_used"] == stats["requests_running"] == stats["requests_waiting"] == 0
    assert stats["blocks_total"] == 4096 // 16
    assert stats["step_seconds_total"] > 0


def test_arrival_is_on_the_clock_of_the_engine(random_model):
    from shoal.serve.engine.build import engine_of

    engine, _, _ = engine_of(ServeJob(model="m", kv_tokens=512, threads=1), random_model(SMALL))
    engine.clock = lambda: 12.5
    request = Request("a", [1], 1, SamplingParams(max_tokens=1))
    engine.add(request)
    assert request.arrival == 12.5


@pytest.mark.parametrize(
    ("tokens", "n_prompt", "what"),
    [
        ([], 0, "at least one token"),
        ([160], 1, "below vocab_size = 160"),
        ([-1], 1, "-1"),
        ([1, 2], 1, "nothing generated"),
    ],
)
def test_bad_prompts_leave_the_engine_alive(
    tokens, n_prompt, what, random_model, engine_for, serve_all
):
    engine = engine_for(random_model(SMALL))
    with pytest.raises(ServeError, match=what):
        engine.add(Request("a", tokens, n_prompt, SamplingParams(max_tokens=4)))
    with pytest.raises(ServeError, match="temperature"):
        engine.add(Request("a", [1], 1, SamplingParams(max_tokens=4, temperature=-1)))
    with pytest.raises(ServeError, match="max_position"):
        engine.add(Request("a", [1] * 128, 128, SamplingParams(max_tokens=4)))
    assert len(serve_all(engine, [[1, 2, 3]], max_tokens=4)[0]) == 4


def test_a_step_without_room_is_refused(random_model, engine_for):
    runner = engine_for(random_model(SMALL)).runner
    request = Request("a", [1] * 20, 20, SamplingParams(max_tokens=1), blocks=[3])
    with pytest.raises(ServeError, match="1 blocks hold 16 tokens"):
        runner.execute(Step((Chunk(request, 0, 20),)))
    assert runner.execute(Step(())).tokens == {}


def test_model_and_cache_of_one_kind(random_model):
    with pytest.raises(ServeError, match="that of the model"):
        LocalRunner(random_model(SMALL), PagedCache(SMALL, 4, 16, dtype=torch.bfloat16))


def test_jobs_that_cannot_be():
    job = ServeJob(model="m")
    with pytest.raises(ServeError, match="at most 128, the positions"):
        positions(job.model_copy(update={"max_position": 129}), SMALL)
    dynamic = SMALL.model_copy(
        update={"rope_scaling": RopeScaling(rope_type="dynamic", factor=2.0)}
    )
    with pytest.raises(ServeError, match="dynamic rope scaling"):
        positions(job.model_copy(update={"max_position": 129}), dynamic)
    with pytest.raises(ServeError, match=r"[GM]B are free"):
        concrete(job.model_copy(update={"kv_tokens": 10**15}), SMALL, torch.float32)
    sized = concrete(job, SMALL, torch.float32)
    assert sized.kv_tokens == 64 * 128
    assert sized.max_position == 128
    assert sized.threads >= 1


def test_from_a_directory(random_model, tmp_path, serve_all):
    model = random_model(SMALL)
    huggingface.write(tmp_path / "m", model)
    job = ServeJob(model=str(tmp_path / "m"), threads=1, precision="bf16")
    engine, config = build_engine(job)
    assert config.vocab_size == 160
    assert engine.runner.cache.dtype == torch.bfloat16
    assert len(serve_all(engine, [[5, 6]], max_tokens=3)[0]) == 3
    with pytest.raises(ModelError, match="no such directory"):
        build_engine(ServeJob(model=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="at least one block"):
        build_engine(job.model_copy(update={"kv_tokens": 3}))
    huggingface.write(tmp_path / "half", model.half())
    with pytest.raises(ServeError, match="expected fp32 or bf16"):
        build_engine(job.model_copy(update={"model": str(tmp_path / "half"), "precision": "auto"}))


@pytest.mark.parametrize("stage", ["waits", "prompt", "generates"])
def test_whoever_leaves_gives_its_memory_back_before_the_next_step(random_model, engine_for, stage):
    engine = engine_for(random_model(), max_step_tokens=32, kv={"name": "paged"})
    params = SamplingParams(max_tokens=50)
    engine.add(Request("stays", [1] * 20, 20, params))
    engine.step()
    alone = engine.stats()["blocks_used"]
    engine.add(Request("leaves", [2] * 100, 100, params))
    for _ in range({"waits": 0, "prompt": 1, "generates": 6}[stage]):
        engine.step()
    held = engine.stats()["blocks_used"]
    assert held == alone if stage == "waits" else held > alone + 3
    engine.abort("leaves")
    assert engine.stats()["blocks_used"] <= alone + 1  # the other may have grown
    engine.step()
    assert [chunk.request.id for chunk in engine.last_chunks] == ["stays"]
