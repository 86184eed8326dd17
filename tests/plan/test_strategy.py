import pytest

from shoal.core.errors import ConfigError, ModelError, PlanError
from shoal.core.parts import Choice
from shoal.cost.shapes import find
from shoal.cost.training.step import estimate
from shoal.ir import Device, Link, Machine, MemoryTier, TrainJob, TrainPlan, Work
from shoal.machine.described import load
from shoal.parallel.legal import check_split
from shoal.plan.strategy import PLANNERS
from shoal.plan.strategy.judge import fits
from shoal.plan.strategy.remedy import enlarged
from shoal.plan.strategy.space import candidates, divisors, legal_parallel
from shoal.plan.table import choices, numbers, spell


def gpus(nodes=1, per=8):
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
            power_watts=700,
        ),
        links=tuple(links),
        usd_per_device_hour=2.0,
    )


LAPTOP = Machine(
    name="laptop",
    device=Device(
        name="cpu",
        kind="cpu",
        num_cores=4,
        matmul_flops={"fp32": 4e11},
        memory=(MemoryTier(name="dram", capacity_bytes=16 * 10**9, read_bandwidth=3e10),),
    ),
    links=(Link(scope="loopback", bandwidth=2e9, latency_s=5e-5),),
)


def plan(job, machine, planner="search"):
    return PLANNERS.build(planner).plan(job, machine)


@pytest.mark.parametrize(
    "planner",
    [p if p != "galvatron" else pytest.param(p, marks=pytest.mark.slow) for p in PLANNERS],
)
def test_plans_are_concrete_ranked_and_explained(planner):
    job = TrainJob(model="Qwen3-14B", tokens=20 * 10**9, seq_len=4096, global_batch=256)
    plans = plan(job, gpus(2), planner)
    assert plans[0].fits and plans[0].planner == planner and plans[0].why
    for result in plans:
        assert result.estimate is not None and result.job.microbatch and result.job.steps
        assert result.job.parallel.world <= 16
        assert TrainPlan.model_validate(result.model_dump(mode="json")) == result
    fitting = [p.fits for p in plans]
    assert fitting == sorted(fitting, reverse=True)
    rows = numbers(plans).records()
    assert [row["#"] for row in rows] == [str(n) for n in range(1, len(plans) + 1)]
    assert float(rows[0]["USD"].replace(",", "")) > 0 and rows[0]["devices"] == "16"
    assert choices(plans).records()[0]["plan"] == spell(plans[0])


@pytest.mark.slow
def test_search_is_at_least_as_fast_as_the_rules():
    for model, nodes in (("Qwen3-14B", 2), ("Llama-3-70B", 8), ("Mixtral-8x7B-v0.1", 4)):
        job = TrainJob(model=model, steps=10, seq_len=4096, global_batch=256)
        best, ruled = plan(job, gpus(nodes))[0], plan(job, gpus(nodes), "rules")[0]
        assert best.fits and ruled.fits
        assert best.estimate.step_s.value <= 1.01 * ruled.estimate.step_s.value


def test_search_equals_brute_force_over_its_own_space():
    job = TrainJob(model="Llama-3-8B", steps=10, seq_len=2048, global_batch=32)
    machine, shape = gpus(1, 4), find("Llama-3-8B")
    priced = [(c, estimate(Work(shape=shape, job=c), machine)) for c in candidates(job, machine)]
    least = min(e.step_s.value for c, e in priced if fits(c, machine, e))
    assert plan(job, machine)[0].estimate.step_s.value <= 1.01 * least


def test_what_is_stated_is_kept():
    job = TrainJob(
        model="Llama-3-8B",
        steps=1,
        parallel={"dp": 8},
        shard="zero2",
        microbatch=1,
        recompute="full",
        precision="bf16",
        global_batch=64,
    )
    plans = plan(job, gpus())
    assert len(plans) == 1
    for name in ("parallel", "shard", "microbatch", "recompute", "precision"):
        assert getattr(plans[0].job, name) == getattr(job, name)


def test_muon_keeps_its_matrices_whole():
    job = TrainJob(model="shoal-4m", optimizer="muon", steps=1)
    names = {c.shard.name for c in candidates(job, gpus())}
    assert names == {"replicated", "zero1"}


def test_splits_are_legal():
    shape = find("Llama-3-8B")
    job = TrainJob(model="Llama-3-8B", global_batch=12)
    splits = list(legal_parallel(job, shape, gpus(2), 16))
    assert splits
    for split in splits:
        assert split.world == 16 and 12 % split.dp == 0 and split.tp <= 8
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.slow
def test_what_does_not_fit_comes_with_what_would(planner):
    job = TrainJob(
        model="Llama-3-8B", steps=1, parallel={"dp": 8}, shard="replicated", global_batch=64
    )
    first = plan(job, gpus(), planner)[0]
    assert not first.fits and "does not fit" in first.why
    text = " ".join(first.notes)
    assert "it does not fit: a rank needs" in text
    assert "this would: shard: zero" in text
    alone = plan(TrainJob(model="Llama-3-70B", steps=1, global_batch=64), gpus(1), planner)[0]
    assert "devices of this kind" in " ".join(alone.notes)


