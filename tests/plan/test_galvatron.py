"""The layer-wise planner: what it plans, what it refuses, and that it misses nothing."""

from __future__ import annotations

import itertools

import pytest

from shoal.claims.lab.layer_exact import optimum
from shoal.core.errors import ConfigError, PlanError
from shoal.cost.shapes import find
from shoal.cost.training.layer_plan import estimate_layers, plan_of, seconds_of, stage_costs
from shoal.cost.training.layers import ModelLayer, layers_of
from shoal.cost.training.layerwise import LayerPricer
from shoal.cost.training.step import estimate
from shoal.ir import Device, Link, Machine, MemoryTier, TrainJob, TrainPlan, Work
from shoal.parallel.legal import check_split
from shoal.plan.strategy import PLANNERS
from shoal.plan.strategy.galvatron import Galvatron, to_job
from shoal.plan.strategy.layer_search import StageSearch

JOB = {"model": "Llama-3-8B", "steps": 10, "seq_len": 2048, "global_batch": 32}


def gpus(nodes=1, per=8):
    """Nodes of GPUs of 80 GB."""
    links = [Link(scope="device", bandwidth=3e11, latency_s=4e-6)] if per > 1 else []
    if nodes > 1:
        links.append(Link(scope="node", bandwidth=5e10, latency_s=6e-6))
    return Machine(
        name=f"{nodes * per}xG",
        nodes=nodes,
        devices_per_node=per,
        device=Device(
            name="G",
            kind="gpu",
            matmul_flops={"bf16": 6e14, "fp32": 5e13},
            memory=(MemoryTier(name="hbm", capacity_bytes=80 * 10**9, read_bandwidth=3e12),),
        ),
        links=tuple(links),
    )


def plan(job, machine, **options):
    return PLANNERS.build({"name": "galvatron", **options}).plan(
        TrainJob.model_validate(job), machine
    )


def test_a_tight_memory_recomputes_some_layers_and_not_all():
    machine = gpus(1, 4)
    whole = {**JOB, "parallel": {"dp": 4}, "shard": "zero3", "microbatch": 2}
    wide = plan(whole, machine)[0]
    assert not wide.job.layers and wide.job.recompute == "none"
    tight = plan(whole, machine, memory_gib=54.0)[0]
    again = tight.job.recomputed(32)
    assert 0 < len(again) < 32
    assert tight.estimate.memory_total <= 54.0 * 2**30
    assert wide.estimate.step_s.value < tight.estimate.step_s.value
    all_again = estimate(
        Work(shape=find("Llama-3-8B"), job=TrainJob.model_validate({**whole, "recompute": "full"})),
        machine,
    )
    assert tight.estimate.step_s.value < all_again.step_s.value * 1.02
    check_split(tight.job, tight.shape)
    assert any("for all layers" in note for note in tight.notes)
    assert TrainPlan.model_validate(tight.model_dump(mode="json")) == tight


def test_layers_and_rejected_alternatives_are_told():
    plans = plan(JOB, gpus(1, 8))
    notes = plans[0].notes
    assert any(note.startswith(("layers 0-", "layer 0")) for note in notes)
    assert any(note.startswith("rejected: pp") for note in notes)


