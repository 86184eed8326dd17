"""Every rung of the ladder is at least as fast as the one below it."""

from __future__ import annotations

import itertools

import pytest

from shoal.claims.lab.overlap_ladder import ladder
from shoal.core.errors import PlanError
from shoal.cost.shapes import find
from shoal.ir import Machine, TrainJob, Work
from shoal.machine.described import load


def work(**parallel: int) -> Work:
    job = TrainJob.model_validate(
        {
            "model": "GPT-3 175B",
            "seq_len": 2048,
            "global_batch": 256,
            "microbatch": 1,
            "recompute": "none",
            "parallel": {
                "dp": 4,
                "tp": 8,
                "pp": 8,
                "vpp": 6,
                "schedule": "interleaved",
                "sp": True,
                **parallel,
            },
            "shard": "zero1",
        }
    )
    return Work(shape=find("GPT-3 175B"), job=job)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return load("A100").model_copy(update={"num_nodes": 32})


@pytest.mark.slow
def test_rungs_rise(machine: Machine) -> None:
    rungs = ladder(work(), machine)
    assert rungs[0].name == "nothing"
    for below, above in itertools.pairwise(rungs):
        assert above.tokens_per_s >= below.tokens_per_s, above.name
    assert 0.2 < rungs[0].mfu < rungs[-1].mfu < 0.8
    assert rungs[-1].tokens_per_s / rungs[0].tokens_per_s > 1.1


@pytest.mark.parametrize("axis", ["tp", "pp", "dp"])
def test_an_axis_of_one_is_refused(machine: Machine, axis: str) -> None:
    more = {"vpp": 1} if axis == "pp" else {}
    if axis == "tp":
        more["sp"] = 0
    with pytest.raises(PlanError, match=f"parallel.{axis} = 1"):
        ladder(work(**{axis: 1}, **more), machine)
