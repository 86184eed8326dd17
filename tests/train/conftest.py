"""A small corpus, a described machine and jobs that run in seconds."""

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from own_home import own_home
from shoal.cost.shapes import find
from shoal.cost.training.step import estimate
from shoal.ir import Device, Link, Machine, MemoryTier, TrainJob, TrainPlan, Work
from shoal.train.planning import with_kernels

# The tests of this room share modules that are no tests.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


@pytest.fixture(scope="session")
def machine() -> Machine:
    """Two cores with plausible numbers; nothing is probed."""
    return Machine(
        name="described",
        device=Device(
            name="two cores",
            kind="cpu",
            num_cores=2,
            peak_flops={"bf16": 1e12, "fp32": 2e11},
            matmul_flops={"bf16": 6e11, "fp32": 1.5e11},
            memory=(MemoryTier(name="dram", capacity_bytes=16 * 2**30, read_bandwidth=2e10),),
        ),
        links=(Link(scope="loopback", bandwidth=1.5e9, latency_s=1e-4),),
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty modules of the standard library: real text, quickly tokenised."""
    folder = tmp_path_factory.mktemp("corpus")
    source = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(source.glob("*.py"))[:60]:
        (folder / path.name).write_bytes(path.read_bytes()[:40_000])
    return folder


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A score and caches of the tests' own."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SHOAL_HOME", own_home(tmp_path_factory.mktemp("home")))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def make_plan(machine: Machine, corpus: Path) -> Callable[..., TrainPlan]:
    """``make_plan(steps=24, ...)`` -> a plan on the small corpus."""

    def make(**changes: Any) -> TrainPlan:
        job = TrainJob.model_validate(
            {
                "name": "test",
                "model": "shoal-1m",
                "data": {"name": "text", "path": str(corpus), "pattern": "*.py"},
                "steps": 24,
                "seq_len": 64,
                "global_batch": 8,
                "threads": 1,
                "precision": "fp32",
                "checkpoint": {"every": 6, "keep": 4},
                "evaluation": {"every": 0, "final": False, "sample_tokens": 0},
                "timeout_s": 60,
                **changes,
            }
        )
        shape = find(job.model)
        return with_kernels(
            TrainPlan(
                job=job,
                machine=machine,
                shape=shape,
                estimate=estimate(Work(shape=shape, job=job), machine),
            )
        )

    return make
