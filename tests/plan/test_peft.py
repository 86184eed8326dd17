"""The advice on fine-tuning follows what is asked for."""

from __future__ import annotations

import pytest

from shoal.core.errors import PlanError
from shoal.core.parts import Choice
from shoal.cost.shapes import resolve
from shoal.cost.training.step import estimate
from shoal.ir import Machine, TrainJob, Work
from shoal.machine.described import load
from shoal.plan.peft import advise
from shoal.plan.strategy.search import SearchPlanner
from shoal.train.peft import PEFTS


@pytest.fixture(scope="module")
def machine() -> Machine:
    return load("1xH100")


def job(**changes: object) -> TrainJob:
    return TrainJob.model_validate(
        {"model": "Llama-3-8B", "steps": 10, "seq_len": 512, "global_batch": 4, **changes}
    )


def test_every_method_is_judged_and_those_that_fit_come_first(machine: Machine) -> None:
    result = advise(job(), machine)
    assert {one.method.name for one in result} == set(PEFTS)
    fits = [one.fits for one in result]
    assert fits == sorted(fits, reverse=True)
    assert all(one.reason for one in result)
    by_name = {one.method.name: one for one in result}
    # Llama 3 8B: q 4096 x 4096 and v 1024 x 4096 in 32 layers.
    assert by_name["lora"].trained == 8 * (4096 + 4096 + 1024 + 4096) * 32
    assert by_name["lora"].memory_bytes["gradients"] == pytest.approx(4 * by_name["lora"].trained)
    assert by_name["qlora"].peak_bytes < 0.5 * by_name["lora"].peak_bytes
    assert by_name["mezo"].memory_bytes["gradients"] == 0


def test_budget_merging_and_tenants(machine: Machine) -> None:
    tight = advise(job(), machine, budget_bytes=12 * 2**30)
    assert tight[0].method.name in ("qlora", "loftq")
    assert "GB" in next(one for one in tight if one.method.name == "lora").reason
    merged = {one.method.name for one in advise(job(), machine, must_merge=True) if one.fits}
    assert "lora" in merged and not merged & {"adapter", "prefix", "ladder"}
    many = [one for one in advise(job(), machine, tenants=16) if one.fits]
    assert {one.method.name for one in many} <= {
        "lora", "rslora", "lora_fa", "dylora", "adalora", "vera",
    }  # fmt: skip
    assert all(one.added_share > 0 for one in many)
    with pytest.raises(PlanError, match="tenants"):
        advise(job(), machine, tenants=0)


def test_a_share_and_methods_of_ones_own(machine: Machine) -> None:
    wide = Choice(name="lora", options={"r": 256, "targets": "*_proj"})
    thin, wide_one = (
        next(one for one in advise(job(), machine, share=0.03, methods=[Choice(name="lora"), wide])
             if one.method == wanted)
        for wanted in (Choice(name="lora"), wide)
    )  # fmt: skip
    assert thin.fits and not wide_one.fits
    assert "trains" in wide_one.reason
    with pytest.raises(PlanError, match="share"):
        advise(job(), machine, share=2)


def test_the_estimate_feels_the_method(machine: Machine) -> None:
    shape = resolve("Llama-3-8B")

    def of(**changes: object) -> object:
        return estimate(Work(shape=shape, job=job(microbatch=1, **changes)), machine)

    whole, tuned = of(), of(finetune=Choice(name="lora"))
    assert tuned.memory_bytes["optimizer"] < 0.01 * whole.memory_bytes["optimizer"]
    assert tuned.step_s.value < whole.step_s.value


def test_a_method_is_chosen_only_if_some_plan_fits() -> None:
    """8B parameters on 24 GB: in bf16 they do not fit beside 4096 tokens, in four bits they do."""
    card = load("1xRTX-4090")
    open_job = TrainJob(model="Llama-3-8B", steps=10, seq_len=4096, global_batch=128)
    best = advise(open_job, card)[0]
    assert best.fits and best.method.name == "qlora"
    plan = SearchPlanner(keep=1).plan(open_job.model_copy(update={"finetune": best.method}), card)
    assert plan[0].fits
    plain = open_job.model_copy(update={"recompute": "none"})
    by_name = {one.method.name: one for one in advise(plain, card)}
    assert by_name["qlora"].peak_bytes > best.peak_bytes


def test_a_base_is_divided_where_it_does_not_fit_whole() -> None:
    eight = load("8xH100")
    wanted = TrainJob(
        model="Llama-3-70B", steps=10, seq_len=4096, global_batch=128, finetune=Choice(name="lora")
    )
    best = SearchPlanner(keep=1).plan(wanted, eight)[0]
    assert best.fits and best.job.base == "divided" and best.job.parallel.dp == 8
    assert best.estimate is not None
    # Of 68.5 G weights in the blocks each rank has an eighth, in bf16.
    assert best.estimate.memory_bytes["base"] == pytest.approx(2 * (68.5e9 / 8 + 2.1e9), rel=0.01)
    own = SearchPlanner(keep=1).plan(
        TrainJob.model_validate({**wanted.model_dump(exclude_unset=True), "base": "own"}), eight
    )
    assert not own[0].fits
    small = SearchPlanner(keep=1).plan(job(finetune=Choice(name="lora"), model="Llama-3-8B"), eight)
    assert small[0].job.base == "own", "what fits whole is not gathered"
    with pytest.raises(PlanError, match="base = 'divided': expected own on 1xH100"):
        SearchPlanner().plan(
            TrainJob.model_validate(
                {**wanted.model_dump(exclude_unset=True), "base": "divided", "model": "Llama-3-8B"}
            ),
            load("1xH100"),
        )
