"""Engines measured under knobs: real throughput, real failures."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import psutil
import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).parent))

from blocking_measure import SleepingMeasure  # noqa: E402

from shoal.core.errors import ConfigError, ServeError  # noqa: E402
from shoal.cost.workloads.chat import Chat  # noqa: E402
from shoal.ir import ServeJob  # noqa: E402
from shoal.plan.tune import TUNERS  # noqa: E402
from shoal.plan.tune.repeats import Repeats  # noqa: E402
from shoal.plan.tune.serving import (  # noqa: E402
    Measure,
    ServingObjective,
    serving_space,
    tune_serving,
)
from shoal.serve.bench.tune import MeasureProcess, ShoalRunner, failure  # noqa: E402

WORKLOAD = Chat(rate=50.0, scale=8.0).arrivals(count=6, vocab_size=160, max_position=64, seed=0)


@pytest.fixture(scope="module")
def runner(random_model):
    job = ServeJob(model="tiny", precision="fp32", kv_tokens=1024, threads=1, max_position=64)
    return ShoalRunner(job=job, model=random_model("llama"))


def test_a_workload_is_served_for_real(runner):
    assert isinstance(runner, Measure)
    sample = runner.measure({"max_running": 4, "block_size": 8}, WORKLOAD, 30.0)
    assert not sample.failed
    assert sample.throughput == pytest.approx(
        sum(one.output_tokens for one in WORKLOAD) / sample.seconds
    )
    assert 0 < sample.ttft_s["50"] <= sample.ttft_s["95"] <= sample.latency_s["95"]
    small = runner.measure({"kv_tokens": 512}, WORKLOAD, 30.0)
    # Two layers, keys and values of two heads of 16 numbers, 4 bytes each.
    assert sample.memory_bytes - small.memory_bytes == 512 * 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("config", "seconds", "why"),
    [
        ({"max_running": 1}, 0.0, "out of time"),
        ({"kv_tokens": 16}, 30.0, ""),
        ({"kv_tokens": 10**12}, 30.0, "kv_tokens"),
    ],
)
def test_what_fails_is_a_sample(runner, config, seconds, why):
    sample = runner.measure(config, WORKLOAD, seconds)
    assert sample.failed
    assert why in sample.failed
    assert sample.throughput == 0


def test_a_value_that_cannot_be_is_refused(runner):
    with pytest.raises(ConfigError, match="block_size = 0"):
        runner.measure({"block_size": 0}, WORKLOAD, 30.0)


def test_faults_of_the_program_are_no_samples():
    assert failure(MemoryError("7 GiB")) == "out of memory: 7 GiB"
    assert "out of memory" in failure(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert failure(ServeError("no")) == "no"
    with pytest.raises(RuntimeError, match="shape"):
        failure(RuntimeError("shape mismatch"))


def test_tuning_for_real(runner):
    space = serving_space(
        {
            "max_running": (1, 4),
            "max_step_tokens": (64,),
            "block_size": (8,),
            "kv_tokens": (16, 512),
        }
    )
    objective = ServingObjective(runner=runner, workload=WORKLOAD, repeats=Repeats(first=2, most=2))
    study = tune_serving(TUNERS.build("exhaustive"), space, objective, 4)
    assert [trial.value is None for trial in study.trials] == [True, False, True, False]
    assert study.best.config["kv_tokens"] == 512


@pytest.mark.slow
def test_generate_is_measured_under_its_knobs(tmp_path, random_model):
    pytest.importorskip("transformers")
    from shoal.claims.bench.serving.generate import GenerateRunner, generate_space
    from shoal.model import huggingface

    huggingface.write(tmp_path / "model", random_model("llama"))
    runner = GenerateRunner.load(str(tmp_path / "model"), threads=1)
    assert isinstance(runner, Measure)
    widths: list[tuple[int, ...]] = []
    inner = runner.model.generate

    def watched(ids, **options):
        widths.append(tuple(ids.shape))
        return inner(ids, **options)

    runner.model.generate = watched
    lengths = [len(one.prompt) for one in WORKLOAD]
    for config in generate_space(batches=(4,)).configs():
        sample = runner.measure(config, WORKLOAD, 30.0)
        assert not sample.failed
        assert sample.ttft_s == {}
        assert sample.memory_bytes > 0
    by_length = sorted(lengths)
    assert widths == [
        (4, max(lengths[:4])),
        (2, max(lengths[4:])),
        (4, by_length[3]),
        (2, by_length[5]),
        (4, by_length[5]),
        (2, by_length[5]),
    ]
    late = runner.measure({"batch": 1, "padding": "full"}, WORKLOAD, 1e-6)
    assert "out of time" in late.failed


@pytest.mark.slow
@pytest.mark.multi
def test_an_engine_that_blocks_is_a_sample_and_its_process_ends():
    others = {child.pid for child in multiprocessing.active_children()}

    def own():
        return {child.pid for child in multiprocessing.active_children()} - others

    apart = MeasureProcess(make=SleepingMeasure, ready_s=60.0, grace_s=0.2)
    assert apart.measure({"where": "nowhere"}, WORKLOAD, 0.1).throughput == 1
    for where, why in (
        ("measure", "out of time"),
        ("stopped", "out of time"),
        ("killed", "SIGKILL"),
        ("prepare", "out of time"),
    ):
        assert apart.measure({"where": "nowhere"}, WORKLOAD, 0.1).throughput == 1
        (pid,) = own()
        apart.ready_s = 0.2 if where == "prepare" else 60.0
        sample = apart.measure({"where": where}, WORKLOAD, 0.1)
        assert why in sample.failed and sample.throughput == 0
        assert not psutil.pid_exists(pid)
    assert own() == set()


@pytest.mark.slow
@pytest.mark.multi
def test_what_is_measured_apart_is_what_is_measured_here(runner, tmp_path):
    from shoal.model import huggingface

    huggingface.write(tmp_path / "model", runner.model)
    job = runner.job.model_copy(update={"model": str(tmp_path / "model")})
    apart = MeasureProcess(make=ShoalRunner, arguments={"job": job}, ready_s=120.0)
    try:
        sample = apart.measure({"max_running": 4}, WORKLOAD, 30.0)
        here = ShoalRunner(job=job).measure({"max_running": 4}, WORKLOAD, 30.0)
        assert sample.throughput > 0 and sample.memory_bytes == here.memory_bytes
        assert "out of time" in apart.measure({"max_running": 1}, WORKLOAD, 0.0).failed
        assert "kv_tokens" in apart.measure({"kv_tokens": 10**12}, WORKLOAD, 30.0).failed
        with pytest.raises(ConfigError, match="block_size = 0"):
            apart.measure({"block_size": 0}, WORKLOAD, 30.0)
    finally:
        apart.close()