def wide():
    """A small model most of which is its vocabulary, and two ranks with a slow link."""
    shape = find("Llama-3-8B").model_copy(
        update={"hidden": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
        | {"ffn_hidden": 384, "num_layers": 4, "vocab_size": 32768, "max_position": 256}
    )
    machine = Machine(
        name="two",
        nodes=2,
        device=Device(
            name="one thread",
            kind="cpu",
            num_cores=1,
            matmul_flops={"fp32": 3e10},
            memory=(MemoryTier(name="dram", capacity_bytes=2**34, read_bandwidth=1e10),),
        ),
        links=(Link(scope="node", bandwidth=25e6, latency_s=1e-4),),
    )
    return shape, machine


def test_a_wide_vocabulary_is_shared_and_its_blocks_are_not():
    """Its gradient is sent once a step, as are the blocks' sums: each wants the other split."""
    shape, machine = wide()
    job = TrainJob(
        model="wide", steps=1, seq_len=128, global_batch=16, precision="fp32", microbatch=None
    )
    planner = Galvatron(runnable=True)
    options, _ = planner.search(job, machine, shape, layers_of(shape), world=2)
    best = next(option for option in options if option.pp == 1)
    made = to_job(job, best.solution.plan, "fp32")
    assert (made.parallel.tp, made.parallel.dp) == (2, 1)
    assert {made.degrees(group) for group in made.layers} == {(2, 1, 1)}
    check_split(made, shape)
    # The price of the job is that of the search, the ends' own layout included.
    again = plan_of(made, shape)
    pricer = LayerPricer(made, machine, shape)
    stages = stage_costs(pricer, layers_of(shape), again)
    assert seconds_of(stages, again.microbatches) == pytest.approx(best.solution.seconds)
    uniform = planner.best_uniform(job, machine, shape, layers_of(shape), best)
    assert uniform.pp == 2 or uniform.solution.seconds > best.solution.seconds


@pytest.mark.slow
def test_runnable_plans_run():
    for result in plan(JOB, gpus(1, 4), runnable=True, memory_gib=50.0):
        check_split(result.job, result.shape)
        assert not any("planned only" in note for note in result.notes)


@pytest.mark.slow
def test_a_plan_that_does_not_run_says_so_and_is_refused():
    plans = plan({**JOB, "seq_len": 4096}, gpus(2, 8), memory_gib=24.0)
    mixed = [p for p in plans if any("planned only" in note for note in p.notes)]
    for one in mixed[:2]:
        with pytest.raises(PlanError, match="planned only"):
            check_split(one.job, one.shape)


def test_nothing_fits_says_by_how_much_and_where():
    plans = plan({**JOB, "model": "Llama-3-70B"}, gpus(1, 2))
    assert not plans[0].fits
    assert "lacks" in plans[0].notes[0] and "stage" in plans[0].notes[0]


@pytest.mark.parametrize(
    ("parallel", "extra"),
    [
        ({"dp": 8, "tp": 2}, {}),
        ({"dp": 16}, {"shard": "zero2"}),
        ({"dp": 4, "pp": 4}, {"recompute": "full"}),
        ({"dp": 4, "tp": 4}, {"shard": "zero3", "model": "Mixtral-8x7B-v0.1"}),
    ],
)
def test_equal_layers_cost_about_what_the_plain_estimate_says(parallel, extra):
    job = TrainJob.model_validate({**JOB, "parallel": parallel, "microbatch": 2, **extra})
    work = Work(shape=find(job.model), job=job)
    plain, layered = estimate(work, gpus(2, 8)), estimate_layers(work, gpus(2, 8))
    assert layered.step_s.value == pytest.approx(plain.step_s.value, rel=0.25)
    assert layered.memory_total == pytest.approx(plain.memory_total, rel=0.06)
    assert layered.terms_s["matmul"] == pytest.approx(plain.terms_s["matmul"], rel=0.05)
    assert sum(layered.terms_s.values()) == pytest.approx(layered.step_s.value)


def small(pp, **changes):
    """A search over six unequal layers and a memory that binds."""
    shape = find("Llama-3-8B").model_copy(update={"num_layers": 6})
    wide = layers_of(shape)[0]
    narrow = ModelLayer("narrow", wide.shape.model_copy(update={"ffn_hidden": 4096}), span=512)
    layers = (wide, narrow, wide, wide, narrow, narrow)
    job = TrainJob.model_validate({**JOB, "precision": "bf16"})
    machine = gpus(1, 8)
    pricer = LayerPricer(job, machine, shape)
    planner = Galvatron()
    ranks = 8 // pp
    layouts = list(planner._layouts(job, machine, shape, ranks))
    strategies = [s for x in layouts if x[2] == 1 for s in planner._of_layout(job, x)]
    fields = {"usable": 20e9, "units": 2048, **changes}
    return StageSearch(pricer, layers, strategies, pp, 8, 4, fields["usable"], fields["units"])


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("usable", [9e9, pytest.param(12e9, marks=pytest.mark.slow), 40e9])
def test_search_is_near_the_exact_optimum(pp, usable):
    search = small(pp, usable=usable)
    result, best = search.run(), optimum(search)
    if result.plan is None:
        assert best.seconds == float("inf")
        return
    assert best.seconds <= result.seconds * (1 + 1e-6)
    assert result.seconds <= 1.05 * best.seconds
    assert all(cost.total_bytes("gpu") <= usable for cost in result.stages)


def test_exact_optimum_equals_every_choice():
    """Two layers of a kind each, two stages: few enough to try all."""
    search = small(2, usable=14e9)
    search.layers = search.layers[:4]
    search.strategies = [s for s in search.strategies if s.layout in ((4, 1, 1), (2, 2, 1))][:6]
    best = float("inf")
    for cut in range(1, 4):
        for chosen in itertools.product(search.strategies, repeat=4):
            own = StageSearch(
                search.pricer, search.layers, search.strategies, 2, 8, 4, search.usable, 16
            )
            stages = [
                own._cost(list(search.layers[a:b]), chosen[a:b], end, held)
                for a, b, end, held in ((0, cut, "embed", 2), (cut, 4, "head", 1))
            ]
            if all(s.total_bytes("gpu") <= search.usable for s in stages):
                best = min(best, seconds_of(stages, 4))
    assert optimum(search).seconds == pytest.approx(best, rel=1e-5)


def test_jobs_say_only_what_differs():
    result = small(2, usable=12e9).run()
    job = to_job(TrainJob.model_validate(JOB), result.plan, "bf16")
    assert sum(group.blocks for group in job.layers) in (0, 6)
    assert sum(job.parallel.stages) == 6
    assert job.microbatch * job.parallel.dp == result.plan.sequences


@pytest.mark.parametrize(
    "options", [{"keep": 0}, {"memory_gib": -1.0}, {"units": 1}, {"layouts": 1}]
)
def test_impossible_options_are_refused(options):
    with pytest.raises(ConfigError):
        PLANNERS.build({"name": "galvatron", **options})
