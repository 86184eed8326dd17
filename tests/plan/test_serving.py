"""Plans of serving jobs: what fits, what is chosen, what the prediction rests on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.core.errors import (
    ConfigError,
    KernelError,
    ModelError,
    PlanError,
    ServeError,
    ShoalError,
)
from shoal.core.parts import Choice, table
from shoal.core.random import generator
from shoal.cost.arithmetic import parameters
from shoal.cost.serving.fleet import SimulatedInstance, simulate_fleet
from shoal.cost.serving.simulator import simulate, simulate_ahead
from shoal.cost.shapes import find
from shoal.cost.step_cost.fitted import FittedStepCost
from shoal.cost.step_cost.predicted import predicted_step_cost
from shoal.cost.step_cost.roofline import cache_bytes_per_token
from shoal.ir import Arrival, Machine, ServeJob, ServePlan
from shoal.machine.described import load
from shoal.plan.batching.balanced import Balanced
from shoal.plan.batching.schedulers.ahead import AheadScheduler
from shoal.plan.serving.choices import splits
from shoal.plan.serving.inputs import arrivals_of, precision_of
from shoal.plan.serving.memory import token_bytes
from shoal.plan.serving.plans import competing, plan_serve
from shoal.plan.serving.simulation import (
    _AtPace,
    at_pace,
    build_scheduler,
    simulate_plan,
    step_cost_of,
)
from shoal.plan.serving.table import choices, numbers, rank, rates, tables

LAPTOP = load("laptop")
LINE = FittedStepCost(
    step=2e-3, token=1e-4, prompt_pair=1e-8, decode_key=1e-7, chunk=1e-5, error_p90=0.2
)
KEYS = {
    "tokens_per_s",
    "requests_per_s",
    "total_s",
    *(f"{n}_{w}_s" for n in ("ttft", "tpot", "e2e") for w in ("mean", "p50", "p95", "p99")),
}


def job(model: str = "shoal-4m", **changes: Any) -> ServeJob:
    workload = changes.pop("workload", {"name": "chat", "requests": 20, "scale": 4})
    return ServeJob.model_validate({"model": model, "workload": workload, **changes})


def test_a_plan_is_concrete_and_tells_what_it_predicts(tmp_path: Path) -> None:
    plan = plan_serve(job(), LAPTOP)
    assert plan.fits
    assert set(plan.predicted) == KEYS
    assert (plan.job.precision, plan.job.max_position) == ("fp32", 2048)
    assert plan.job.kv_tokens == 64 * 2048, "as many as max_running requests can need"
    assert plan.estimate is not None
    assert set(plan.estimate.memory_bytes) == {"weights", "cache", "activations", "runtime"}
    shape = find("shoal-4m")
    assert plan.estimate.memory_bytes["weights"] == 4 * parameters(shape)
    assert plan.estimate.memory_bytes["cache"] == plan.job.kv_tokens * cache_bytes_per_token(
        shape, "fp32"
    )
    assert sum(plan.estimate.terms_s.values()) == pytest.approx(plan.estimate.step_s.value)
    assert plan.estimate.bound in ("compute", "memory", "overhead")
    assert "seed 0" in plan.notes[0]
    plan.save(tmp_path / "plan.yaml")
    assert ServePlan.load(tmp_path / "plan.yaml") == plan
    assert plan_serve(job(), LAPTOP) == plan, "the same question has the same answer"


def test_the_prediction_is_a_simulation_with_the_cost_that_was_given() -> None:
    request = job(workload={"name": "code", "requests": 30, "rate": 5.0})
    plan = plan_serve(request, LAPTOP, cost=LINE)
    arrivals = arrivals_of(request, find("shoal-4m"))
    seen = simulate(build_scheduler(plan.job), LINE, arrivals).quantities()
    assert {name: interval.value for name, interval in plan.predicted.items()} == seen
    again = plan_serve(request, LAPTOP, cost=LINE, trace=arrivals)
    assert again.predicted == plan.predicted
    assert plan.estimate is not None
    tokens = int(plan.estimate.tokens)
    context = round(sum(len(a.prompt) + a.output_tokens / 2 for a in arrivals) / len(arrivals))
    assert plan.estimate.step_s.value == pytest.approx(LINE.seconds([(context, 1)] * tokens))


def test_a_roofline_is_less_sure_than_a_fit() -> None:
    request = job()

    def width(plan: ServePlan) -> float:
        result = plan.predicted["tokens_per_s"]
        assert result.low < result.value < result.high
        return result.high / result.low

    assert width(plan_serve(request, LAPTOP)) > width(plan_serve(request, LAPTOP, cost=LINE)) > 1.2


def test_a_shape_that_needs_no_files_has_the_precision_of_its_kind(tmp_path: Path) -> None:
    assert precision_of(job("shoal-4m")) == "fp32"
    assert precision_of(job("Qwen3-0.6B")) == "bf16"
    assert precision_of(job("Qwen3-0.6B", precision="fp32")) == "fp32"
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 128,
    }
    for dtype, expected in (("bfloat16", "bf16"), ("float32", "fp32"), (None, "fp32")):
        text = json.dumps({**config, **({"torch_dtype": dtype} if dtype else {})})
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        assert precision_of(job(str(tmp_path))) == expected
        assert plan_serve(job(str(tmp_path)), LAPTOP).job.precision == expected


def test_the_cache_takes_what_the_memory_allows() -> None:
    """Weights, cache, activations and runtime fill what may be filled, to a block."""
    plan = plan_serve(job("Qwen3-4B", max_position=4096), LAPTOP)
    assert plan.fits
    assert plan.estimate is not None
    most = 0.85 * LAPTOP.device.main_memory.capacity_bytes
    block = 16 * cache_bytes_per_token(find("Qwen3-4B"), "bf16")
    assert most - block < plan.estimate.memory_total <= most
    assert plan.job.kv_tokens is not None
    assert plan.job.kv_tokens % 16 == 0


def test_weights_and_cache_of_few_bits_are_counted_as_they_are_kept() -> None:
    shape = find("Qwen3-4B")
    plain, small = (
        plan_serve(job("Qwen3-4B", max_position=4096, kv_tokens=8192, **fields), LAPTOP)
        for fields in ({}, {"weights": "int4-g128", "kv_format": "int8"})
    )
    assert plain.estimate is not None
    assert small.estimate is not None
    before, after = plain.estimate.memory_bytes, small.estimate.memory_bytes
    # A scale of 16 bits for 128 weights; embedding (which is the output matrix) and norms stay.
    beside = shape.vocab_size * shape.hidden * 2
    assert after["weights"] - beside == pytest.approx(
        (before["weights"] - beside) * 4.125 / 16, rel=1e-3
    )
    heads = shape.num_layers * shape.num_kv_heads
    assert after["cache"] == 8192 * 2 * heads * (shape.head_dim + 4)
    assert small.estimate.step_s.value < plain.estimate.step_s.value
    with pytest.raises(KernelError, match="weight format 'int4g': '4g' is not a width"):
        plan_serve(job("Qwen3-4B", weights="int4g"), LAPTOP)


def test_a_model_of_long_requests_is_served_with_shorter_ones() -> None:
    plan = plan_serve(job("Llama-3.1-8B"), load("RTX-4090"))
    assert plan.fits
    assert plan.job.max_position == plan.job.kv_tokens
    assert plan.job.max_position is not None
    assert 16_384 < plan.job.max_position < 131_072
    assert any("does not hold a request of the model's 131072" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("asked", "remedy"),
    [
        (job("Qwen3-14B"), "needs a device with "),
        (job("Qwen3-8B", max_position=40_960), "needs a device with "),
        (job("Qwen3-4B", precision="fp32", max_position=8192), "precision = bf16 would fit"),
        (job("Qwen3-4B", max_position=40_960, precision="fp32"), "bf16 with max_position = "),
        (job("Qwen3-4B", max_position=40_960), "max_position = "),
        (job("Qwen3-4B"), ""),
        (job("Qwen3-4B", kv_tokens=10_000_000), "kv_tokens = "),
    ],
    ids=str,
)
def test_says_what_would_fit(asked: ServeJob, remedy: str) -> None:
    plan = plan_serve(asked, LAPTOP)
    assert plan.fits == (not remedy)
    if plan.fits:
        return
    assert plan.predicted == {}
    assert plan.why.startswith("does not fit: ")
    assert any(remedy in note for note in plan.notes), plan.notes
    assert any("needs a device with" in note for note in plan.notes)
    # What it names is true.
    for note in plan.notes:
        if note.endswith(" would fit"):
            changes = dict(word.split(" = ") for word in note[: -len(" would fit")].split(" with "))
            again = plan_serve(asked.model_copy(update=_typed(changes)), LAPTOP)
            assert again.fits, note


def _typed(changes: dict[str, str]) -> dict[str, object]:
    return {key: int(text) if text.isdigit() else text for key, text in changes.items()}


def test_says_what_binds() -> None:
    idle = plan_serve(job(workload={"name": "code", "rate": 0.01, "requests": 5}), LAPTOP)
    assert "the server is idle" in idle.why
    crowded = plan_serve(
        job(workload={"name": "code", "rate": 1e4, "requests": 300}, max_running=2), LAPTOP
    )
    assert "overloaded: when the last of 300 requests arrives" in crowded.why
    full = plan_serve(job(kv_tokens=1024, scheduler={"name": "fcfs", "watermark": 0}), LAPTOP)
    assert any("more kv_tokens" in note for note in full.notes)
    shared = plan_serve(job(workload={"name": "shared_prefix", "scale": 8}), LAPTOP)
    assert any("% of the prompt tokens were in the cache" in note for note in shared.notes)
    many = plan_serve(job("Qwen3-0.6B"), load("8xH100"))
    assert any("7 of the 8 devices of 8xH100 are not used" in note for note in many.notes)


def rivals(asked: ServeJob, machine: Machine = LAPTOP) -> list[ServePlan]:
    return competing(asked, plan_serve(asked, machine), divide=False)


def test_parts_compete_where_they_offer_themselves() -> None:
    """All at once in a large cache there is nothing to choose; in a small one there is."""

    def names(plans: list[ServePlan]) -> set[tuple[str, str]]:
        return {(one.job.scheduler.name, one.job.kv.name) for one in plans}

    assert names(rivals(job())) == {("fcfs", "paged")}
    over_time = {"name": "chat", "requests": 20, "scale": 4, "rate": 5.0}
    assert names(rivals(job(workload=over_time))) == {("fcfs", "paged"), ("prefill_first", "paged")}
    every = {(s, kv) for s in ("fcfs", "fair") for kv in ("paged", "blockgroups")}
    # A group of blocks is larger than some caches: what cannot be built does not compete.
    assert names(rivals(job(kv_tokens=1024))) == every
    assert names(rivals(job(kv_tokens=512, max_position=512))) == {
        ("fcfs", "paged"),
        ("fair", "paged"),
    }
    # What was asked for competes, whether it offers itself or not.
    request = job(kv="slots", scheduler="static")
    assert names(rivals(request)) == {
        (s, kv) for s in ("static", "fcfs") for kv in ("slots", "paged")
    }


def test_competitors_serve_the_same_requests() -> None:
    request = job(kv_tokens=1024, max_position=1000)
    assert all(one.job.max_position == 1000 for one in rivals(request))
    assert len({one.notes[0] for one in rivals(request)}) == 1
    short = plan_serve(job(kv="slots"), LAPTOP)
    assert short.job.max_position == 512
    assert short.job.kv_tokens is not None
    assert short.job.kv_tokens % 512 == 0


def test_a_drafter_competes_when_there_is_one_and_text_that_repeats_itself(tmp_path: Path) -> None:
    def guessing(asked: ServeJob, *drafters: str) -> set[str]:
        result = competing(asked, plan_serve(asked, LAPTOP), drafters=drafters, divide=False)
        return {one.job.speculative.name for one in result if one.job.speculative is not None}

    code = job(workload={"name": "code", "requests": 4, "scale": 4})
    assert guessing(job()) == set()
    assert guessing(code) == {"ngram"}
    notes = plan_serve(code.model_copy(update={"speculative": Choice(name="ngram")}), LAPTOP).notes
    assert any("30% of the guesses" in note for note in notes)
    heads = {"name": "medusa", "target": "0" * 64, "vocab_size": 512, "hidden": 64}
    (tmp_path / "drafter.json").write_text(json.dumps({**heads, "calibration": [[0.5], [0.3]]}))
    assert guessing(job(), str(tmp_path)) == {"medusa"}
    for request, directory in ((job(), tmp_path / "nowhere"), (job(replicas=2), tmp_path)):
        with pytest.raises(PlanError, match=r"--drafter = .*: expected the directory of a drafter"):
            guessing(request, str(directory))
    (tmp_path / "drafter.json").write_text("{")
    with pytest.raises(ShoalError, match="cannot be read"):
        guessing(job(), str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"speculative": "ngram", "scheduler": "static"},
            r"scheduler = static with speculative = ngram: static has the trait fixed_batches .*"
            r"legal with it: fcfs, fair, prefill_first$",
        ),
        (
            {"speculative": "ngram", "kv": "slots"},
            r"kv = slots with speculative = ngram: slots lacks the trait takes_back .*"
            r"legal with it: paged, blockgroups$",
        ),
        (
            {"kv": "distributed", "preempt": "swap"},
            r"preempt = swap with kv = distributed: swap has the trait swaps_cache .*"
            r"legal with it: recompute$",
        ),
        (
            {"max_adapters": 2, "kv": "distributed"},
            r"kv = distributed with adapters: distributed has the trait lends_blocks",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_named_with_the_trait(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        job(**changes)


def test_continuous_batching_and_paging_rank_first_where_they_should() -> None:
    """Mixed lengths, a rate, and a cache that is too small to reserve whole lengths."""
    request = job(
        workload={"name": "chat", "requests": 60, "scale": 4}, kv_tokens=4096, max_running=32
    )
    others = [
        request.model_copy(update={"scheduler": Choice(name=scheduler), "kv": Choice(name=kv)})
        for scheduler in ("static", "temporal_fusion")
        for kv in ("paged", "contiguous")
    ]
    plans = [plan_serve(one, LAPTOP) for one in [*others, request]]
    ranked = rank(plans)
    assert ranked[0].job.scheduler.name == "fcfs"
    assert ranked[0].job.kv.name == "paged"
    rows = numbers(ranked).records()
    # Of one device, and it has one.
    assert [row["tok/s"] for row in rows] == [r["tokens/s"] for r in rates(ranked).records()]
    assert "USD/M" not in rows[0]  # a laptop has no price
    assert choices(ranked).records()[0]["plan"] == "fcfs paged fp32"
    unfit = plan_serve(job("Qwen3-14B"), LAPTOP)
    assert rank([unfit, *plans])[-1] is unfit
    assert tables([unfit])[0].title == "no plan fits in memory"


def test_agrees_with_a_published_measurement() -> None:
    """vLLM 0.19 serves 300 ShareGPT requests, 10 a second, to Llama-3.1-8B on an RTX 4090.

    Its mean time to the first token is 65.5 s and per token 32.4 ms (LLMServingSim,
    bench/examples, 2026). The lengths here are log-normal with the means that it names.
    """
    draw = generator(0, purpose="sharegpt")

    def length(mean: float, sigma: float) -> int:
        return min(
            6000, max(4, int(mean * math.exp(sigma * draw.standard_normal() - sigma**2 / 2)))
        )

    trace = [
        Arrival(float(at), (index,) * length(857, 1.0), length(653, 0.8))
        for index, at in enumerate(np.cumsum(draw.exponential(0.1, 300)))
    ]
    machine, shape = load("RTX-4090"), find("Llama-3.1-8B")
    limits = {"max_running": 256, "max_step_tokens": 2048, "max_position": 16384}
    sized = plan_serve(job("Llama-3.1-8B", **limits), machine, trace=trace[:1]).job
    cost = predicted_step_cost(machine, shape, "bf16", engine="vllm")
    seen = simulate(build_scheduler(sized), cost, trace).served
    # The wait is that of a queue that grows, which the lengths drawn change by a fifth.
    assert np.mean([one.ttft for one in seen]) == pytest.approx(65.5, rel=0.3)
    assert np.mean([one.tpot for one in seen]) == pytest.approx(0.0324, rel=0.1)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (job("Qwen3-14"), ModelError, "Qwen3-14B"),
        (job(max_position=4096), PlanError, "max_position = 4096: expected 2 to 2048"),
        (job(max_position=1), PlanError, "max_position = 1: expected 2 to 2048"),
        (job(kv_tokens=8), ConfigError, "kv_tokens = 8: expected at least one block of 16"),
        (job(kv_tokens=64), ServeError, "keep in the cache = .*serve with more kv_tokens"),
    ],
)
def test_refuses_what_cannot_be_planned(
    asked: ServeJob, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        plan_serve(asked, LAPTOP)


def test_refuses_an_open_job_where_a_concrete_one_is_needed() -> None:
    with pytest.raises(PlanError, match="kv_tokens and max_position: expected numbers"):
        build_scheduler(job())


def test_a_workload_of_nothing_is_refused() -> None:
    nothing: Sequence[Arrival] = []
    with pytest.raises(ConfigError, match="trace = 0: expected at least one request"):
        plan_serve(job(), LAPTOP, trace=nothing)


SPLIT = {"name": "chat", "requests": 60, "rate": 1000.0, "scale": 4}


def test_ranks_share_weights_cache_and_time() -> None:
    machine = load("4xH100")
    whole = plan_serve(job("Qwen3-8B", workload=SPLIT, max_position=4096), machine)
    for parallel in ({"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}):
        request = job("Qwen3-8B", workload=SPLIT, max_position=4096, parallel=parallel)
        plan = plan_serve(request, machine)
        world = request.parallel.world
        assert plan.estimate is not None
        assert whole.estimate is not None
        memory = plan.estimate.memory_bytes
        assert memory["weights"] == pytest.approx(whole.estimate.memory_bytes["weights"] / world)
        token = cache_bytes_per_token(plan.shape, "bf16") / world
        assert memory["cache"] == pytest.approx(plan.job.kv_tokens * token)
        assert plan.estimate.terms_s["communication"] > 0
        assert plan.predicted["tokens_per_s"].value > whole.predicted["tokens_per_s"].value
    assert "communication" not in whole.estimate.terms_s
    assert "3 of the 4 devices" in " ".join(whole.notes)


def test_heads_that_do_not_suffice_are_held_twice() -> None:
    shape = find("Qwen3-0.6B")  # 8 heads of keys
    size = [
        token_bytes(job("Qwen3-0.6B", parallel={"tp": tp}), shape, "bf16") for tp in (1, 4, 8, 16)
    ]
    assert size == [size[0], size[0] / 4, size[0] / 8, size[0] / 8]


def test_a_model_too_large_for_one_device_is_told_how_many() -> None:
    machine = load("4xH100")
    plan = plan_serve(job("Llama-3.1-70B", workload=SPLIT, max_position=4096), machine)
    assert not plan.fits
    assert "parallel.tp = 4 would fit" in " ".join(plan.notes)
    plan = plan_serve(
        job("Llama-3.1-70B", workload=SPLIT, max_position=4096, parallel={"tp": 4}), machine
    )
    assert plan.fits
    assert "tp4" in choices([plan]).records()[0]["plan"]


def test_a_balancer_changes_what_replicas_have_in_their_caches() -> None:
    """By turns each replica computes each beginning; sent where it was, one does."""
    shared = {"name": "shared_prefix", "requests": 60, "rate": 20.0, "scale": 2}
    fields = {}
    for balancer in ("round_robin", "least_loaded", "prefix_aware"):
        request = job(workload=shared, replicas=3, balancer=balancer, threads=1)
        plan = plan_serve(request, LAPTOP, cost=LINE)
        fields[balancer] = plan.predicted["ttft_p50_s"].value
        seen = simulate_plan(plan.job, LAPTOP, LINE, arrivals_of(plan.job, plan.shape))
        assert len(seen.served) == 60
        fields[balancer, "cached"] = sum(one.n_cached for one in seen.served)
    assert fields["prefix_aware", "cached"] > fields["round_robin", "cached"]
    assert fields["prefix_aware"] != fields["round_robin"]


def test_one_replica_behind_a_balancer_is_the_plain_simulation() -> None:
    request = plan_serve(job(workload={"name": "code", "requests": 40, "rate": 20.0}), LAPTOP).job
    arrivals = arrivals_of(request, find("shoal-4m"))
    dispatcher = Balanced(table("balancer").build("prefix_aware").build(), 1, arrivals)
    fleet = simulate_fleet(
        [SimulatedInstance(build_scheduler(request), LINE)], [], dispatcher, arrivals
    )
    plain = simulate(build_scheduler(request), LINE, arrivals)
    for ours, theirs in zip(fleet.served, plain.served, strict=True):
        assert ours.finish == pytest.approx(theirs.finish)


def test_splits_that_compete_are_those_that_can_be() -> None:
    request = job("Qwen3-8B", workload=SPLIT)
    result = {(one.parallel.tp, one.parallel.pp) for one in splits(request, load("4xH100"))}
    assert result == {(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert splits(job(), LAPTOP) == []


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"tp": 3}, r"parallel\.tp = 3: expected a divisor"),
        ({"pp": 99}, r"parallel\.pp = 99: expected at most 36"),
        ({"tp": 4, "pp": 2}, r"at most 4 ranks, the devices of"),
        ({"tp": 2, "replicas": 3}, r"at most 4 ranks, the devices of"),
        ({"pp": 2, "replicas": 2}, r"replicas = 2: expected 1 where steps are under way together"),
    ],
)
def test_ranks_that_cannot_be(parallel: dict[str, int], said: str) -> None:
    number = parallel.pop("replicas", 1)
    request = job("Qwen3-8B", workload=SPLIT, parallel=parallel, replicas=number)
    with pytest.raises(PlanError, match=said):
        plan_serve(request, load("4xH100"))


def test_one_stage_ahead_of_nobody_is_the_plain_simulation() -> None:
    request = plan_serve(job(workload={"name": "code", "requests": 40, "rate": 20.0}), LAPTOP).job
    arrivals = arrivals_of(request, find("shoal-4m"))
    scheduler = build_scheduler(request)
    ahead = simulate_ahead(scheduler, AheadScheduler(scheduler, 1), LINE, arrivals, stages=1)
    assert ahead.served == simulate(build_scheduler(request), LINE, arrivals).served


def test_a_pipeline_begins_a_step_while_another_is_in_later_stages() -> None:
    """Equal decodes of two groups, on two stages: twice as many steps in the same time."""
    flat = FittedStepCost(step=1.0, token=0.0, prompt_pair=0.0, decode_key=0.0, chunk=0.0)
    arrivals = [Arrival(0.0, (1,) * 4, 9) for _ in range(4)]
    request = job(kv_tokens=256, max_position=32, precision="fp32")
    alone = simulate_plan(request, LAPTOP, flat, arrivals)
    split = request.model_copy(update={"parallel": request.parallel.model_copy(update={"pp": 2})})
    pipeline = simulate_plan(split, LAPTOP, flat, arrivals)
    assert {one.n_output for one in pipeline.served} == {9}
    assert len(alone.steps) == 9
    # After the prompts, which are one step, two groups generate in turns, half a step apart.
    assert alone.quantities()["total_s"] == 9.0
    assert pipeline.quantities()["total_s"] <= 9.5 + 1.0
    assert len(pipeline.steps) >= 16


def test_a_model_of_masked_diffusion_is_planned_by_passes() -> None:
    """Every number from the windows, written out."""
    work = [Arrival(0.0, tuple(range(20)), 32)]
    decode = {"name": "diffusion", "block": 16, "refresh": "dual", "expected": 4.0}
    request = job("shoal-mdlm-3m", decode=decode, max_position=64)
    plan = plan_serve(request, LAPTOP, cost=LINE, trace=work)
    whole, block = LINE.seconds([(0, 52)]), LINE.seconds([(36, 16)])
    assert plan.predicted["total_s"].value == pytest.approx(2 * (whole + 3 * block))
    assert plan.predicted["ttft_mean_s"].value == pytest.approx(whole + 3 * block)
    one = job("shoal-mdlm-3m", decode={**decode, "unmask": "fixed"}, max_position=64)
    slow = plan_serve(one, LAPTOP, cost=LINE, trace=work)
    assert slow.predicted["total_s"].value == pytest.approx(2 * (whole + 15 * block))
    with pytest.raises(PlanError, match="expected diffusion for shoal-mdlm-3m"):
        plan_serve(job("shoal-mdlm-3m"), LAPTOP)
    with pytest.raises(PlanError, match="expected autoregressive for shoal-4m"):
        plan_serve(job(decode="diffusion"), LAPTOP)


CHOICES = [
    *({"kv": name} for name in table("kv")),
    *({"scheduler": name} for name in table("scheduler")),
    *({"preempt": name, "host_tokens": 2048} for name in ("swap", "auto")),
    {"speculative": "ngram"},
    {"replicas": 2, "threads": 1},
    {"model": "shoal-mdlm-3m", "decode": "diffusion"},
]


@pytest.mark.parametrize("rate", [None, 5.0])
@pytest.mark.parametrize("fields", CHOICES, ids=str)
def test_every_kind_of_simulation_has_the_ends_of_a_simulation(
    fields: dict[str, Any], rate: float | None
) -> None:
    """However its quantities at another pace are found, they are those of simulating it."""
    workload = {"name": "chat", "requests": 24, "rate": rate, "scale": 8}
    request = job(**{"workload": workload, "kv_tokens": 2048, **fields})
    plan = plan_serve(request, LAPTOP)
    cost = step_cost_of(plan.job, LAPTOP)
    arrivals = arrivals_of(plan.job, plan.shape)
    seen = simulate_plan(plan.job, LAPTOP, cost, arrivals)
    slower = simulate_plan(plan.job, LAPTOP, _AtPace(cost, 1.4), arrivals)
    found = at_pace(plan.job, LAPTOP, cost, arrivals, seen, 1.4)
    assert found == slower.quantities()
