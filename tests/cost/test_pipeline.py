"""The simulator of schedules against closed forms, and against a plain event loop."""

from __future__ import annotations

import math
import resource
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import PlanError
from shoal.cost.pipeline.simulator import MachineLinks, Timeline, UniformLinks, simulate
from shoal.ir import Device, Layout, Link, Machine, MemoryTier
from shoal.ir.schedule import Event, LinkModel, Op, OpCosts, Schedule
from shoal.plan.schedules import SCHEDULES
from shoal.plan.schedules.vocab import with_vocabulary

whole = st.integers(0, 1000).map(float)


def build(name: str, pp: int, microbatches: int, vpp: int = 2) -> Schedule:
    part = SCHEDULES.build(name)
    schedule: Schedule = part.build(pp, microbatches, part.chunks or vpp)
    return schedule


@st.composite
def costs(draw: st.DrawFn, schedule: Schedule) -> OpCosts:
    """Whole seconds, so that sums are exact in any order."""

    def row(size: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(whole, min_size=size, max_size=size)))

    stages, ranks = schedule.stages, schedule.ranks
    return OpCosts(
        seconds={
            **{kind: row(stages) for kind in ("F", "B", "I", "W")},
            **{kind: row(ranks) for kind in ("EF", "EB", "S", "T")},
        },
        boundary_bytes=draw(whole),
        held_bytes=row(stages),
        barrier_s=draw(whole),
    )


@st.composite
def work(draw: st.DrawFn) -> tuple[Schedule, OpCosts]:
    name = draw(st.sampled_from(tuple(SCHEDULES)))
    pp, vpp, microbatches = (
        draw(st.integers(1, 5)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 9)),
    )
    if name == "interleaved" and microbatches > pp:
        microbatches -= microbatches % pp
    schedule = build(name, pp, microbatches, vpp)
    barriers = draw(st.sampled_from([0, 1, 2]))
    if barriers:
        schedule = with_vocabulary(schedule, barriers)
    return schedule, draw(costs(schedule))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 12), whole, whole)
def test_gpipe_and_1f1b_take_their_closed_form(pp: int, m: int, f: float, b: float) -> None:
    for name in ("gpipe", "1f1b"):
        cost = OpCosts.uniform(pp, forward=f, backward=b)
        assert simulate(build(name, pp, m), cost).makespan == (m + pp - 1) * (f + b)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), whole, whole)
def test_interleaved_takes_its_closed_form(
    pp: int, groups: int, v: int, f: float, b: float
) -> None:
    """f and b are of one of v chunks here: m (f + b) + (p - 1) (f + b) / v times v."""
    m = pp * groups
    cost = OpCosts.uniform(pp * v, forward=f, backward=b)
    result = simulate(build("interleaved", pp, m, v), cost).makespan
    assert result == m * v * (f + b) + (pp - 1) * (f + b)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), whole, whole)
def test_fewer_microbatches_than_ranks_take_the_length_of_the_pipeline(
    pp: int, m: int, v: int, f: float, b: float
) -> None:
    m = min(m, pp)
    cost = OpCosts.uniform(pp * v, forward=f, backward=b)
    assert simulate(build("interleaved", pp, m, v), cost).makespan == (pp * v + m - 1) * (f + b)


def plain(schedule: Schedule, cost: OpCosts, links: LinkModel) -> list[Event]:
    """The same by the book: one pass at a time, from what :meth:`Schedule.before` says."""
    end: dict[Op, float] = {}
    events: dict[int, list[Event]] = {rank: [] for rank in range(schedule.ranks)}
    meet = cost.barrier_s if schedule.ranks > 1 else 0.0
    left = {rank: list(ops) for rank, ops in enumerate(schedule.ops)}
    while any(left.values()):
        before = len(end)
        for rank, ops in left.items():
            while ops and all(need in end for need in schedule.before(ops[0])):
                op = ops.pop(0)
                at = max([0.0, *(event.end for event in events[rank][-1:])])
                for need in schedule.before(op):
                    arrives = end[need]
                    if need.kind in "FBIW" and op.kind in "FBIW":
                        source = schedule.rank_of(need)
                        arrives += links.seconds(source, rank, cost.boundary_bytes)
                    else:
                        arrives += meet
                    at = max(at, arrives)
                end[op] = at + cost.of(op)
                events[rank].append(Event(rank, op, at, end[op]))
        assert len(end) > before
    return [event for rank in events for event in events[rank]]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(work(), st.integers(0, 5), st.sampled_from([1.0, 4.0, math.inf]))
