"""Ranks on clusters of different networks: who talks over what, and the best order."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from shoal.app.commands.explain import app
from shoal.core.config import parse
from shoal.core.errors import MachineError, PlanError
from shoal.core.files import read_yaml
from shoal.ir import Parallel, TrainJob
from shoal.machine.described import load
from shoal.parallel.legal import check_split
from shoal.plan.topology.clusters import Cluster, Clusters, InterClusterLink, Port
from shoal.plan.topology.groups import DegreeGrid
from shoal.plan.topology.order import Price, brute, plan_order
from shoal.plan.topology.picture import picture
from shoal.plan.topology.speed import adaptive, exact, slowest
from shoal.plan.topology.ways import interleaved

IB, ROCE, SLOW = 2.5e10, 1.25e10, 1.25e9


def cluster(
    name: str, nodes: int, nic: Any = "infiniband", bandwidth: float = IB, **more: Any
) -> Cluster:
    return Cluster(name=name, nodes=nodes, nic=nic, bandwidth=bandwidth, **more)


def clusters(*members: Cluster, per_node: int = 2, **changes: Any) -> Clusters:
    common = {"common": Port(bandwidth=SLOW)}
    return Clusters(
        device="A100", devices_per_node=per_node, clusters=members, **(common | changes)
    )


TWO = clusters(cluster("ib", 2), cluster("roce", 2, "roce", ROCE))


def job(**changes: Any) -> TrainJob:
    return TrainJob(
        **{
            "model": "shoal-27m",
            "seq_len": 512,
            "global_batch": 16,
            "microbatch": 1,
            "precision": "bf16",
            **changes,
        }
    )


def test_ways_and_ports() -> None:
    assert TWO.way(0, 1).nic == "device"
    assert TWO.way(0, 2) == ("infiniband", IB, 5e-6)
    assert TWO.way(4, 6).nic == "roce"
    assert TWO.way(0, 4)[:2] == ("ethernet", SLOW)
    joined = clusters(
        cluster("a", 1),
        cluster("b", 1),
        joints=(InterClusterLink(between=("b", "a"), nic="infiniband", bandwidth=1e9),),
        common=None,
    )
    assert joined.way(0, 2)[:2] == ("infiniband", 1e9)
    # Equal networks that nothing joins do not reach each other either.
    assert clusters(cluster("a", 1), cluster("b", 1)).way(0, 2).nic == "ethernet"


def test_group_table() -> None:
    order = plan_order(job(), TWO, pp=2, tp=1)
    assert order.grid == DegreeGrid(2, 4, 1)
    assert order.crossing == 0
    assert order.reason == ""
    by_stage = {group.ranks: group for group in order.groups("dp")}
    assert {group.nic for group in by_stage.values()} == {"infiniband", "roce"}
    assert [group.bandwidth for group in order.groups("dp")] == [
        IB if group.nic == "infiniband" else ROCE for group in order.groups("dp")
    ]
    chain = order.groups("pp")[0]
    assert chain.nic == "ethernet"
    assert chain.bandwidth == SLOW / 2  # both devices of a node send at once
    naive = order._replace(devices=interleaved(TWO))
    assert naive.crossing == 2
    assert {group.nic for group in naive.groups("dp")} == {"ethernet"}
    two = plan_order(job(), TWO, pp=2, tp=2)
    assert {group.nic for group in two.groups("tp")} == {"device"}
    # Two rings leave a node through one port.
    assert {group.bandwidth for group in two.groups("dp")} == {IB / 2, ROCE / 2}


SOME = (
    pytest.param(TWO, DegreeGrid(2, 4, 1), marks=pytest.mark.slow),
    (TWO, DegreeGrid(2, 2, 2)),
    pytest.param(TWO, DegreeGrid(4, 2, 1), marks=pytest.mark.slow),
    (clusters(cluster("a", 1), cluster("b", 2, "roce", ROCE), per_node=2), DegreeGrid(3, 2, 1)),
    (
        clusters(
            cluster("a", 1, flops=1e14),
            cluster("b", 1, "roce", ROCE, flops=2e14),
            cluster("c", 1, "ethernet", SLOW, flops=0.5e14),
        ),
        DegreeGrid(3, 2, 1),
    ),
    # Of unequal size, with stages that must lie in two clusters.
    (clusters(cluster("a", 1), cluster("b", 2, "roce", ROCE)), DegreeGrid(2, 3, 1)),
)


@pytest.mark.parametrize(("machine", "grid"), SOME)
def test_as_good_as_all_orders(machine: Clusters, grid: DegreeGrid) -> None:
    one = job(global_batch=12 if grid.dp == 3 else 8)
    priced = Price(one, machine, grid)
    best, devices = brute(priced)
    result = plan_order(one, machine, pp=grid.pp, tp=grid.tp)
    assert result.step.seconds <= best * (1 + 1e-9), devices
    assert result.step.seconds <= priced(interleaved(machine))[0].seconds
    assert sorted(result.devices) == list(range(machine.num_devices))
    assert sum(result.step.stages) == 8 >= grid.pp
    assert min(result.step.stages) >= 1


@pytest.mark.slow
def test_any_number_of_clusters() -> None:
    many = clusters(
        *(
            cluster(f"c{i}", 1 + i % 3, "roce" if i % 2 else "infiniband", IB / (1 + i))
            for i in range(8)
        ),
        per_node=1,
    )
    result = plan_order(job(model="Llama-3.2-3B", global_batch=2), many, tp=1)
    assert result.grid.world == many.num_devices == 15
    assert result.crossing == 0
    assert len(set(result.hosts)) == 15


def test_no_way_inside_is_explained() -> None:
    uneven = clusters(cluster("a", 3), cluster("b", 1))
    result = plan_order(job(), uneven, pp=2, tp=1)
    assert result.crossing == 1
    assert "a stage is dp * tp = 4 devices, and a has 6, b has 2" in result.reason
    assert "pp of 4, 8 would keep them inside" in result.reason
    # Left to itself it takes one that stays inside.
    assert plan_order(job(), uneven).crossing == 0


def test_what_a_run_says() -> None:
    result = plan_order(job(), TWO, pp=2, tp=1)
    split = result.parallel()
    assert split.order == "pp-dp-cp-tp"
    one = job(parallel=split.model_dump(mode="json"))
    assert check_split(one, _shape()).ranks == 2
    # Each data-parallel group of the run is one of the plan's: rows of a replica stay its own.
    assert set(split.attention().groups("dp")) == {group.ranks for group in result.groups("dp")}
    assert split.attention().coord(5)["dp"] == Parallel(pp=2, dp=4).attention().coord(5)["dp"]


def _shape() -> Any:
    from shoal.cost.shapes import find

    return find("shoal-27m")


def test_overlap_hides_sums() -> None:
    slow = clusters(cluster("a", 2, "ethernet", SLOW), cluster("b", 2, "ethernet", SLOW))
    plain = plan_order(job(), slow, pp=2, tp=1)
    hidden = plan_order(job(), slow, pp=2, tp=1, overlap=True)
    assert hidden.step.seconds < plain.step.seconds
    assert hidden.step.pipeline_s == plain.step.pipeline_s


def test_layers_by_speed() -> None:
    assert adaptive((1, 1), 8) == (4, 4)
    assert adaptive((2, 1), 30) == (20, 10)  # 21 and 10, of which the later one gives
    assert adaptive((1, 1, 1), 7) == (3, 2, 2)  # what is left, to who has done with it first
    assert adaptive((9, 1), 4) == (3, 1)
    assert adaptive((4, 4, 1), 9, alpha=2) == (4, 4, 1)  # too much is taken back
    assert exact((2, 1), [1.0] * 30) == (20, 10)
    with pytest.raises(PlanError, match="stages = 3: expected 1 to 2"):
        adaptive((1, 1, 1), 2)
    with pytest.raises(PlanError, match="speed of stage 1 = 0"):
        exact((1, 0), [1.0, 1.0])
    with pytest.raises(PlanError, match=r"alpha = 0\.5"):
        adaptive((1, 1), 2, alpha=0.5)


@settings(max_examples=40, deadline=None)
@given(
    speeds=st.lists(st.floats(0.1, 10), min_size=1, max_size=4),
    costs=st.lists(st.floats(0.01, 10), min_size=4, max_size=9),
)
def test_exact_cut_is_the_best(speeds: list[float], costs: list[float]) -> None:
    result = exact(speeds, costs)
    rule = adaptive(speeds, len(costs))
    for cut in (result, rule):
        assert sum(cut) == len(costs)
        assert min(cut) >= 1
    every = [
        slowest([b - a for a, b in itertools.pairwise((0, *ends, len(costs)))], speeds, costs)
        for ends in itertools.combinations(range(1, len(costs)), len(speeds) - 1)
    ]
    assert slowest(result, speeds, costs) == pytest.approx(min(every), rel=1e-12)
    assert slowest(rule, speeds, costs) >= min(every) * (1 - 1e-12)


def test_sites_are_clusters() -> None:
    machine = load("2x4xA100@IB200")
    one = Clusters.of(machine)
    assert [c.nodes for c in one.clusters] == [2]
    assert one.num_devices == machine.num_devices
    assert plan_order(job(global_batch=8), one, tp=1).crossing == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"common": None}, "no link between ib and roce: give common"),
        ({"clusters": [*TWO.clusters, TWO.clusters[0]]}, "cluster = 'ib'"),
        ({"joints": [{"between": ["ib", "rocky"], "bandwidth": 1e9}]}, "joint between = 'rocky'"),
        ({"joints": [{"between": ["ib", "ib"], "bandwidth": 1e9}]}, "two different clusters"),
    ],
)
def test_bad_clusters(changes: dict[str, Any], message: str) -> None:
    raw = TWO.model_dump(mode="json", exclude_none=True) | changes
    with pytest.raises(MachineError, match=message):
        Clusters.model_validate(raw)


def test_bad_requests() -> None:
    half = [cluster("a", 1, flops=1e14), cluster("b", 1)]
    with pytest.raises(MachineError, match="flops of = 'b': expected measured"):
        clusters(*half)
    with pytest.raises(PlanError, match=r"pp, tp = '3, any': expected .* 8 devices"):
        plan_order(job(), TWO, pp=3)
    big = clusters(cluster("a", 5), cluster("b", 4))
    with pytest.raises(PlanError, match="devices = 18: expected at most 8"):
        brute(Price(job(global_batch=18), big, DegreeGrid(1, 18, 1)))


def test_command(tmp_path: Path) -> None:
    file, svg = tmp_path / "clusters.yaml", tmp_path / "ranks.svg"
    TWO.save(file)
    options = ["--model", "shoal-27m", "--global-batch", "16", "--seq-len", "512", "--pp", "2"]
    call = ["topology", str(file), *options, "--tp", "1"]
    runner = CliRunner()
    shown = runner.invoke(app, [*call, "--out", str(tmp_path), "--picture", str(svg)])
    assert shown.exit_code == 0, shown.output
    assert "infiniband" in shown.output
    assert "hosts in this order: " in shown.output
    written = read_yaml(tmp_path / "job.yaml")
    assert parse(Parallel, written["parallel"], where="split").pp == 2
    assert svg.read_text().startswith("<svg")
    data = json.loads(runner.invoke(app, [*call, "-o", "json"]).output)
    assert data["crossing"] == 0
    assert data["parallel"]["order"] == "pp-dp-cp-tp"
    assert len(data["devices"]) == 8
    assert len(data["groups"]["dp"]) == 2
    assert "rank 7" in picture(plan_order(job(), TWO, pp=2, tp=1))
