"""A plan that is handed over is priced as the other engine runs it."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cost.gpu.engines import MEGATRON, TORCHTITAN
from shoal.cost.shapes import resolve
from shoal.cost.training.step import Pricer
from shoal.ir import ServeJob, ServePlan, TrainJob, TrainPlan, Work
from shoal.machine.described import load
from shoal.plan.emit import EMITTERS
from shoal.plan.emit.priced import chosen_for


def plan(parallel: dict[str, Any], machine: str = "16xH100", **job: Any) -> TrainPlan:
    given = {"steps": 9, "seq_len": 4096, "global_batch": 64, "microbatch": 1, **job}
    one = TrainPlan(
        job=TrainJob(model="Llama-3-8B", parallel=parallel, **given),
        machine=load(machine),
        shape=resolve("Llama-3-8B"),
        fits=True,
    )
    work = Work(shape=one.shape, job=one.job)
    return one.model_copy(update={"estimate": Pricer(one.machine).estimate(work)})


def seconds(one: TrainPlan | ServePlan) -> float:
    assert one.estimate is not None
    return one.estimate.step_s.value


@pytest.mark.parametrize("compiled", [False, True])
def test_the_estimate_is_of_the_engine(compiled: bool) -> None:
    own = plan({"dp": 16}, shard="zero3", compile=compiled)
    place, given = chosen_for([own], EMITTERS.build("torchtitan"))
    engine = TORCHTITAN.compiled() if compiled else TORCHTITAN
    alone = Pricer(own.machine, engine).estimate(Work(shape=own.shape, job=own.job))
    assert (place, given.estimate) == (0, alone)
    assert seconds(given) != pytest.approx(seconds(own), rel=0.01)
    assert given.job == own.job
    assert any("torchtitan" in note for note in given.notes)


def test_what_an_engine_hides_may_change_which_plan_is_its_best() -> None:
    # Megatron hides most of tensor parallelism's sums; Shoal waits for them.
    few, many = plan({"dp": 16}, shard="zero1"), plan({"dp": 2, "tp": 8, "sp": True}, shard="zero1")
    other = Pricer(few.machine, MEGATRON)
    ours = seconds(many) / seconds(few)
    theirs = [other.estimate(Work(shape=p.shape, job=p.job)).step_s.value for p in (few, many)]
    assert theirs[1] / theirs[0] < 0.9 * ours
    ranked = sorted((few, many), key=seconds)
    place, given = chosen_for(ranked, EMITTERS.build("megatron"))
    assert seconds(given) == pytest.approx(min(theirs))
    assert given.job == ranked[place].job


def test_plans_that_do_not_fit_are_no_better_for_being_fast() -> None:
    fast, slow = plan({"dp": 16}, shard="zero3"), plan({"dp": 2, "tp": 8}, shard="zero3")
    large = fast.model_copy(update={"fits": False})
    place, _ = chosen_for([slow, large], EMITTERS.build("torchtitan"))
    assert place == 0


def test_the_first_stays_where_nothing_is_priced_anew() -> None:
    cheap = [plan({"dp": 2, "tp": 8}, shard="zero3", objective="cost"), plan({"dp": 16})]
    assert chosen_for(cheap, EMITTERS.build("torchtitan"))[0] == 0
    refused = plan({"dp": 8, "pp": 2})
    assert chosen_for([refused], EMITTERS.build("accelerate")) == (0, refused)
    cpu = plan({"dp": 2}, "laptop", precision="fp32")
    assert chosen_for([cpu], EMITTERS.build("accelerate"))[1] == cpu
    served = ServePlan(
        job=ServeJob(model="Qwen3-8B", max_position=8192),
        machine=load("H100"),
        shape=resolve("Qwen3-8B"),
    )
    assert chosen_for([served], EMITTERS.build("vllm")) == (0, served)
