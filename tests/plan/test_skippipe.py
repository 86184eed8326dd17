"""Schedule skippipe: routes that ranks can run, their price, and what is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError, PlanError
from shoal.cost.pipeline.simulator import simulate
from shoal.cost.shapes import resolve
from shoal.ir import Device, Link, Machine, MemoryTier, TrainJob, Work
from shoal.ir.schedule import OpCosts, Schedule
from shoal.plan.partition import cells_for, stages_for
from shoal.plan.routes.network import WanNetwork
from shoal.plan.schedules import SCHEDULES


def build(pp: int, microbatches: int, **options: object) -> Schedule:
    part: Schedule = SCHEDULES.build({"name": "skippipe", **options}).build(pp, microbatches)
    return part


def test_without_options_it_is_1f1b() -> None:
    assert build(4, 8) == SCHEDULES.build("1f1b").build(4, 8)
    assert build(1, 8, keep=1) == SCHEDULES.build("1f1b").build(1, 8)


@pytest.mark.parametrize(
    ("pp", "microbatches", "options"),
    [
        (4, 6, {"keep": 3}),
        (4, 6, {"keep": 4}),
        (4, 5, {"keep": 2, "swap": True}),
        (6, 7, {"keep": 3, "of": 4}),
        (5, 10, {"keep": 2, "of": 2}),
    ],
)
def test_routes_begin_and_end_on_one_rank_and_visit_evenly(pp, microbatches, options) -> None:
    schedule = build(pp, microbatches, **options)
    schedule.validate()
    stages, keep = options.get("of", pp), options["keep"]
    assert schedule.bare_head
    assert schedule.num_cells == stages + 1
    counts = [0] * (stages + 1)
    for mb in range(microbatches):
        route = schedule.route(mb)
        cells = [schedule.cell_of[stage] for stage in route]
        assert cells[0] == 0
        assert cells[-1] == stages
        assert len(set(cells)) == keep + 1
        assert schedule.place[route[0]] == schedule.place[route[-1]]
        for cell in cells:
            counts[cell] += 1
    assert counts[0] == counts[-1] == microbatches
    assert max(counts[1:-1]) - min(counts[1:-1]) <= 1
    assert set(schedule.place) == set(range(pp))
    assert max(schedule.in_flight()) <= stages
    assert [schedule.cell_of[s] for s in schedule.whole_route] == list(range(stages + 1))


def test_routes_need_a_cell_for_each_stage() -> None:
    from dataclasses import replace

    schedule = build(4, 6, keep=3)
    with pytest.raises(PlanError, match="a cell for each of 5 stages"):
        replace(schedule, cells=schedule.cells[:-1]).validate()


def test_bubble_is_what_the_simulator_finds() -> None:
    part = SCHEDULES.build({"name": "skippipe", "keep": 3, "of": 4})
    schedule = part.build(8, 12)
    ones = tuple(float(cell < 4) for cell in schedule.cell_of)
    cost = OpCosts(seconds={"F": ones, "B": tuple(2 * one for one in ones)})
    step = simulate(schedule, cost).makespan
    assert (1 + part.bubble(8, 12)) * 3 * 12 * 4 / 8 == pytest.approx(step)
    assert part.in_flight(8, 12) == max(schedule.in_flight())


def test_more_ranks_for_the_busy_stage_make_skipping_pay() -> None:
    full = SCHEDULES.build({"name": "skippipe", "keep": 4, "of": 4})
    skips = SCHEDULES.build({"name": "skippipe", "keep": 2, "of": 4})
    assert (1 + skips.bubble(8, 16)) / (1 + full.bubble(8, 16)) < 0.7


def test_estimate_counts_what_the_busiest_rank_sends(tmp_path: Path) -> None:
    machine = Machine(
        name="nodes",
        nodes=4,
        devices_per_node=1,
        device=Device(
            name="g",
            kind="gpu",
            matmul_flops={"bf16": 1e14},
            memory=(MemoryTier(name="hbm", capacity_bytes=2**36),),
        ),
        links=(Link(scope="node", bandwidth=1e10, latency_s=1e-5),),
    )
    options = {"name": "skippipe", "keep": 3}

    def work(schedule: object) -> Work:
        job = TrainJob(
            model="shoal-4m",
            global_batch=12,
            microbatch=2,
            seq_len=128,
            parallel={"pp": 4, "schedule": schedule},  # type: ignore[arg-type]
        )
        return Work(shape=resolve(job.model), job=job)

    part = SCHEDULES.build(options)
    schedule = part.build(4, 6)
    sends = [0] * 4
    for mb in range(6):
        ranks = [schedule.place[s] for s in schedule.route(mb)]
        for a, b in pairwise(ranks):
            sends[a] += a != b
            sends[b] += a != b
    size = 2 * 128 * resolve("shoal-4m").hidden * 4.0
    estimate = part.estimate(work(options), machine)
    assert estimate.wire_bytes == {"node": max(sends) * size}
    assert estimate.step_s.value == pytest.approx(max(sends) * (size / 1e10 + 1e-5))
    file = tmp_path / "net.yaml"
    WanNetwork.wan(4).save(file)
    far = {**options, "network": str(file), "effort": 2}
    assert SCHEDULES.build(far).estimate(work(far), machine).wire_bytes.keys() == {"wan"}


def test_network_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "net.yaml"
    WanNetwork.wan(6).save(file)
    schedule = build(6, 6, keep=2, of=3, network=str(file), effort=2)
    schedule.validate()
    assert schedule.ranks == 6
    with pytest.raises(PlanError, match="6, the nodes of network wan-6"):
        build(5, 6, keep=2, of=3, network=str(file))
    with pytest.raises(ConfigError, match=r"missing\.yaml"):
        build(6, 6, keep=2, network=str(tmp_path / "missing.yaml"))


def test_cells_of_a_bare_head_share_the_blocks_evenly() -> None:
    shape = resolve("shoal-4m")
    schedule = build(3, 6, keep=2)
    cells = cells_for(shape, schedule)
    assert cells == (*stages_for(shape, 3), range(shape.num_layers, shape.num_layers))
    plain = SCHEDULES.build("1f1b").build(3, 6)
    assert cells_for(shape, plain, vocab_split="none") == stages_for(shape, 3, vocab_split="none")


@pytest.mark.parametrize(
    ("pp", "microbatches", "options", "words"),
    [
        (4, 6, {"keep": 5}, "keep = 5: expected 1 to 4"),
        (4, 6, {"keep": 3, "of": 5}, "at most pp = 4"),
        (4, 1, {"keep": 3}, "microbatches = 1.*at least 2"),
        (4, 6, {"keep": 1}, "keep at least 2"),
        (4, 0, {"keep": 2}, "microbatches"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(pp, microbatches, options, words) -> None:
    with pytest.raises(PlanError, match=words):
        build(pp, microbatches, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep": 0}, "skippipe.keep = 0"),
        ({"keep": 4, "of": 3}, "1 to of = 3"),
        ({"effort": -1}, "skippipe.effort"),
        ({"skip": 3}, "skip"),
        ({"forward_s": 0.0}, "skippipe.forward_s"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words) -> None:
    with pytest.raises(ConfigError, match=words):
        SCHEDULES.build({"name": "skippipe", **options})
