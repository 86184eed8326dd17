"""The two rules on graphs written by hand: no torch, and names that say nothing."""

from __future__ import annotations

import pytest

from shoal.core.errors import PlanError
from shoal.plan.autotp.flow import SplitDimension, Stop, travel
from shoal.plan.autotp.graph import Graph, GraphNode, Ref
from shoal.plan.autotp.plan import plan_tensors


class Sketch:
    """Writes a graph line by line; parameters are named p0, p1 ... in order."""

    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []

    def add(self, kind: str, shape: tuple[int, ...] | None, op: str = "", *args: object) -> Ref:
        letter = {"param": "p", "input": "x", "call": "v", "constant": "c"}[kind]
        name = f"{letter}{sum(n.kind == kind for n in self.nodes)}"
        integer = kind == "input" and len(shape or ()) == 2
        self.nodes.append(
            GraphNode(
                name=name,
                kind=kind,
                op=op,
                args=args,
                shape=shape,
                target=f"{name}.w",
                integer=integer,
            )  # type: ignore[arg-type]
        )
        return Ref(name)

    def linear(self, x: Ref, out: int, bias: bool = True) -> Ref:
        shape = self.shape(x)
        weight = self.add("param", (out, shape[-1]))
        more = [self.add("param", (out,))] if bias else []
        return self.add("call", (*shape[:-1], out), "linear", x, weight, *more)

    def call(self, op: str, shape: tuple[int, ...] | None, *args: object) -> Ref:
        return self.add("call", shape, op, *args)

    def shape(self, x: Ref) -> tuple[int, ...]:
        return next(n.shape for n in self.nodes if n.name == x.name) or ()

    def done(self, *out: Ref) -> Graph:
        last = GraphNode(name="output", kind="output", args=(list(out),))
        return Graph([*self.nodes, last], "sketch")


def styles(graph: Graph, tp: int = 2) -> dict[str, str]:
    return {name: split.style for name, split in plan_tensors(graph, tp)[0].weights.items()}


def test_products_alternate() -> None:
    """First by outputs, second by inputs, third by outputs again: rule 1."""
    g = Sketch()
    x = g.add("input", (2, 3, 8))
    for _ in range(4):
        x = g.call("gelu", g.shape(x), g.linear(x, 8, bias=False))
    result = styles(g.done(x))
    assert result == {"p0.w": "column", "p1.w": "row", "p2.w": "column", "p3.w": "row"}


def test_gate_and_up_go_together() -> None:
    g = Sketch()
    x = g.add("input", (2, 3, 8))
    gate, up = g.linear(x, 16), g.linear(x, 16)
    both = g.call("mul", (2, 3, 16), g.call("silu", (2, 3, 16), gate), up)
    plan, flow = plan_tensors(g.done(g.linear(both, 8)), 2)
    assert {k: v.style for k, v in plan.weights.items()} == {
        "p0.w": "column",
        "p1.w": "column",
        "p2.w": "column",
        "p3.w": "column",
        "p4.w": "row",
    }
    assert plan.all_reduces == 1
    assert flow.columns == {"v0", "v1"}


def attention(heads: int, fused: bool, kv: int | None = None) -> Graph:
    g = Sketch()
    x = g.add("input", (2, 3, 4 * heads))
    width = 4 * heads
    if fused:
        qkv = g.linear(x, 3 * width)
        three = g.call("split", None, qkv, width, 2)
        parts = [g.call("getitem", (2, 3, width), three, k) for k in range(3)]
    else:
        parts = [g.linear(x, 4 * n) for n in (heads, kv or heads, kv or heads)]
    split = []
    for part in parts:
        own = g.shape(part)[-1] // 4
        seen = g.call("view", (2, 3, own, 4), part, [2, 3, own, 4])
        seen = g.call("transpose", (2, own, 3, 4), seen, 1, 2)
        if own != heads:
            again = heads // own
            seen = g.call("unsqueeze", (2, own, 1, 3, 4), seen, 2)
            seen = g.call("expand", (2, own, again, 3, 4), seen, [2, own, again, 3, 4])
            seen = g.call("reshape", (2, heads, 3, 4), seen, [2, heads, 3, 4])
        split.append(seen)
    y = g.call("scaled_dot_product_attention", (2, heads, 3, 4), *split)
    y = g.call("transpose", (2, 3, heads, 4), y, 1, 2)
    y = g.call("reshape", (2, 3, width), y, [2, 3, width])
    return g.done(g.call("add", (2, 3, width), x, g.linear(y, width)))


def test_attention_is_split_by_heads() -> None:
    result = styles(attention(4, fused=False, kv=2))
    assert [result[f"p{k}.w"] for k in (0, 2, 4, 6)] == ["column", "column", "column", "row"]
    assert "p7.w" not in result, "the bias behind a sum stays whole"


def test_fused_projection_is_split_segment_by_segment() -> None:
    """Not contiguously: a rank's half of 3 x 16 features would be queries and half the keys."""
    plan, _ = plan_tensors(attention(4, fused=True), 2)
    assert plan.weights["p0.w"].segments == (16, 16, 16)
    assert plan.weights["p2.w"].style == "row"


