"""A request that cannot be served ends alone: the others have the tokens they have without it."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent))

from speculative import Knowing  # noqa: E402

from shoal.core.errors import ModelError, ServeError  # noqa: E402
from shoal.core.parts import table  # noqa: E402
from shoal.ir import Request, SamplingParams  # noqa: E402
from shoal.model import huggingface  # noqa: E402
from shoal.model.generate import adjust, sample  # noqa: E402
from shoal.plan.trees.drafting import FixedDrafting  # noqa: E402
from shoal.serve.engine.adjust import Adjuster  # noqa: E402
from shoal.serve.engine.params import check_params  # noqa: E402
from shoal.serve.engine.sampler import choose, probabilities, sample_rows  # noqa: E402
from shoal.train.peft import files  # noqa: E402

LARGEST = torch.finfo(torch.float32).max


def request(name, prompt, adapter=None, **sampling):
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return Request(name, list(prompt), len(prompt), params, adapter=adapter)


def prompts(count, length=9):
    source = torch.Generator().manual_seed(7)
    return torch.randint(0, 160, (count, length), generator=source).tolist()


def drain(engine, requests):
    """The new tokens of requests, and what was told of those that failed."""
    for one in requests:
        engine.add(one)
    notes = []
    while engine.busy:
        engine.step()
        notes += engine.drain_events()
    engine.hooks["isolation"].check_integrity()
    return (
        {one.id: one.tokens[one.n_prompt :] for one in requests},
        {one["id"]: one for one in notes if one["kind"] == "error"},
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_without_a_token_leaves_the_others_theirs(bad, temperature):
    torch.manual_seed(0)
    logits = torch.randn(5, 300)
    requests = [request(f"r{n}", [1], temperature=temperature, seed=n) for n in range(5)]
    want, _, failed = choose(logits, requests)
    assert failed == []
    logits[2] = bad
    logits[4, 17] = math.nan
    got, _, failed = choose(logits, requests)
    assert failed == [2, 4]
    assert [got[row] for row in (0, 1, 3)] == [want[row] for row in (0, 1, 3)]


@pytest.mark.parametrize("temperature", [1e-308, 1e-4, 1e-2, 2.0])
@pytest.mark.parametrize("scale", [1e-38, 1.0, 1e30, LARGEST])
def test_no_temperature_overflows(temperature, scale):
    """The reference and the batch agree, and both take the best token where it is far ahead."""
    torch.manual_seed(1)
    logits = (torch.rand(6, 400) * 2 - 1) * scale
    uniforms = [0.0, 0.1, 0.3, 0.5, 0.9, 0.999]
    for options in ({}, {"top_k": 3}, {"top_p": 5e-324}, {"min_p": 5e-324}, {"top_p": 0.9}):
        one = SamplingParams(max_tokens=1, temperature=temperature, **options)
        got = sample_rows(logits, [one] * 6, uniforms).tolist()
        want = [
            sample(row, temperature=temperature, uniform=u, **options)
            for row, u in zip(logits, uniforms, strict=True)
        ]
        assert got == want
        assert probabilities(logits, [one] * 6).isfinite().all()
        if temperature <= 1e-4 and scale >= 1:
            assert got == logits.argmax(-1).tolist()


@pytest.mark.parametrize("repetition", [1e-40, 0.01, 10.0])
def test_no_penalty_overflows(repetition):
    logits = torch.tensor([[LARGEST, 1.0, -LARGEST, 3.0]])
    own = request("r", [0, 1, 2], repetition_penalty=repetition, frequency_penalty=-2.0)
    own = dataclasses.replace(own, tokens=[0, 1, 2, 0, 2])
    scores, _ = Adjuster()(logits, [own])
    assert scores.isfinite().all()
    want = adjust(
        logits[0], [0, 1, 2], [0, 2], repetition_penalty=repetition, frequency_penalty=-2.0
    )
    assert torch.equal(scores[0], want)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": 1e-308},
        {"temperature": 9e-5},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 0.009},
        {"logit_bias": ((1, 1e300),)},
        {"logit_bias": ((1, math.nan),)},
        {"frequency_penalty": math.inf},
        {"min_p": math.nan},
        {"top_p": math.nan},
    ],
)
def test_numbers_that_nobody_means_are_refused(bad):
    with pytest.raises(ServeError, match=next(iter(bad))):
        check_params(SamplingParams(max_tokens=1, **bad))


@pytest.fixture(scope="module")
def overflowing(random_model, tmp_path_factory):
    """A base, the directory of an ordinary adapter, and that of one whose products overflow."""
    base = random_model("qwen3")
    folder = tmp_path_factory.mktemp("adapters")
    for name, size in (("good", 0.2), ("huge", 1e38)):
        own = copy.deepcopy(base)
        part = table("peft").build({"name": "lora", "r": 4, "targets": "*.q_proj|*.down_proj"})
        handle = part.inject(own, seed=3)
        source = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for value in handle.trainable().values():
                first = len(value) == 4  # the one of rank rows
                value.add_(torch.randn(value.shape, generator=source) * (size if first else 0.2))
                value.clamp_(-LARGEST, LARGEST)
        files.write(folder / name, handle)
    return base, {name: str(folder / name) for name in ("good", "huge")}


@pytest.mark.parametrize("kernel", [{}, {"paged_attention": "torch"}])
@pytest.mark.parametrize("together", [3, 12])
def test_an_adapter_that_overflows_ends_its_own_requests(overflowing, engine_for, kernel, together):
    base, places = overflowing
    engine = engine_for(
        copy.deepcopy(base), precision="fp32", adapters=places, kernel=kernel, kv_tokens=1024
    )
    names = [None, "good", "huge"]
    given = [(f"r{n}", p, names[n % 3]) for n, p in enumerate(prompts(together, 5))]
    sound = [request(*one) for one in given if one[2] != "huge"]
    want, none = drain(engine, sound)
    assert none == {}
    for _ in range(2):  # in the second round among what the failed ones have left in the cache
        got, failed = drain(engine, [request(*one) for one in given])
        assert set(failed) == {name for name, _, adapter in given if adapter == "huge"}
        assert "not finite" in next(iter(failed.values()))["message"]
        assert {name: got[name] for name in want} == want


@pytest.mark.parametrize(
    "kv",
    [
        {"name": "paged"},
        {"name": "slots", "max_len": 64},
        {"name": "contiguous"},
        {"name": "blockgroups", "init": 4},
    ],
    ids=lambda kv: kv["name"],
)
def test_what_a_failed_request_leaves_in_the_cache_reaches_nobody(overflowing, engine_for, kv):
    """Blocks with NaN go to others, of whom the short ones are padded with them."""
    base, places = overflowing
    options = {"kernel": {"paged_attention": "torch"}, "kv_tokens": 256, "max_position": 64}
    engine = engine_for(
        copy.deepcopy(base), precision="fp32", adapters=places, kv=kv, max_running=4, **options
    )
    sound = [request(f"r{n}", p[: 5 + 11 * n]) for n, p in enumerate(prompts(3, 40))]
    alone = [drain(engine, [copy.deepcopy(one)])[0][one.id] for one in sound]
    bad = [request(f"b{n}", p, "huge") for n, p in enumerate(prompts(4, 40))]
    _, failed = drain(engine, bad)
    assert len(failed) == 4
    got, failed = drain(engine, sound)
    assert failed == {}
    assert [got[one.id] for one in sound] == alone
    for blocks in engine.runner.cache.blocks:
        assert blocks.isfinite().all()


@pytest.mark.parametrize("where", ["compute", "choose", "plan", "commit"])
def test_what_nobody_foresaw_ends_requests_and_not_the_engine(random_model, engine_for, where):
    engine = engine_for(random_model(), kv_tokens=1024)
    sound = [request(f"r{n}", p) for n, p in enumerate(prompts(3, 20))]
    want, _ = drain(engine, [copy.deepcopy(one) for one in sound])
    used = engine.stats()["blocks_used"]
    broken = {"left": 1}

    def breaks(inner):
        def run(*args, **kwargs):
            if broken["left"] and (where != "choose" or any(r.id == "r1" for r in args[1])):
                broken["left"] -= where != "choose"
                raise ZeroDivisionError("nobody foresaw it")
            return inner(*args, **kwargs)

        return run

    holder, name = {
        "compute": (engine.runner.model, "flat"),
        "choose": (engine.runner, "_adjust"),
        "plan": (engine.scheduler, "plan"),
        "commit": (engine.scheduler, "commit"),
    }[where]
    setattr(holder, name, breaks(getattr(holder, name)))
    got, failed = drain(engine, [copy.deepcopy(one) for one in sound])
    if where == "choose":  # who it is, is found out
        assert set(failed) == {"r1"}
        assert {n: t for n, t in got.items() if n != "r1"} == {
            n: t for n, t in want.items() if n != "r1"
        }
        assert broken["left"]
    else:
        assert set(failed) == {"r0", "r1", "r2"}
        assert "ZeroDivisionError: nobody foresaw it" in failed["r0"]["message"]
    broken["left"] = 0
    assert drain(engine, [copy.deepcopy(one) for one in sound]) == (want, {})
    assert engine.stats()["blocks_used"] == used


@pytest.mark.parametrize("moving", [False, True])
def test_an_engine_that_swaps_goes_on_only_if_nothing_moves(random_model, engine_for, moving):
    engine = engine_for(
        random_model(), kv_tokens=192, max_position=96, preempt="swap", host_tokens=512
    )
    for number, prompt in enumerate(prompts(6, 40)):
        engine.add(request(f"r{number}", prompt, max_tokens=40))
    engine.step()
    assert not engine.scheduler.preemption.moving
    while moving and not engine.scheduler.preemption.moving:
        engine.step()

    def broken(*args):
        raise ZeroDivisionError("nobody foresaw it")

    engine.runner.execute = broken
    if moving:
        with pytest.raises(ZeroDivisionError):
            engine.step()
    else:
        engine.step()
        assert not engine.busy
        assert "error" in {one["kind"] for one in engine.drain_events()}


@pytest.mark.parametrize("accept", ["greedy", "sample_match", "rejection", "typical"])
def test_a_tree_without_a_token_ends_its_request(random_model, engine_for, accept):
    engine = engine_for(
        random_model(), speculative={"name": "ngram", "accept": accept}, kv_tokens=2048
    )
    temperature = 0.0 if accept == "greedy" else 0.8
    text = [5, 6, 7, 8] * 6

    def asked():
        return [request(f"r{n}", [9 + n, *text], temperature=temperature) for n in range(3)]

    runner = engine.runner
    inner = runner.forward
    seen = []

    def forward(chunks, trees):
        hidden, logits, first = inner(chunks, trees)
        for chunk in chunks:
            if chunk.request.id == "r1" and chunk.yields:
                rows = len(trees["r1"].shape) if "r1" in trees else 1
                seen.append(rows)
                if rows > 1:
                    logits[first["r1"] : first["r1"] + rows] = math.nan
        return hidden, logits, first

    runner.forward = forward
    runner.drafter = Knowing({f"r{n}": [9 + n, *text, *range(8)] for n in range(3)}, 160)
    engine.scheduler.drafting = FixedDrafting(4)
    want, _ = drain(engine, [one for one in asked() if one.id != "r1"])
    got, failed = drain(engine, asked())
    assert max(seen) > 1
    assert set(failed) == {"r1"}
    if accept in ("greedy", "sample_match"):  # the others' tokens depend on what was guessed
        assert {n: got[n] for n in want} == want


def test_weights_that_are_not_finite_are_refused(random_model, tmp_path, engine_for):
    model = random_model("qwen3")
    for number, bad in enumerate((math.nan, math.inf, -math.inf)):
        place = tmp_path / str(number)
        own = copy.deepcopy(model)
        own.blocks[1].mlp.down_proj.weight.data[3, 5] = bad
        huggingface.write(place, own)
        with pytest.raises(ModelError, match=r"blocks\.1\.mlp\.down_proj\.weight: 1 of .* NaN or"):
            huggingface.read(place)
        from shoal.model.parameters import Parameters

        with pytest.raises(ModelError, match="NaN or infinite"):
            Parameters(place)("blocks.1.mlp.down_proj.weight")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_adapters_that_are_not_finite_are_refused(overflowing, engine_for, tmp_path, bad):
    base, places = overflowing
    place = tmp_path / "bad"
    place.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (place / name).write_bytes((Path(places["good"]) / name).read_bytes())
    state = load_file(place / "adapter_model.safetensors")
    next(iter(state.values()))[0, 0] = bad
    save_file(state, place / "adapter_model.safetensors")
    engine = engine_for(copy.deepcopy(base), precision="fp32", max_adapters=2)
    with pytest.raises(ServeError, match=r"1 of .* NaN or infinite"):
        engine.hooks["adapters"].bank.load("bad", place)
    assert engine.hooks["adapters"].bank.names == ()


def test_guesses_behind_the_end_of_an_answer_are_not_counted(random_model, engine_for):
    """As many tokens as were given, however many were right."""
    engine = engine_for(random_model(), speculative={"name": "ngram"}, kv_tokens=2048)
    requests = [request(f"r{n}", [9 + n, 5, 6], max_tokens=20) for n in range(3)]
    want, _ = drain(engine, [copy.deepcopy(one) for one in requests])
    known = {one.id: [*one.tokens, *want[one.id], *range(8)] for one in requests}
    engine.runner.drafter = Knowing(known, 160, right=1.0)
    engine.scheduler.drafting = FixedDrafting(6)
    short = [
        dataclasses.replace(one, params=dataclasses.replace(one.params, max_tokens=11))
        for one in requests
    ]
    before = engine.stats()["tokens_generated_total"]
    got, _ = drain(engine, short)
    assert got == {name: tokens[:11] for name, tokens in want.items()}
    assert engine.stats()["tokens_generated_total"] - before == 3 * 11
