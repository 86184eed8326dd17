"""When a run goes over to another plan: links that became slower, a rank that did, all alike."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.cost.shapes import find
from shoal.cost.training.layer_fit import LinkFit
from shoal.ir import Device, Link, Machine, MemoryTier, TrainJob
from shoal.train import replan
from shoal.train.replan import Change, Replanner

MACHINE = Machine(
    name="two hosts",
    nodes=2,
    device=Device(
        name="c",
        kind="cpu",
        num_cores=1,
        matmul_flops={"fp32": 1e11},
        memory=(MemoryTier(name="dram", capacity_bytes=2**34, read_bandwidth=2e10),),
    ),
    links=(Link(scope="node", bandwidth=1e9, latency_s=1e-4),),
)
ASKED = {
    "model": "shoal-4m",
    "seq_len": 128,
    "global_batch": 16,
    "precision": "fp32",
    "replan": {"enabled": True, "patience": 5},
}


class _Done:
    def wait(self) -> None:
        pass


class Both:
    """Two ranks of which the other one tells what the test says."""

    world, rank, device = 2, 0, "cpu"

    def __init__(self) -> None:
        self.other = 0.0

    def all_reduce(self, x: Any, *, tag: str, op: str) -> _Done:
        x[2] = self.other
        return _Done()


def job(**stated: object) -> TrainJob:
    return TrainJob.model_validate({**ASKED, **stated})


DP = job(parallel={"dp": 2}, microbatch=8)
PP = job(parallel={"pp": 2}, microbatch=2)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    rate = {"bandwidth": 1e9}

    def measured(_comm: object) -> tuple[LinkFit, ...]:
        return tuple(
            LinkFit(op=op, group=2, latency_s=1e-4, bandwidth=rate["bandwidth"])
            for op in ("all_reduce", "gather", "scatter", "send")
        )

    monkeypatch.setattr(replan, "measure_links", measured)
    return rate


def watch(
    runner: Replanner, comm: Both, steps: int, seconds: float, busy: tuple[float, float]
) -> Change | None:
    comm.other = busy[1]
    for _ in range(steps):
        change = runner.observe(seconds, busy[0])
        if change is not None:
            return change
    return None


def made(comm: Both) -> Replanner:
    return Replanner(DP, MACHINE, find("shoal-4m"), comm, plans=[DP, PP])  # type: ignore[arg-type]


def test_a_link_that_became_slow_is_left(links: dict[str, float]) -> None:
    comm = Both()
    runner = made(comm)
    step, busy = runner.predicted_s(), runner.busy_s()[0]
    assert watch(runner, comm, 12, step, (busy, busy)) is None
    links["bandwidth"] = 2e7
    # Sums behind the passes slow both ranks; neither is a slow rank.
    change = watch(runner, comm, 30, 3 * step, (2 * busy, 2 * busy))
    assert change is not None
    assert change.job.parallel == PP.parallel
    assert change.gain > 0.1
    assert "1.00 times as long" in change.reason
    runner.changed(change.job)
    assert watch(runner, comm, 30, step, (busy, busy)) is None


def test_nothing_changes_where_nothing_drifts(links: dict[str, float]) -> None:
    comm = Both()
    runner = made(comm)
    busy = runner.busy_s()[0]
    assert watch(runner, comm, 60, runner.predicted_s(), (busy, busy)) is None
    assert runner.pace == [1.0, 1.0]


def test_a_slow_rank_is_known_by_the_other_one(links: dict[str, float]) -> None:
    comm = Both()
    runner = made(comm)
    busy = runner.busy_s()[0]
    before = runner.predicted_s()
    watch(runner, comm, 12, before, (busy, 1.5 * busy))
    assert runner.pace == pytest.approx([1.0, 1.5])
    assert runner.predicted_s() > 1.2 * before
