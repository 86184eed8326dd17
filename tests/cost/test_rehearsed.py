"""Steps that were rehearsed: what they tell about others."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.cost.price.rehearsed import OperatorTimes, RehearsedRates, events
from shoal.cost.shapes import find
from shoal.cost.training.step import Pricer, estimate
from shoal.ir import Device, Link, Machine, MemoryTier, TrainJob, Work
from shoal.ir.machine import Measurement
from shoal.machine.protocols import ProbeContext
from shoal.machine.rehearsals import REHEARSALS, REHEARSED
from shoal.parallel.legal import check_split
from shoal.train import PROBES

BARE = Machine(
    name="host",
    device=Device(
        name="c",
        kind="cpu",
        num_cores=2,
        matmul_flops={"fp32": 3e11, "bf16": 1e12},
        op_overhead_s=2e-6,
        memory=(MemoryTier(name="dram", capacity_bytes=2**34, read_bandwidth=2e10),),
    ),
    links=(Link(scope="loopback", bandwidth=4e9, latency_s=3e-5),),
)


def rehearsed(seconds: dict[str, float]) -> Machine:
    """The host with a measured step of each of these rehearsals."""
    result = tuple(
        Measurement(
            probe="steps", quantity="step", unit="s", median=s, low=s, high=s, repeats=3, note=name
        )
        for name, s in seconds.items()
    )
    return BARE.model_copy(update={"measurements": result})


def plain(name: str) -> float:
    return estimate(Work(shape=REHEARSED, job=REHEARSALS[name]), BARE).step_s.value


def other(**stated: object) -> Work:
    requests = {"model": "shoal-4m", "seq_len": 128, "global_batch": 8, "microbatch": 2, **stated}
    return Work(shape=find("shoal-4m"), job=TrainJob.model_validate(requests))


@pytest.mark.parametrize("name", list(REHEARSALS))
def test_a_rehearsal_is_legal_and_is_told_as_it_was(name: str) -> None:
    check_split(REHEARSALS[name], REHEARSED)
    # The rehearsed steps took half as long again as told; two splits beyond that.
    took = {
        key: 1.5 * plain(key) + (0.1 if "tp" in key or "pp" in key else 0.0) for key in REHEARSALS
    }
    machine = rehearsed(took)
    again = estimate(Work(shape=REHEARSED, job=REHEARSALS[name]), machine).step_s.value
    # Where several rehearsals tell about one split, their mean is told.
    assert again == pytest.approx(took[name], rel=0.25)


def test_factors_carry_over_to_other_models() -> None:
    machine = rehearsed({name: 2 * plain(name) for name in ("one", "one bf16")})
    for precision in ("fp32", "bf16"):
        work = other(precision=precision)
        before, after = estimate(work, BARE), estimate(work, machine)
        for cause in ("matmul", "attention", "memory", "overhead", "optimizer"):
            assert after.terms_s[cause] == pytest.approx(2 * before.terms_s[cause], rel=0.05)
        assert after.terms_s["data"] == before.terms_s["data"]


def test_meetings_cost_what_they_did_for_each_event() -> None:
    extra = 0.05
    took = {name: plain(name) for name in ("one", "dp2", "tp2")}
    took["tp2"] += extra
    result = estimate(other(parallel={"tp": 2}), rehearsed(took))
    bare = estimate(other(parallel={"tp": 2}), BARE)
    met = events(other(parallel={"tp": 2}).job, find("shoal-4m"))["tp"]
    per = extra / events(REHEARSALS["tp2"], REHEARSED)["tp"]
    assert result.terms_s["collective"] - bare.terms_s["collective"] == pytest.approx(
        met * per, rel=0.2
    )


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"parallel": {"tp": 2}}, {"tp": 4 * (4 * 4 + 2)}),
        ({"parallel": {"tp": 2, "sp": True}, "recompute": "full"}, {"sp": 4 * (4 * 6 + 2)}),
        ({"parallel": {"cp": 2}}, {"cp": 4 * 4 * 2}),
        ({"parallel": {"pp": 2, "dp": 2}}, {"pp": 2}),
        ({"parallel": {"dp": 2}}, {}),
    ],
)
def test_events_are_counted(stated: dict[str, object], expected: dict[str, float]) -> None:
    assert events(other(**stated).job, find("shoal-4m")) == expected


def test_gathered_bytes_are_counted_for_each_pass() -> None:
    job = other(parallel={"dp": 2}, shard="zero3").job
    result = events(job, find("shoal-4m"))["zero3"]
    assert result == pytest.approx(2 * 3 * 4 * 4.0e6, rel=0.02)


def test_a_disturbed_rehearsal_does_not_ruin_every_plan() -> None:
    machine = rehearsed({"one": 1000 * plain("one")})
    ratio = estimate(other(), machine).step_s.value / estimate(other(), BARE).step_s.value
    assert 1 < ratio <= 3


def test_without_the_first_rehearsal_nothing_is_changed() -> None:
    assert not RehearsedRates(BARE, lambda _: OperatorTimes(1.0, 0.0))
    assert Pricer(BARE)._rehearsed is None
    machine = rehearsed({"tp2": 1.0})
    assert estimate(other(), machine) == estimate(other(), BARE)


@pytest.mark.slow
def test_ranks_rehearse(tmp_path: Path) -> None:
    probe = PROBES.build({"name": "steps", "names": ["one", "tp2"], "repeats": 1})
    with ProbeContext(home=tmp_path) as context:
        result = {m.note: m for m in probe.run(context)}
    assert set(result) == {"one", "tp2"}
    assert all(0 < m.median < 60 for m in result.values())


@pytest.mark.slow
def test_a_rehearsal_ends_with_its_budget_and_a_lost_worker_is_replaced(tmp_path: Path) -> None:
    with ProbeContext(home=tmp_path) as context:
        first = context.worker()
        assert context.worker() is first
        for budget_s, steps in ((0.0, 1), (1e9, 3)):
            taken = first.call(
                "shoal.train.rehearse:rehearse",
                rank=0,
                world=1,
                store=str(tmp_path / f"{steps}"),
                job=REHEARSALS["one"].model_dump(mode="json", exclude_unset=True),
                shape=find("shoal-0.3m").model_dump(mode="json"),
                steps=3,
                budget_s=budget_s,
            )
            assert len(taken) == steps
        first.close()
        assert context.worker() is not first
        assert context.worker().call("hello")["threads"] >= 1


def test_bad_input() -> None:
    with pytest.raises(ConfigError, match="some of one, one bf16"):
        PROBES.build({"name": "steps", "names": ["three"]})
