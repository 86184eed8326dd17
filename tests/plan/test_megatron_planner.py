import pytest

from shoal.core.errors import ConfigError, PlanError
from shoal.ir import TrainJob
from shoal.machine.described import load
from shoal.plan.partition import uniform_stages
from shoal.plan.strategy import PLANNERS


def plans(job, machine, **options):
    return PLANNERS.build({"name": "megatron", **options}).plan(job, load(machine))


def test_175b_on_1024_gpus_is_planned_as_it_was_trained():
    job = TrainJob(
        model="GPT-3 175B", tokens=300 * 10**9, seq_len=2048, global_batch=1536, recompute="full"
    )
    first = plans(job, "1024xA100")[0]
    split = first.job.parallel
    assert first.fits and split.tp == 8 and split.world == 1024
    assert first.job.shard.name == "replicated"
    # Published: 33.9 days at 140 TFLOP/s a device.
    assert first.estimate.total_s.value / 86400 == pytest.approx(33.9, rel=0.25)
    assert any("8 T P / (n X) gives" in note for note in first.notes)


def test_tensor_parallelism_grows_before_pipeline_parallelism():
    """As in the paper's table 1: pp = 1 until a node is one tensor-parallel group."""
    seen = []
    for model, machine in (
        ("Llama-2-7b", "32xA100"),
        ("Llama-2-13b", "64xA100"),
        ("Llama-2-70b", "256xA100"),
    ):
        job = TrainJob(model=model, steps=1, seq_len=2048, global_batch=512, recompute="full")
        split = plans(job, machine)[0].job.parallel
        assert split.pp == 1 or split.tp == 8
        seen.append(split.tp * split.pp)
    assert seen == sorted(seen) and seen[0] < 8 < seen[-1]


def test_a_long_bubble_is_interleaved_and_a_short_one_is_not():
    base = {"model": "GPT-3 175B", "steps": 1, "seq_len": 2048, "recompute": "full"}
    small = plans(TrainJob(**base, global_batch=256, microbatch=1), "1024xA100")[0].job
    split = small.parallel
    number = small.global_batch // split.dp
    assert split.pp > 1 and split.vpp > 1 and split.schedule.name == "interleaved"
    assert number % split.pp == 0
    assert uniform_stages(96, split.pp, split.vpp)
    # One fewer would leave more idle than was asked for, or the largest was not enough.
    assert (split.pp - 1) / number > 0.1
    large = plans(TrainJob(**base, global_batch=4096, microbatch=1), "1024xA100")[0].job
    assert large.parallel.vpp == 1 and large.parallel.schedule.name == "1f1b"
    only = plans(TrainJob(**base, global_batch=256, microbatch=1), "1024xA100", largest_vpp=1)
    assert all(found.job.parallel.vpp == 1 for found in only)


def test_what_is_stated_is_kept():
    job = TrainJob(
        model="Llama-3-8B",
        steps=1,
        parallel={"tp": 2, "pp": 4},
        shard="zero1",
        microbatch=1,
        global_batch=8,
        precision="bf16",
    )
    for result in plans(job, "8xA100"):
        assert result.job.parallel == job.parallel
        assert result.job.shard.name == "zero1" and result.job.microbatch == 1


def test_bad_input():
    for option, value in (("bubble", 0), ("largest_vpp", 0), ("keep", 0)):
        with pytest.raises(ConfigError, match=rf"planner\.megatron\.{option}"):
            PLANNERS.build({"name": "megatron", option: value})
    with pytest.raises(PlanError, match="at most 8 ranks"):
        plans(TrainJob(model="Llama-3-8B", parallel={"dp": 16}), "8xA100")