def test_equals_a_plain_event_loop(
    given_: tuple[Schedule, OpCosts], latency: int, bandwidth: float
) -> None:
    schedule, cost = given_
    links = UniformLinks(bandwidth=bandwidth, latency_s=float(latency))
    timeline = simulate(schedule, cost, links)
    assert list(timeline.events()) == plain(schedule, cost, links)
    assert len(timeline) == sum(map(len, schedule.ops))


@settings(max_examples=60, deadline=None)
@given(work())
def test_memory_is_held_from_forward_to_the_end_of_backward(
    given_: tuple[Schedule, OpCosts],
) -> None:
    schedule, cost = given_
    for rank, peak in enumerate(simulate(schedule, cost).peak_held_bytes):
        held, most = 0.0, 0.0
        for kind, stage, _ in schedule.ops[rank]:
            if kind in ("F", "B", "W"):
                held += cost.held_bytes[stage] * (1 if kind == "F" else -1)
            most = max(most, held)
        assert peak == most


@settings(max_examples=60, deadline=None)
@given(work())
def test_no_rank_does_two_things_at_once_and_all_time_is_counted(
    given_: tuple[Schedule, OpCosts],
) -> None:
    schedule, cost = given_
    timeline = simulate(schedule, cost)
    free = [0.0] * schedule.ranks
    for rank, _, start, end in timeline.events():
        assert free[rank] <= start <= end
        free[rank] = end
    assert timeline.makespan == max(free)
    spent = [sum(cost.of(op) for op in ops) for ops in schedule.ops]
    assert list(timeline.busy) == spent
    if sum(spent):
        idle = schedule.ranks * timeline.makespan - sum(spent)
        assert timeline.bubble == pytest.approx(idle / sum(spent))


def test_routes_skip_stages_and_swap_them() -> None:
    ops = (
        (Op("F", 0, 0), Op("F", 0, 1), Op("B", 0, 0), Op("B", 0, 1)),
        (Op("F", 1, 0), Op("B", 1, 0)),
        (Op("F", 2, 1), Op("F", 2, 0), Op("B", 2, 0), Op("B", 2, 1)),
    )
    routed = Schedule("r", ops, (0, 1, 2), 2, routes={0: (0, 2, 1), 1: (0, 2)})
    routed.validate()
    cost = OpCosts.uniform(3, boundary_bytes=1.0)
    links = UniformLinks(bandwidth=2.0)
    assert simulate(routed, OpCosts.uniform(3)).makespan == 13.0
    assert list(simulate(routed, cost, links).events()) == plain(routed, cost, links)


MACHINE = Machine(
    name="two-nodes",
    nodes=2,
    devices_per_node=4,
    device=Device(name="g", kind="gpu", memory=(MemoryTier(name="hbm", capacity_bytes=2**36),)),
    links=(
        Link(scope="device", bandwidth=1e11, latency_s=1e-6),
        Link(scope="node", bandwidth=1e10, latency_s=1e-5),
    ),
)


def test_links_of_a_machine_go_by_the_distance_of_ranks() -> None:
    slow = MachineLinks(MACHINE, Layout((("pp", 4), ("dp", 1), ("tp", 2))))
    assert [slow.scope(r, r + 1) for r in range(3)] == ["device", "node", "device"]
    assert slow.seconds(1, 2, 1e9) == pytest.approx(1e9 / 1e10 + 1e-5)
    assert slow.seconds(0, 1, 1e9) == pytest.approx(1e9 / 1e11 + 1e-6)
    assert slow.seconds(2, 2, 1e9) == 0.0
    # The same ranks with pipelines inside the nodes.
    near = MachineLinks(MACHINE, Layout((("dp", 2), ("pp", 4))))
    assert {near.scope(r, r + 1) for r in range(3)} == {"device"}


