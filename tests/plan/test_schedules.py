"""Schedules: legal for any numbers, and as short and as light as their papers say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import PlanError
from shoal.cost.pipeline.simulator import simulate
from shoal.cost.shapes import resolve
from shoal.ir import Device, Link, Machine, MemoryTier, Parallel, TrainJob, Work
from shoal.ir.schedule import Op, OpCosts, Schedule, SchedulePart
from shoal.plan.schedules import SCHEDULES
from shoal.plan.schedules.common import looped, sends, vee
from shoal.plan.schedules.torch_csv import from_torch_csv, to_torch_csv
from shoal.plan.schedules.vocab import with_vocabulary

V_SHAPED = tuple(name for name in SCHEDULES if SCHEDULES.build(name).chunks == 2)


def build(name: str, pp: int, microbatches: int, vpp: int = 2) -> Schedule:
    part: SchedulePart = SCHEDULES.build(name)
    return part.build(pp, microbatches, part.chunks or vpp)


@st.composite
def built(draw: st.DrawFn, *names: str) -> Schedule:
    name = draw(st.sampled_from(names or tuple(SCHEDULES)))
    pp, vpp = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    microbatches = draw(st.integers(1, 14))
    if name == "interleaved" and microbatches > pp:
        microbatches -= microbatches % pp
    return build(name, pp, microbatches, vpp)


def unit(schedule: Schedule) -> float:
    """Makespan where F, I and W of a stage take one unit each."""
    return simulate(schedule, OpCosts.uniform(schedule.stages)).makespan


@settings(max_examples=60, deadline=None)
@given(built())
def test_every_builder_is_legal_for_any_numbers(schedule: Schedule) -> None:
    schedule.validate()
    assert sum(map(len, schedule.ops)) == sum(1 for _ in schedule.expected())


@settings(max_examples=60, deadline=None)
@given(built())
def test_bubble_is_what_the_simulator_finds(schedule: Schedule) -> None:
    part = SCHEDULES.build(schedule.name)
    vpp = schedule.stages // schedule.ranks
    result = simulate(schedule, OpCosts.uniform(schedule.stages)).bubble
    assert part.bubble(schedule.ranks, schedule.microbatches, vpp) == pytest.approx(result)


@pytest.mark.parametrize("name", V_SHAPED)
@pytest.mark.parametrize("pp", range(1, 18))
def test_bubble_of_a_v_holds_for_any_number_of_ranks(name: str, pp: int) -> None:
    part = SCHEDULES.build(name)
    for microbatches in range(1, pp + 4):
        result = simulate(part.build(pp, microbatches, 2), OpCosts.uniform(2 * pp)).bubble
        assert part.bubble(pp, microbatches, 2) == pytest.approx(result)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20))
def test_one_f_one_b_holds_as_many_as_stages_follow(pp: int, microbatches: int) -> None:
    peaks = build("1f1b", pp, microbatches).in_flight()
    assert peaks == [min(pp - rank, microbatches) for rank in range(pp)]
    assert build("gpipe", pp, microbatches).in_flight() == [microbatches] * pp


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4))
def test_interleaved_holds_its_warm_up(pp: int, groups: int, vpp: int) -> None:
    microbatches = pp * groups
    peaks = build("interleaved", pp, microbatches, vpp).in_flight()
    ahead = [2 * (pp - rank - 1) + (vpp - 1) * pp for rank in range(pp)]
    assert peaks == [min(a + 1, microbatches * vpp) for a in ahead]


def test_interleaved_goes_through_chunks_as_the_paper_says() -> None:
    pp, microbatches, vpp = 4, 8, 3
    schedule = build("interleaved", pp, microbatches, vpp)
    for rank, program in enumerate(schedule.ops):
        forwards = [op for op in program if op.kind == "F"]
        for k, op in enumerate(forwards):
            chunk = (k % (pp * vpp)) // pp
            mb = (k // (pp * vpp)) * pp + k % pp
            assert op == Op("F", chunk * pp + rank, mb)
        leading = next(i for i, op in enumerate(program) if op.kind == "B")
        ahead = 2 * (pp - rank - 1) + (vpp - 1) * pp
        # The first steady pair begins with its forward.
        assert leading == min(ahead, len(forwards)) + (ahead < len(forwards))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 20))
def test_zb_h1_has_the_memory_of_1f1b_and_a_third_of_its_bubble(pp: int, microbatches: int) -> None:
    ours, plain = build("zb_h1", pp, microbatches), build("1f1b", pp, microbatches)
    assert max(ours.in_flight()) == max(plain.in_flight())
    idle = unit(ours) - 3 * microbatches
    assert idle <= unit(plain) - 3 * microbatches
    if microbatches >= pp > 1:
        assert idle == pp - 1
        assert idle * 3 == unit(plain) - 3 * microbatches


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 8))
def test_zbv_has_no_bubble_but_the_slope(pp: int, more: int) -> None:
    microbatches = 2 * pp - 1 + more
    schedule = build("zbv", pp, microbatches)
    assert unit(schedule) == 6 * microbatches + pp - 1
    assert max(schedule.in_flight()) <= 2 * pp


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(V_SHAPED), st.integers(1, 18), st.integers(1, 24))
def test_a_v_holds_what_it_says(name: str, pp: int, microbatches: int) -> None:
    part, schedule = SCHEDULES.build(name), build(name, pp, microbatches)
    assert max(schedule.in_flight()) <= 2 * part.in_flight(pp, microbatches, 2)
    assert schedule.place == vee(pp)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 18), st.integers(1, 24))
def test_vhalf_holds_at_most_pp_and_two_half_chunks(pp: int, microbatches: int) -> None:
    schedule = build("vhalf", pp, microbatches)
    assert max(schedule.in_flight()) <= pp + 2
    assert schedule.place == vee(pp)


@pytest.mark.parametrize(("pp", "peak"), [(4, 6), (8, 10), (16, 18)])
def test_vhalf_halves_1f1b(pp: int, peak: int) -> None:
    schedule = build("vhalf", pp, 4 * pp)
    assert schedule.in_flight() == [peak] * pp
    # Halves of a rank's layers: 1F1B's rank 0 holds pp whole ones.
    assert max(build("1f1b", pp, 4 * pp).in_flight()) * 2 == 2 * pp
    assert unit(schedule) < 2 * unit(build("1f1b", pp, 4 * pp))


@settings(max_examples=150, deadline=None)
@given(built(), st.sampled_from([1, 2]))
def test_vocabulary_is_legal_over_any_schedule(schedule: Schedule, barriers: int) -> None:
    ours = with_vocabulary(schedule, barriers)  # type: ignore[arg-type]
    ours.validate()
    transformer = [[op for op in ops if op.kind in "FBIW"] for ops in ours.ops]
    assert [sorted(ops) for ops in transformer] == [sorted(ops) for ops in schedule.ops]
    # All ranks go through the vocabulary's passes in one order: their meetings cannot cross.
    orders = {tuple((op.kind, op.mb) for op in ops if op.kind not in "FBIW") for ops in ours.ops}
    assert len(orders) == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(1, 24), st.sampled_from([1, 2]))
def test_vocabulary_costs_one_microbatch_a_barrier(
    pp: int, microbatches: int, barriers: int
) -> None:
    for name in ("1f1b", "zb_h1"):
        plain = build(name, pp, microbatches)
        peak = max(with_vocabulary(plain, barriers).in_flight())  # type: ignore[arg-type]
        assert peak <= min(pp + barriers, microbatches)
    halves = with_vocabulary(build("vhalf", pp, microbatches), barriers)  # type: ignore[arg-type]
    assert max(halves.in_flight()) <= pp + 2 + 2 * barriers


@pytest.mark.parametrize("name", ["1f1b", "vhalf"])
@pytest.mark.parametrize("barriers", [1, 2])
def test_vocabulary_stands_at_constant_offsets(name: str, barriers: int) -> None:
    """In the steady state one period of every rank has each pass once, in the same places."""
    pp, microbatches = 4, 40
    schedule = with_vocabulary(build(name, pp, microbatches), barriers)  # type: ignore[arg-type]
    for program in schedule.ops:
        period = 2 * 3 if name == "vhalf" else 2
        at = {
            kind: [i for i, op in enumerate(program) if op.kind == kind and 14 <= op.mb < 26]
            for kind in ("EF", "S", "T", "EB")
        }
        for places in at.values():
            assert {b - a for a, b in pairwise(places)} == {period + 4}


def test_vocabulary_balances_what_the_last_stage_has_too_much_of() -> None:
    """Stages of F 1 and B 2, and an output layer worth two of them."""
    pp, microbatches = 4, 16
    plain = build("1f1b", pp, microbatches)
    alike = OpCosts.uniform(pp)
    heavy = OpCosts(seconds={"F": (1.0, 1.0, 1.0, 3.0), "B": (2.0, 2.0, 2.0, 6.0)})
    naive = simulate(plain, heavy).makespan
    for barriers, s, t in ((1, 1.0, 0.5), (2, 0.5, 1.0)):
        shards = {"S": (s,) * pp, "T": (t,) * pp, "EF": (0.0,) * pp, "EB": (0.0,) * pp}
        cost = OpCosts(seconds={**alike.seconds, **shards})
        ours = simulate(with_vocabulary(plain, barriers), cost).makespan  # type: ignore[arg-type]
        assert naive / ours > 1.79


def test_vocabulary_follows_routes() -> None:
    plain = Schedule(
        "routed",
        (
            (Op("F", 0, 0), Op("F", 0, 1), Op("B", 0, 0), Op("B", 0, 1)),
            (Op("F", 1, 0), Op("B", 1, 0)),
            (Op("F", 2, 0), Op("B", 2, 0), Op("F", 2, 1), Op("B", 2, 1)),
        ),
        (0, 1, 2),
        2,
        routes={1: (0, 2)},
    )
    plain.validate()
    with_vocabulary(plain, 2).validate()


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("gpipe", (4, 8, 2), ("parallel.vpp", "1 with schedule gpipe")),
        ("1f1b", (4, 8, 2), ("parallel.vpp", "1 with schedule 1f1b")),
        ("zb_h1", (4, 8, 2), ("parallel.vpp", "1 with schedule zb_h1")),
        ("zbv", (4, 8, 1), ("parallel.vpp", "2 with schedule zbv")),
        ("vhalf", (4, 8, 3), ("parallel.vpp", "2 with schedule vhalf")),
        ("interleaved", (4, 10, 2), ("microbatches", "multiple of pp = 4", "8 or 12")),
        ("interleaved", (4, 8, 0), ("parallel.vpp", "at least 1")),
        ("gpipe", (0, 8, 1), ("parallel.pp", "at least 1")),
        ("1f1b", (4, 0, 1), ("microbatches", "at least 1")),
    ],
)
def test_numbers_without_an_order_are_refused(
    name: str, numbers: tuple[int, int, int], words: tuple[str, ...]
) -> None:
    with pytest.raises(PlanError) as caught:
        SCHEDULES.build(name).build(*numbers)
    assert all(word in str(caught.value) for word in words)


def test_vocabulary_refuses_what_it_cannot_split() -> None:
    plain = build("1f1b", 2, 2)
    with pytest.raises(PlanError, match=r"vocab_barriers.*1 or 2"):
        with_vocabulary(plain, 3)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="without passes of the vocabulary"):
        with_vocabulary(with_vocabulary(plain, 1), 1)


def test_sends_counts_the_busiest_rank() -> None:
    assert sends(looped(1, 3)) == 0
    assert sends(looped(2, 1)) == 1
    assert sends(looped(4, 1)) == 2
    assert sends(looped(4, 3)) == 6
    assert sends(vee(4)) == 4
    assert sends(vee(1)) == 0


MACHINE = Machine(
    name="two-nodes",
    nodes=2,
    devices_per_node=2,
    device=Device(
        name="g",
        kind="gpu",
        matmul_flops={"bf16": 1e14},
        memory=(MemoryTier(name="hbm", capacity_bytes=2**36),),
    ),
    links=(
        Link(scope="device", bandwidth=1e11, latency_s=1e-6),
        Link(scope="node", bandwidth=1e10, latency_s=1e-5),
    ),
)


@pytest.mark.parametrize("name", tuple(SCHEDULES))
@pytest.mark.parametrize(("pp", "scope"), [(1, ""), (2, "device"), (4, "node")])
def test_estimate_is_bytes_over_the_slowest_link(name: str, pp: int, scope: str) -> None:
    part = SCHEDULES.build(name)
    vpp = part.chunks or 2
    job = TrainJob(
        model="shoal-4m",
        global_batch=32,
        microbatch=4,
        seq_len=128,
        parallel=Parallel(pp=pp, vpp=vpp, schedule=name),  # type: ignore[arg-type]
        tokens=1_000_000,
    )
    shape = resolve(job.model)
    estimate = part.estimate(Work(shape=shape, job=job), MACHINE)
    place = build(name, pp, 8, vpp).place
    size = 8 * sends(place) * 4 * 128 * shape.hidden * 4.0
    assert estimate.wire_bytes == ({scope: size} if scope else {})
    link = MACHINE.link(scope) if scope else None
    seconds = size / link.bandwidth + 8 * sends(place) * link.latency_s if link else 0.0
    assert estimate.step_s.value == pytest.approx(seconds)


@settings(max_examples=60, deadline=None)
@given(built())
def test_csv_comes_back_as_it_went(schedule: Schedule) -> None:
    again = from_torch_csv(to_torch_csv(schedule), name=schedule.name)
    assert again == schedule


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0X0\n", ("line 1, column 2", "0X0", "compute_only")),
        ("0F0,0SEND_F0\n1F0\n", ("line 1, column 2", "compute_only")),
        ("", ("none", "without a gap")),
        ("0F0,0B0\n2F0,2B0\n", ("stages 0, 2", "without a gap")),
        ("0F0,0B9999999\n", ("micro-batch 9999999",)),
        ("0B0,0F0\n", ("deadlock",)),
        ("0F0\n", ("never done",)),
    ],
)
def test_csv_that_is_no_schedule_is_refused(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(PlanError) as caught:
        from_torch_csv(text)
    assert all(word in str(caught.value) for word in words)


def test_csv_leaves_out_idle_moments_and_sharding() -> None:
    text = "0UNSHARD,0F0,,0B0,0REDUCE_GRAD\n,1F0,1I0,1W0,1RESHARD\n"
    schedule = from_torch_csv(text)
    assert schedule.ops[1] == (Op("F", 1, 0), Op("I", 1, 0), Op("W", 1, 0))
    assert len(schedule.ops[0]) == 2


def test_csv_cannot_say_routes_or_vocabulary() -> None:
    plain = build("1f1b", 2, 2)
    with pytest.raises(PlanError, match="passes of the vocabulary"):
        to_torch_csv(with_vocabulary(plain, 1))
    with pytest.raises(PlanError, match="every micro-batch through all stages"):
        to_torch_csv(Schedule("r", plain.ops, plain.place, 2, routes={0: (0,)}))