def test_heads_must_be_shared() -> None:
    with pytest.raises(PlanError, match=r"12 features are 3 heads, which 2 ranks cannot share"):
        plan_tensors(attention(3, fused=False), 2)


def test_norm_over_a_split_keeps_a_product_whole() -> None:
    g = Sketch()
    x = g.add("input", (2, 3, 8))
    y = g.linear(x, 8)
    y = g.call("layer_norm", (2, 3, 8), y, [8])
    plan, _ = plan_tensors(g.done(g.linear(y, 8)), 2)
    assert plan.weights == {}
    assert "layer_norm over the split dimension" in plan.whole["p0.w"]
    assert "no head" in plan.whole["p2.w"]


def test_tied_table_and_head_share_a_vocabulary() -> None:
    g = Sketch()
    ids = g.add("input", (2, 3))
    table = g.add("param", (32, 8))
    x = g.call("embedding", (2, 3, 8), table, ids)
    logits = g.call("linear", (2, 3, 32), x, table)
    plan, flow = plan_tensors(g.done(logits), 2)
    assert plan.weights["p0.w"].dim == 0
    assert plan.weights["p0.w"].style == "vocabulary"
    assert set(flow.gathered) == {"v1"}
    assert plan.all_reduces == 1


def test_tied_weights_that_disagree_stay_whole() -> None:
    """One matrix as the first and the second of a pair cannot be split both ways."""
    g = Sketch()
    x = g.add("input", (2, 3, 8))
    weight = g.add("param", (8, 8))
    y = g.call("linear", (2, 3, 8), x, weight)
    y = g.call("linear", (2, 3, 8), g.call("relu", (2, 3, 8), y), weight)
    plan, _ = plan_tensors(g.done(y), 2)
    assert plan.weights == {}
    assert "tied" in plan.whole["p0.w"]


def test_a_constant_of_every_head_is_cut() -> None:
    g = Sketch()
    x = g.add("input", (2, 3, 8))
    bias = g.add("constant", (16,))
    y = g.call("add", (2, 3, 16), g.linear(x, 16), bias)
    _, flow = plan_tensors(g.done(g.linear(y, 8)), 2)
    assert flow.cut == {("v1", "c0"): SplitDimension(0, (16,), "v0")}


@pytest.mark.parametrize(
    ("op", "before", "dim", "args", "after", "expected"),
    [
        ("view", (2, 3, 8), 2, ([2, 3, 4, 2],), (2, 3, 4, 2), (2, (4,))),
        ("view", (2, 3, 4, 2), 2, ([2, 3, 8],), (2, 3, 8), (2, (8,))),
        ("view", (2, 3, 8), 2, ([6, 8],), (6, 8), (1, (8,))),
        ("permute", (2, 3, 8), 2, ([2, 0, 1],), (8, 2, 3), (0, (8,))),
        ("unsqueeze", (2, 8), 1, (1,), (2, 1, 8), (2, (8,))),
        ("select", (3, 2, 8), 2, (0, 1), (2, 8), (1, (8,))),
        ("mean", (2, 8, 3), 1, ([-1],), (2, 8), (1, (8,))),
        ("repeat_interleave", (2, 4, 3), 1, (2, 1), (2, 8, 3), (1, (8,))),
        ("softmax", (2, 8, 3), 1, (-1,), (2, 8, 3), (1, (8,))),
    ],
)
def test_splits_travel(
    op: str,
    before: tuple[int, ...],
    dim: int,
    args: tuple[object, ...],
    after: tuple[int, ...],
    expected: tuple[int, tuple[int, ...]],
) -> None:
    g = Sketch()
    x = g.add("input", before)
    y = g.call(op, after, x, *args)
    graph = g.done(y)
    result = travel(graph, graph[y.name], {x.name: SplitDimension(dim, (before[dim],), "v")}, 2)
    assert isinstance(result, SplitDimension)
    assert (result.dim, result.segments) == expected


@pytest.mark.parametrize(
    ("op", "dim", "args"),
    [
        ("softmax", 2, (-1,)),
        ("mean", 2, ([-1],)),
        ("select", 2, (2, 0)),
        ("fold_in_half", 2, ()),
        ("cumsum", 2, (2,)),
    ],
)
def test_splits_stop(op: str, dim: int, args: tuple[object, ...]) -> None:
    g = Sketch()
    x = g.add("input", (2, 3, 8))
    y = g.call(op, (2, 3, 8), x, *args)
    graph = g.done(y)
    with pytest.raises(Stop):
        travel(graph, graph[y.name], {x.name: SplitDimension(dim, ((2, 3, 8)[dim],), "v")}, 2)


def test_one_rank_needs_no_plan() -> None:
    g = Sketch()
    with pytest.raises(PlanError, match="at least 2"):
        plan_tensors(g.done(g.add("input", (2, 3, 8))), 1)