def test_links_of_a_cpu_are_loopback_within_a_host() -> None:
    host = MACHINE.model_copy(
        update={
            "nodes": 1,
            "devices_per_node": 1,
            "device": Device(
                name="c", kind="cpu", memory=(MemoryTier(name="dram", capacity_bytes=2**34),)
            ),
            "links": (Link(scope="loopback", bandwidth=1e9, latency_s=1e-5),),
        }
    )
    layout = Layout((("pp", 4),))
    assert MachineLinks(host, layout).scope(0, 3) == "loopback"
    bare = host.model_copy(update={"links": ()})
    assert MachineLinks(bare, layout).scope(0, 3) == ""
    assert MachineLinks(bare, layout).seconds(0, 3, 1e9) == 0.0


def test_measured_events_are_a_timeline() -> None:
    events = list(simulate(build("1f1b", 3, 4), OpCosts.uniform(3)).events())
    again = Timeline.of(reversed(events), ranks=4)
    assert list(again.events()) == events
    assert again.makespan == 18.0
    assert again.busy == (12.0, 12.0, 12.0, 0.0)
    assert again.peak_held_bytes == ()
    assert Timeline.of([]).makespan == Timeline.of([]).bubble == 0.0
    with pytest.raises(PlanError, match="ends after it starts"):
        Timeline.of([Event(0, Op("F", 0, 0), 2.0, 1.0)])
    with pytest.raises(PlanError, match="of kind F, B"):
        Timeline.of([Event(0, Op("X", 0, 0), 0.0, 1.0)])


def test_what_cannot_be_simulated_is_refused() -> None:
    good = build("1f1b", 2, 2)
    two = OpCosts.uniform(2)
    with pytest.raises(PlanError, match=r"seconds of B .*0 numbers.*2, one for each stage"):
        simulate(good, OpCosts(seconds={"F": (1.0, 1.0)}))
    with pytest.raises(PlanError, match="one for each rank"):
        simulate(with_vocabulary(good, 1), two)
    with pytest.raises(PlanError, match="held_bytes"):
        simulate(good, two.model_copy(update={"held_bytes": (1.0,)}))
    stuck = Schedule("s", (good.ops[0], good.ops[1][::-1]), good.place, 2)
    with pytest.raises(PlanError, match="deadlock"):
        simulate(stuck, two)
    crossed = Schedule(
        "s",
        (
            (Op("F", 0, 0), Op("B", 0, 0), Op("F", 0, 1), Op("B", 0, 1)),
            (Op("F", 1, 1), Op("B", 1, 1), Op("F", 1, 0), Op("B", 1, 0)),
        ),
        (0, 1),
        2,
    )
    with pytest.raises(PlanError, match="deadlock"):
        simulate(crossed, two)
    missing = Schedule("s", (good.ops[0], good.ops[1][2:]), good.place, 2)
    with pytest.raises(PlanError, match="never done"):
        simulate(missing, two)
    foreign = Schedule("s", ((Op("F", 5, 0),), ()), (0, 1), 1)
    with pytest.raises(PlanError, match="of no stage"):
        simulate(foreign, two)
    unknown = Schedule("s", ((Op("SEND_F", 0, 0),),), (0,), 1)
    with pytest.raises(PlanError, match="SEND_F"):
        simulate(unknown, OpCosts.uniform(1))


@pytest.mark.slow
def test_two_million_passes_of_a_thousand_ranks() -> None:
    """Seconds and memory are printed, not judged: other work may share the machine."""
    pp, m, v = 1024, 512, 2
    before = time.perf_counter()
    schedule = build("interleaved", pp, m, v)
    timeline = simulate(schedule, OpCosts.uniform(pp * v))
    spent = time.perf_counter() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{len(timeline)} passes in {spent:.2f} s, process peak {peak:.0f} MiB")
    assert len(timeline) == 2 * pp * m * v == 2_097_152
    assert timeline.makespan == 3 * (pp * v + m - 1)
    assert set(timeline.busy) == {3.0 * m * v}
    assert timeline.bubble == pytest.approx(SCHEDULES.build("interleaved").bubble(pp, m, v))
