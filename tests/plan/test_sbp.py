"""Placement of graphs: the cost of the best of all choices, pins, and memory."""

from __future__ import annotations

import random

import pytest

from shoal.claims.experiments.oneflow import greedy, random_graph
from shoal.claims.lab.sbp_exhaustive import least_seconds
from shoal.core.errors import PlanError
from shoal.plan.sbp.search import Leaf, MeshRates, OpGraph, OpNode, place

RATES = MeshRates(flops_per_s=1e12, bytes_per_s=1e9, latency_s=1e-9)


def mlp(tokens: int = 16, width: int = 32, bias: bool = False) -> OpGraph:
    shapes = {"x": (tokens, width), "up": (4 * width, width), "down": (width, 4 * width)}
    shapes |= {"b": (4 * width,)} if bias else {}
    return OpGraph(
        leaves=tuple(Leaf(name=name, shape=shape) for name, shape in shapes.items()),
        ops=(
            OpNode(name="h", kind="linear", inputs=("x", "up", *(["b"] if bias else []))),
            OpNode(name="a", kind="gelu", inputs=("h",)),
            OpNode(name="y", kind="linear", inputs=("a", "down")),
        ),
    )


@pytest.mark.slow
def test_random_graphs_cost_what_the_best_of_all_choices_costs() -> None:
    better = 0
    for number in range(25):
        graph, pins, mesh, rates = random_graph(random.Random(number))
        plan = place(graph, mesh, pins=pins, rates=rates)
        # Nothing tells the search of all choices what to find.
        start = greedy(graph, mesh, pins, rates).seconds * (1 + 1e-6)
        least = least_seconds(graph, mesh, pins=pins, rates=rates, start=start)
        assert plan.seconds == pytest.approx(least, rel=1e-9)
        better += start > least * (1 + 1e-3)
    assert better > 5


def test_trees_by_both_methods() -> None:
    graph = mlp(bias=True)
    pins = {"x": "B,B", "y": "S(0),B"}
    first = place(graph, (2, 2), pins=pins, rates=RATES)
    second = place(graph, (2, 2), pins=pins, rates=RATES, method="ilp")
    assert first.method == "dynamic programming"
    assert second.method == "integer program"
    assert first.seconds == pytest.approx(second.seconds, rel=1e-9)
    assert first.seconds == pytest.approx(
        least_seconds(graph, (2, 2), pins=pins, rates=RATES), rel=1e-9
    )


def test_short_memory_makes_columns_then_rows() -> None:
    graph = mlp()
    pins = {"x": "B", "y": "B"}
    free = place(graph, (4,), pins=pins, rates=MeshRates())
    assert free.placements["down"] == "S(1)" or free.placements["up"] == "B"
    limit = 0.5 * graph.bytes_alone
    plan = place(graph, (4,), pins=pins, memory_limit=limit, rates=MeshRates())
    assert (plan.placements["up"], plan.placements["down"]) == ("S(0)", "S(1)")
    assert plan.results["y"] == "P(sum)"
    assert plan.boxing_bytes == 2 * 3 * 16 * 32 * 4
    assert plan.memory_bytes <= limit
    with pytest.raises(PlanError, match="holds this graph in 1,000 bytes"):
        place(graph, (4,), pins=pins, memory_limit=1000)


def test_a_tensor_of_several_users_is_boxed_once() -> None:
    graph = OpGraph(
        leaves=(Leaf(name="x", shape=(8, 8)),),
        ops=(
            OpNode(name="a", kind="softmax", inputs=("x",), attributes={"dim": 0}),
            OpNode(name="b", kind="softmax", inputs=("x",), attributes={"dim": 0}),
            OpNode(name="c", kind="add", inputs=("a", "b")),
        ),
    )
    plan = place(graph, (2,), pins={"x": "S(0)"}, rates=RATES)
    assert [move.tensor for move in plan.moves if move.bytes] == ["x"]
    assert plan.boxing_bytes == 8 * 8 * 4 // 2


def test_partial_goes_into_no_nonlinear_operation() -> None:
    graph = OpGraph(
        leaves=(Leaf(name="x", shape=(8, 8)),), ops=(OpNode(name="y", kind="relu", inputs=("x",)),)
    )
    # The tensor is pinned: it is boxed first.
    plan = place(graph, (2,), pins={"x": "P"}, rates=RATES)
    assert plan.boxing_bytes == 8 * 8 * 4
    assert plan.inputs["y"][0].startswith("S")
    # What the operation takes is pinned: that cannot be.
    with pytest.raises(
        PlanError, match=r"relu cannot take x so.*expected one of B, S\(0\), S\(1\)"
    ):
        place(graph, (2,), pins={"y:0": "P"})


@pytest.mark.parametrize(
    ("pins", "match"),
    [
        ({"z": "B"}, "did you mean|expected a tensor"),
        ({"x": "S(2)"}, "dimensions that a tensor of shape"),
        ({"x": "B,B"}, "1 entries"),
        ({"y:7": "B"}, "OPERATION:i"),
        ({"x": "Q"}, "cannot read 'Q'"),
    ],
)
def test_bad_pins_are_refused(pins: dict[str, str], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        place(mlp(), (2,), pins=pins)


def test_bad_graphs_are_refused() -> None:
    x = Leaf(name="x", shape=(4, 4))
    for ops, match in (
        ([OpNode(name="x", kind="relu", inputs=("x",))], "a name of its own"),
        ([OpNode(name="a", kind="relu", inputs=("b",))], "listed before"),
    ):
        with pytest.raises(PlanError, match=match):
            OpGraph(leaves=(x,), ops=tuple(ops))
    for op, match in (
        (OpNode(name="a", kind="rellu", inputs=("x",)), "did you mean 'relu'"),
        (OpNode(name="a", kind="matmul", inputs=("x",)), "inputs = 1"),
        (OpNode(name="a", kind="sum", inputs=("x",), attributes={"dim": 5}), "a: dim = 5"),
        (OpNode(name="a", kind="reshape", inputs=("x",), attributes={"shape": [3]}), "as many"),
    ):
        with pytest.raises(PlanError, match=match):
            place(OpGraph(leaves=(x,), ops=(op,)), (2,))
    with pytest.raises(PlanError, match="mesh"):
        place(mlp(), ())
    with pytest.raises(PlanError, match="method"):
        place(mlp(), (2,), method="dynamic", memory_limit=1e9)
