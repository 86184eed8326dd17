"""Plans of another engine: searched among what it can run, and priced as it runs them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from shoal.core.errors import PlanError
from shoal.cost.gpu.engines import ENGINES
from shoal.cost.shapes import resolve
from shoal.cost.training.step import Pricer, estimate
from shoal.ir import Estimate, TrainJob, TrainPlan, Work
from shoal.machine.described import load
from shoal.parallel.legal import check_split
from shoal.plan.emit import EMITTERS
from shoal.plan.emit.expressed import refuses
from shoal.plan.strategy import PLANNERS

HANDED_OVER = sorted(set(ENGINES) - {"shoal"})


def job(model: str = "Llama-3-8B", **given: Any) -> TrainJob:
    usual = {"seq_len": 4096, "global_batch": 64, "steps": 9}
    return TrainJob.model_validate({"model": model, **usual, **given})


def priced(machine: str = "16xH100", model: str = "Llama-3-8B", **given: Any) -> Estimate:
    concrete = {"parallel": {"dp": 16}, "shard": "zero3", "microbatch": 1, **given}
    return estimate(Work(shape=resolve(model), job=job(model, **concrete)), load(machine))


def plans(engine: str, machine: str = "16xH100", **given: Any) -> list[TrainPlan]:
    return PLANNERS.build("search").plan(job(engine=engine, **given), load(machine))


@functools.cache
def own_plans() -> list[TrainPlan]:
    """Of Shoal's own engine, so many that some are beyond the others."""
    planner = PLANNERS.build({"name": "search", "keep": 200})
    return planner.plan(job(), load("16xH100"))


@pytest.mark.parametrize("engine", HANDED_OVER)
def test_every_plan_is_one_that_the_engine_can_run(engine: str) -> None:
    found = plans(engine)
    assert found[0].fits
    for plan in found:
        assert plan.job.engine == engine
        assert refuses(plan.job, plan.shape, plan.machine) == ()
    # Shoal's own search has plans that it could not.
    emitter = EMITTERS.build(ENGINES[engine].launched_as)
    assert any(emitter.refuses(plan) for plan in own_plans())


def test_the_estimate_is_of_the_engine() -> None:
    own, titan = priced(), priced(engine="torchtitan")
    alone = Pricer(load("16xH100"), ENGINES["torchtitan"])
    concrete = job(parallel={"dp": 16}, shard="zero3", microbatch=1)
    other = alone.estimate(Work(shape=resolve("Llama-3-8B"), job=concrete))
    assert titan.step_s == other.step_s
    assert titan.step_s.value != pytest.approx(own.step_s.value, rel=0.01)
    compiled = priced(engine="torchtitan", compile=True)
    assert compiled.terms_s["memory"] < 0.8 * titan.terms_s["memory"]


def test_only_an_engine_that_can_hides_the_exchange_of_experts() -> None:
    split = {"dp": 16, "ep": 16}
    given = {"model": "Qwen3-30B-A3B", "shard": "zero1", "engine": "megatron"}
    shown = priced(**given, parallel=split)
    hidden = priced(**given, parallel={**split, "overlap": "experts"})
    share = ENGINES["megatron"].expert_overlap
    exchange = shown.terms_s["collective"] - hidden.terms_s["collective"]
    # One of four micro-batches has none beside it.
    assert 0 < exchange < share * 3 / 4 * shown.terms_s["collective"] * 1.001
    assert hidden.memory_bytes["activations"] == 2 * shown.memory_bytes["activations"]
    for wrong in (
        {"engine": "torchtitan", "parallel": {**split, "overlap": "experts"}},
        {"parallel": {"dp": 16, "overlap": "experts"}},
        {"parallel": {"dp": 8, "ep": 8, "pp": 2, "overlap": "experts"}},
        {"parallel": {**split, "overlap": "experts"}, "recompute": "full"},
    ):
        with pytest.raises(PlanError, match="engine megatron or nemo with ep above 1"):
            priced(**{**given, **wrong})
    with pytest.raises(PlanError, match="give expert_chunks"):
        check_split(
            job("Qwen3-30B-A3B", parallel={**split, "overlap": "experts"}),
            resolve("Qwen3-30B-A3B"),
        )


@pytest.mark.slow
def test_the_search_hides_the_exchange_of_experts() -> None:
    found = plans("megatron", "64xH100", model="Qwen3-30B-A3B", global_batch=512, products="fp8")
    assert "experts" in {plan.job.parallel.overlap for plan in found}


def test_what_an_engine_hides_may_change_which_plan_is_best() -> None:
    # Megatron hides most of tensor parallelism's sums; Shoal waits for them.
    wide = {"dp": 2, "tp": 8, "sp": True}
    found = {
        engine: (
            priced(engine=engine, shard="zero1", parallel=wide),
            priced(engine=engine, shard="zero1"),
        )
        for engine in ("shoal", "megatron")
    }
    shoal, megatron = (wide.step_s.value / plain.step_s.value for wide, plain in found.values())
    assert megatron < 0.92 * shoal
    shown = {engine: pair[0].terms_s["collective"] for engine, pair in found.items()}
    assert shown["megatron"] < 0.5 * shown["shoal"]


def test_an_optimizer_with_weights_of_its_own_leaves_less_elsewhere() -> None:
    parameters = 8.03e9
    titan, megatron = (priced(engine=e, shard="zero1") for e in ("torchtitan", "megatron"))
    assert titan.memory_bytes["weights"] == pytest.approx(6 * parameters, rel=0.01)
    assert megatron.memory_bytes["weights"] == pytest.approx(2 * parameters, rel=0.01)
    assert megatron.memory_bytes["optimizer"] == pytest.approx(12 * parameters / 16, rel=0.01)