def test_the_remedy_fits():
    job = TrainJob(model="Llama-3-70B", steps=1, global_batch=64)
    note = next(n for n in plan(job, gpus(1))[0].notes if "devices" in n)
    number = int(note.split("this would: ")[1].split()[0])
    assert plan(job, enlarged(gpus(1), number // 8))[0].fits


def test_a_plan_says_its_split():
    split = {"tp": 2, "sp": True, "pp": 2, "vpp": 2, "schedule": "interleaved", "cp": 2}
    job = TrainJob(model="Llama-3-8B", steps=1, parallel=split, global_batch=8, shard="zero1")
    words = spell(plan(job, gpus())[0]).split()
    assert words[:4] == ["dp1", "tp2+sp", "pp2*2(interleaved)", "cp2(zigzag)"]


def test_minutes_become_steps():
    plans = plan(TrainJob(minutes=3, parallel={"dp": 2}), LAPTOP)[0]
    assert plans.job.minutes is None
    assert plans.estimate.total_s.value == pytest.approx(180, rel=0.05)


def test_a_machine_can_be_enlarged():
    assert enlarged(gpus(1, 1), 4).devices_per_node == 4
    assert enlarged(gpus(1, 8), 4).nodes == 4
    assert enlarged(LAPTOP, 2).link("node") is not None


def test_spelling():
    plans = plan(TrainJob(steps=1, parallel={"dp": 2}, microbatch=4, recompute="full"), LAPTOP)[0]
    assert spell(plans).startswith("dp2 tp1 pp1 ") and " mb4 recompute " in spell(plans)


def test_bad_input():
    with pytest.raises(ModelError, match="did you mean"):
        plan(TrainJob(model="shoal-4mm"), LAPTOP)
    with pytest.raises(PlanError, match="seq_len = 4096"):
        plan(TrainJob(model="shoal-4m", seq_len=4096), LAPTOP)
    with pytest.raises(PlanError, match="at most 8 ranks"):
        plan(TrainJob(parallel={"dp": 16}), gpus())
    with pytest.raises(PlanError, match="key/value heads"):
        plan(TrainJob(parallel={"tp": 4}), gpus())
    with pytest.raises(ConfigError, match=r"planner\.search\.keep"):
        PLANNERS.build({"name": "search", "keep": 0})
    by_hand = TrainPlan(job=TrainJob(), machine=LAPTOP, shape=find("shoal-4m"))
    with pytest.raises(PlanError, match="the plan has no estimate"):
        numbers([by_hand])


@pytest.mark.slow
def test_the_space_has_every_dimension_and_only_what_runs() -> None:
    machine = load("64xH100")
    job = TrainJob.model_validate({"model": "Llama-3-8B", "seq_len": 8192, "global_batch": 64})
    result = list(candidates(job, machine))
    splits = [item.parallel for item in result]
    schedules = {split.schedule.name for split in splits}
    assert {"1f1b", "interleaved", "zb_h1", "zbv", "vhalf", "vmin"} == schedules
    assert {2, 4} == {s.vpp for s in splits if s.schedule.name == "interleaved"}
    assert any(s.sp for s in splits)
    assert all(s.tp > 1 for s in splits if s.sp)
    assert {1, 2, 4, 8, 16} == {s.cp for s in splits}
    for item in result[::97]:  # a share of all: each is checked as a run would be
        check_split(item, find("Llama-3-8B"))


def test_without_a_plan_that_fits_all_are_ranked_by_how_much_is_missing() -> None:
    job = TrainJob.model_validate({"model": "Llama-3-70B", "seq_len": 4096, "global_batch": 64})
    plans = PLANNERS.build("search").plan(job, load("2xRTX-4090"))
    assert not plans[0].fits
    assert plans[0].notes[0].startswith("it does not fit: a rank needs")


@pytest.mark.parametrize(
    ("model", "stated", "ranks"),
    [
        ("OLMoE-1B-7B", {"finetune": "dora"}, 4),
        ("Qwen3-0.6B", {"finetune": "ladder", "packing": "document"}, 4),
        ("Qwen3-0.6B", {"optimizer": "muon"}, 4),
        ("Qwen3-0.6B", {"compile": True}, 4),
        ("Qwen3-0.6B", {"sync": {"name": "local_sgd", "within": 8}}, 16),
        ("Qwen3-0.6B", {"sync": {"name": "diloco", "within": 3}}, 6),
    ],
)
@pytest.mark.parametrize(
    "planner",
    [
        {"name": "search", "keep": 2},
        {"name": "rules"},
        {"name": "megatron", "keep": 2},
        {"name": "galvatron", "keep": 2, "runnable": True},
    ],
    ids=lambda planner: planner["name"],
)
def test_plans_have_splits_that_go_with_what_the_job_states(planner, model, stated, ranks):
    """Others are refused before the best few are kept, so that some are left."""
    job = TrainJob(model=model, steps=10, seq_len=1024, global_batch=48, **stated)
    plans = plan(job, gpus(-(-ranks // 8), min(ranks, 8)), planner)
    assert plans
    for one in plans:
        check_split(one.job, one.shape)


@pytest.mark.parametrize("planner", PLANNERS)
def test_what_a_job_states_and_does_not_go_together_is_refused_with_both(planner):
    job = TrainJob(model="Qwen3-0.6B", finetune="mezo", packing="document")
    with pytest.raises(PlanError, match=r"packing = document: expected .*with finetune mezo"):
        plan(job, gpus(1, 4), planner)


def test_workers_share_the_outer_state_where_memory_is_short():
    job = TrainJob(model="TinyLlama-1.1B", steps=10, seq_len=2048, global_batch=16)
    first = plan(job, load("8x1xA100-40GB@ETH10"), {"name": "search", "sync": "auto"})[0]
    assert first.fits and first.job.sync.name == "co2" and first.job.sync.options["sharded"]
    whole = first.job.model_copy(update={"sync": Choice(name="co2")})
    assert not fits(
        whole, first.machine, estimate(Work(shape=first.shape, job=whole), first.machine)
    )