def test_products_in_eight_bits_are_faster_and_keep_copies() -> None:
    plain, low = (
        priced(engine="megatron", shard="zero1", products=kind) for kind in ("same", "fp8")
    )
    assert low.terms_s["matmul"] < 0.7 * plain.terms_s["matmul"]
    assert low.terms_s["memory"] > plain.terms_s["memory"]  # quantising
    assert low.terms_s["attention"] == plain.terms_s["attention"]
    assert low.memory_bytes["weights"] == pytest.approx(2 * plain.memory_bytes["weights"])


def test_selective_lies_between_none_and_full() -> None:
    ways = [priced(recompute=way) for way in ("none", "selective", "full")]
    seconds = [one.step_s.value for one in ways]
    kept = [one.memory_bytes["activations"] for one in ways]
    assert seconds == sorted(seconds) and kept == sorted(kept, reverse=True)
    assert ways[1].terms_s["matmul"] == ways[0].terms_s["matmul"] < ways[2].terms_s["matmul"]
    # torchtitan's keeps every other product.
    titan = [priced(engine="torchtitan", recompute=way) for way in ("none", "selective", "full")]
    products = [one.terms_s["matmul"] for one in titan]
    assert products[0] < products[1] < products[2]


def test_llama_8b_under_torchtitan_on_the_devices_of_its_report() -> None:
    """6,667 tokens/s of one of eight H100 of 500 W, compiled, half of the products again."""
    from shoal.cost.published.devices import gpu
    from shoal.cost.published.runs import machine_of

    given = {"parallel": {"dp": 8}, "shard": "zero3", "microbatch": 1, "recompute": "selective"}
    one = job("Llama-3.1-8B", engine="torchtitan", compile=True, **given)
    one = one.model_copy(update={"seq_len": 8192, "global_batch": 8})
    machine = machine_of(gpu("H100-96GB-500W"), 8)
    cost = estimate(Work(shape=resolve("Llama-3.1-8B"), job=one), machine)
    assert cost.tokens_per_s / 8 == pytest.approx(6667, rel=0.15)


@pytest.mark.parametrize(
    ("given", "machine", "named"),
    [
        ({"products": "fp8"}, "16xH100", "engine shoal .* megatron or nemo or torchtitan"),
        ({"products": "fp8", "engine": "deepspeed"}, "16xH100", "engine deepspeed"),
        ({"products": "fp8", "engine": "megatron"}, "16xA100", "A100 .* no such products"),
        ({"products": "mxfp8", "engine": "megatron"}, "16xH100", "H100 .* give fp8"),
    ],
)
def test_a_type_without_effect_is_refused(given: dict[str, Any], machine: str, named: str) -> None:
    with pytest.raises(PlanError, match=named):
        priced(machine, **given)


@pytest.mark.parametrize("planner", ["rules", "megatron"])
def test_other_planners_leave_out_what_the_engine_cannot_run(planner: str) -> None:
    def planned(**given: Any) -> list[TrainPlan]:
        asked = job("Llama-3-8B", engine="torchtitan", **given)
        return PLANNERS.build({"name": planner}).plan(asked, load("16xH100"))

    emitter = EMITTERS.build("torchtitan")
    assert all(not emitter.refuses(plan) for plan in planned())
    with pytest.raises(PlanError, match=r"torchtitan: it cannot run any .* optimizer = muon"):
        planned(optimizer="muon")


def test_what_an_engine_cannot_run_is_named() -> None:
    with pytest.raises(PlanError, match=r"torchtitan: it cannot run any .* model = pythia-12b"):
        plans("torchtitan", model="pythia-12b", seq_len=2048)


def test_shoal_runs_its_own_plans_alone() -> None:
    with pytest.raises(PlanError, match="expected shoal"):
        check_split(job(engine="megatron", microbatch=1), resolve("Llama-3-8B"))
    with pytest.raises(PlanError, match=r"products = 'fp8'.*expected same"):
        check_split(job(products="fp8", microbatch=1), resolve("Llama-3-8B"))


def test_launch_files_say_what_was_priced() -> None:
    low = {"products": "fp8", "parallel": {"dp": 16}, "shard": "zero3"}
    titan = plans("torchtitan", **low, recompute="selective")[0]
    text = EMITTERS.build("torchtitan").emit(titan)["shoal_plan.py"]
    assert "activation_checkpoint=SelectiveAC.Config()" in text
    assert "import SelectiveAC" in text and "import Float8LinearConverter" in text
    assert 'converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"]' in text
    compile(text, "shoal_plan.py", "exec")
    mixture = plans("megatron", "16xH200", model="Mixtral-8x7B-v0.1", **low, recompute="selective")[
        0
    ]
    words = EMITTERS.build("megatron").emit(mixture)["launch.sh"]
    assert "--fp8-format hybrid" in words and "--fp8-recipe tensorwise" in words
    assert "--recompute-granularity selective" in words
    assert "--recompute-modules layernorm moe_act" in words
    latent = plans("megatron", "16xH200", model="DeepSeek-V2-Lite")[0]
    words = EMITTERS.build("megatron").emit(latent)["launch.sh"]
    assert "--multi-latent-attention" in words and "--kv-lora-rank 512" in words
    assert "--group-query-attention" not in words
    again = plans("megatron", "16xH200", model="DeepSeek-V2-Lite", recompute="selective")[0]
    assert "moe_act mla_up_proj" in EMITTERS.build("megatron").emit(again)["launch.sh"]
