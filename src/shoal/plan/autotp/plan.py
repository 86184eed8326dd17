"""Two rules give a tensor-parallel plan, read off the graph of a traced model.

Rule 1: of products that follow each other, the first is split by its outputs and the second by
its inputs, so that what lies between stays split and one sum ends the pair. Rule 2: attention is
the same with heads: queries, keys and values by outputs, the projection behind them by inputs.

Both are one search here. A product may be split by its outputs if its split travels through all
that follows until every path ends in a product that takes it as its inputs, or in the model's
output. What must be split together (gate and up; queries, keys and values; a bias of every head)
is found when two values meet. A fused projection is split segment by segment. Embeddings of
inputs, and the head, are split by vocabulary. What cannot be decided stays whole, and is said.

Source: Tan et al., Redco: A Lightweight Tool to Automate Distributed Training of LLMs on Any
GPU/TPUs, 2023 (the two rules); Shoeybi et al., Megatron-LM, 2019 (the split of a block).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.core.config import Value
from shoal.core.errors import PlanError, require
from shoal.plan.autotp.flow import POINTWISE, SplitDimension, States, Stop, travel
from shoal.plan.autotp.graph import Graph, GraphNode, Ref, refs

PRODUCTS = ("linear", "addmm")

# Values pass through these unchanged but for their shape, or elementwise.
_CARRIES = POINTWISE | {
    *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "transpose", "permute", "t"),
    *("unsqueeze", "squeeze", "expand", "select", "slice", "split", "split_with_sizes", "chunk"),
    *("getitem", "cat", "stack", "unbind", "repeat", "repeat_interleave", "swapaxes", "numpy_T"),
}


class WeightSplit(Value):
    """How ranks share a parameter.

    Args:
        style: ``column`` by outputs, ``row`` by inputs, ``vocabulary`` by entries of a table.
        dim: dimension of the parameter that is split.
        segments: sizes of the pieces of it that each are cut into consecutive parts; several
            where projections were fused.
        module: path of the module that uses it.
        table: it is looked up.
        head: path of a head that multiplies by the same weights, where they are tied.
        gathered: its output is the model's output and is returned gathered.
    """

    style: Literal["column", "row", "vocabulary"]
    dim: int
    segments: tuple[int, ...]
    module: str = ""
    table: bool = False
    head: str = ""
    gathered: bool = False


class TensorPlan(Value):
    """A tensor-parallel plan of a model.

    Args:
        weights: parameter -> its sharding; all others are replicated.
        whole: parameter -> why it stays whole; norms and biases of sums are not listed.
        parameter_bytes: of all parameters.
        sharded_bytes: of those that are split.
        all_reduces: of activations in one forward pass.
        notes: what a reader should know.
    """

    model: str
    tp: int
    weights: dict[str, WeightSplit] = {}
    whole: dict[str, str] = {}
    parameter_bytes: int = 0
    sharded_bytes: int = 0
    all_reduces: int = 0
    notes: tuple[str, ...] = ()

    @property
    def sharded(self) -> float:
        """Share of the parameters' bytes that is split."""
        return self.sharded_bytes / self.parameter_bytes if self.parameter_bytes else 0.0

    def dtensor(self) -> dict[str, str]:
        """Module -> style, as torch's and transformers' plans spell it.

        Heads are ``colwise_gather_output``, tables ``embedding_rowwise`` (by entries) or
        ``embedding_colwise``, and fused projections begin with ``packed_``.
        """
        names = {
            ("column", False): "colwise",
            ("column", True): "embedding_colwise",
            ("row", False): "rowwise",
            ("vocabulary", True): "embedding_rowwise",
        }
        out = {}
        for split in self.weights.values():
            if split.module:
                packed = "packed_" if len(split.segments) > 1 else ""
                style = packed + names.get((split.style, split.table), "colwise")
                whole = split.gathered and not split.table
                out[split.module] = "colwise_gather_output" if whole else style
            if split.head:
                out[split.head] = "colwise_gather_output"
        return out


@dataclass
class Flow:
    """Where splits are in the graph: what a runtime needs beside the plan.

    Args:
        states: value -> its split.
        columns: products and tables that are split by outputs.
        rows: products that take split inputs and end in a sum.
        tables: lookups in tables split by entries.
        cut: (call, whole value) -> dimension in which the call takes this rank's part of it.
        gathered: split values that the output wants whole.
        params: parameter node -> its split.
    """

    states: States = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)
    rows: set[str] = field(default_factory=set)
    tables: set[str] = field(default_factory=set)
    cut: dict[tuple[str, str], SplitDimension] = field(default_factory=dict)
    gathered: dict[str, SplitDimension] = field(default_factory=dict)
    params: dict[str, tuple[int, tuple[int, ...]]] = field(default_factory=dict)


def plan_tensors(graph: Graph, tp: int) -> tuple[TensorPlan, Flow]:
    """Plan a traced model for ``tp`` ranks.

    Raises:
        PlanError: heads that so many ranks cannot share; names the module and the numbers.
    """
    require(tp >= 2, "tp", tp, expected="at least 2", error=PlanError)
    search = _Search(graph, tp)
    search.run()
    return search.plan(), search.flow


class _Search:
    def __init__(self, graph: Graph, tp: int) -> None:
        self.graph, self.tp = graph, tp
        self.flow = Flow()
        self.why: dict[str, str] = {}
        # Parameter -> why no use of it may be split.
        self.whole: dict[str, str] = {}
        self.order = {node.name: place for place, node in enumerate(graph.nodes)}

    def run(self) -> None:
        """Search until all uses of a parameter agree: one that is needed whole stays whole.

        What was split with it is planned anew, since half of a pair saves nothing.
        """
        while True:
            self._search()
            result = self._disagreeing()
            if result is None:
                return
            name, user = result
            where = user.module or user.name
            self.whole[name] = f"{self.graph[name].target} is tied to {where}, which needs it whole"
            self.flow, self.why = Flow(), {}

    def _search(self) -> None:
        """Pairs first, in the order of the graph, so that they alternate; tables last."""
        for node in self.graph.nodes:
            known = node.name in self.flow.rows | self.flow.columns
            if node.op in PRODUCTS and not known and self._weight(node) is not None:
                self._attempt(node)
        for node in self.graph.nodes:
            if node.op == "embedding" and node.name not in self.flow.columns:
                self._table(node)

    # ------------------------------------------------------------------ products

    def _weight(self, node: GraphNode) -> GraphNode | None:
        place = {"linear": 1, "addmm": 2, "embedding": 0}[node.op]
        return self.graph.param(node.args[place])

    def _input(self, node: GraphNode) -> Any:
        return node.args[{"linear": 0, "addmm": 1, "embedding": 1}[node.op]]

    def _params_of(self, node: GraphNode, segments: tuple[int, ...]) -> dict[str, tuple[int, Any]]:
        """Split of the parameters of a product or table that is split by outputs."""
        params = {}
        if node.op == "embedding":
            return {node.args[0].name: (1, segments)}
        weight, bias = (1, node.arg(2, "bias")) if node.op == "linear" else (2, node.args[0])
        params[node.args[weight].name] = (0 if node.op == "linear" else 1, segments)
        if isinstance(bias, Ref):
            params[bias.name] = (len(self.graph.shape(bias)) - 1, segments)
        return params

    def _attempt(self, node: GraphNode) -> None:
        """Split a product by its outputs, with all that must be split with it."""
        seeds: dict[str, tuple[int, ...]] = {node.name: (self._width(node),)}
        heads: Stop | None = None
        for _ in range(64):
            held = next((why for n, sizes in seeds.items() if (why := self._held(n, sizes))), "")
            try:
                result = self._spread(seeds)
            except Stop as stop:
                heads = stop if stop.heads else heads
                if not held and self._answer(stop, seeds):
                    continue
                held = held or stop.reason
            if held:
                reason = held
                break
            self._accept(seeds, result)
            return
        else:
            reason = "too many values would have to be split together"
        if heads is not None:
            module = self.graph[heads.origin].module
            raise PlanError(
                f"tp = {self.tp}: {module or heads.origin}: {heads.reason}; choose a tp that "
                "divides them"
            )
        self.why.setdefault(node.name, reason)

    def _width(self, node: GraphNode) -> int:
        return (node.shape or (0,))[-1]

    def _held(self, name: str, segments: tuple[int, ...]) -> str:
        """Why a product or table cannot be split by its outputs; empty if it can."""
        node = self.graph[name]
        if name in self.flow.rows or name in self.flow.columns or name in self.flow.tables:
            return f"{node.module or name} is split already"
        weight = self._weight(node)
        if weight is None:
            return f"{node.module or name} has no parameter of its own"
        odd = next((size for size in segments if size % self.tp), None)
        if odd is not None:
            return f"{odd} outputs, which {self.tp} ranks cannot share"
        source = self._input(node)
        if isinstance(source, Ref) and source.name in self.flow.states:
            return f"{node.module or name} takes a split input"
        for param, split in self._params_of(node, segments).items():
            if param in self.whole:
                return self.whole[param]
            if self.flow.params.get(param, split) != split:
                return f"{weight.target} is tied to a use that is split otherwise"
        return ""

    def _answer(self, stop: Stop, seeds: dict[str, tuple[int, ...]]) -> bool:
        """Whether there is something to try: other segments, or more to split."""
        if stop.segments is not None:
            sizes = tuple(stop.segments)
            if seeds.get(stop.origin) == sizes or any(n % self.tp for n in sizes):
                return False
            seeds[stop.origin] = sizes
            return True
        if stop.needs is None:
            return False
        more = [n for n in self._roots(stop.needs) if n not in seeds]
        if not more:
            return False
        seeds.update({name: (self._width(self.graph[name]),) for name in more})
        return True

    def _roots(self, name: str) -> list[str]:
        """Products and tables that a value was made by, through shapes and elementwise calls."""
        roots, seen, stack = [], set(), [name]
        while stack:
            node = self.graph[stack.pop()]
            if node.name in seen:
                continue
            seen.add(node.name)
            if node.op in (*PRODUCTS, "embedding"):
                roots.append(node.name)
            elif node.kind == "call" and (node.op in _CARRIES or node.op == "matmul"):
                stack += node.uses
        return roots

    def _learned(self, name: str) -> bool:
        """Whether a parameter has any part in a value."""
        seen, stack = set(), [name]
        while stack:
            node = self.graph[stack.pop()]
            if node.kind == "param":
                return True
            if node.name not in seen:
                seen.add(node.name)
                stack += node.uses
        return False

    def _spread(self, seeds: dict[str, tuple[int, ...]]) -> Flow:
        """Follow the splits of some products to their ends.

        Raises:
            Stop: one cannot go on.
        """
        flow = Flow()
        for name, segments in seeds.items():
            node = self.graph[name]
            flow.states[name] = SplitDimension(len(node.shape or ()) - 1, segments, name)
            flow.params |= self._params_of(node, segments)
            flow.columns.add(name)
        # What is reached, in the order of the graph.
        reached: list[int] = []
        seen: set[str] = set()

        def reach(name: str) -> None:
            for user in self.graph.users[name]:
                if user.name not in seen:
                    seen.add(user.name)
                    heapq.heappush(reached, self.order[user.name])

        for name in seeds:
            reach(name)
        while reached:
            node = self.graph.nodes[heapq.heappop(reached)]
            if node.name in flow.columns:
                raise Stop("products of one group follow each other", node.name)
            if node.kind == "output":
                for use in node.uses:
                    if use in flow.states:
                        self._leave(use, flow)
                continue
            if node.op == "_assert_tensor_metadata":
                continue
            if node.op in PRODUCTS and self._is_row(node, flow):
                continue
            flow.states[node.name] = self._travel(node, flow)
            reach(node.name)
        return flow

    def _travel(self, node: GraphNode, flow: Flow) -> SplitDimension | tuple[SplitDimension, ...]:
        while True:
            try:
                return travel(self.graph, node, self._seen(node, flow), self.tp)
            except Stop as stop:
                name = stop.needs
                if name is None:
                    raise
                whole = self.graph[name]
                if whole.kind == "param":
                    # A vector of the same features, such as a scale or a separate bias.
                    size = (whole.shape or ())[stop.dim]
                    segments = self._segments(node, flow)
                    if sum(segments) != size or name in self.whole:
                        raise
                    flow.params[name] = (stop.dim, segments)
                elif not self._learned(name):
                    # Nothing is learned through it: every rank takes its part.
                    segments = self._segments(node, flow)
                    if sum(segments) != (whole.shape or ())[stop.dim]:
                        raise
                    flow.cut[node.name, name] = SplitDimension(stop.dim, segments, stop.origin)
                else:
                    raise

    def _segments(self, node: GraphNode, flow: Flow) -> tuple[int, ...]:
        for use in node.uses:
            state = flow.states.get(use)
            if isinstance(state, SplitDimension):
                return state.segments
        raise AssertionError("a call without a split argument")

    def _seen(self, node: GraphNode, flow: Flow) -> States:
        """Splits as a call sees them, with parameters and parts that it takes itself."""
        states: States = {use: flow.states[use] for use in node.uses if use in flow.states}
        for use in node.uses:
            if (node.name, use) in flow.cut:
                states[use] = flow.cut[node.name, use]
            elif use in flow.params and use not in flow.states:
                dim, segments = flow.params[use]
                origin = next(
                    s.origin for s in flow.states.values() if isinstance(s, SplitDimension)
                )
                states[use] = SplitDimension(dim, segments, origin)
        return states

    def _is_row(self, node: GraphNode, flow: Flow) -> bool:
        """Whether a product takes a split as its inputs; it ends there in a sum."""
        source = self._input(node)
        state = flow.states.get(source.name) if isinstance(source, Ref) else None
        weight = self._weight(node)
        if not isinstance(state, SplitDimension) or weight is None:
            raise Stop(f"{node.op} has a split operand other than its input", node.name)
        if state.dim != len(self.graph.shape(source)) - 1:
            raise Stop("a product of every head alike", state.origin)
        if weight.name in self.whole:
            raise Stop(self.whole[weight.name], state.origin)
        split = (1 if node.op == "linear" else 0, state.segments)
        given = self.flow.params.get(weight.name, flow.params.get(weight.name, split))
        if given != split:
            raise Stop(f"{weight.target} is tied to a use that is split otherwise", state.origin)
        flow.params[weight.name] = split
        flow.rows.add(node.name)
        return True

    def _leave(self, name: str, flow: Flow) -> None:
        """A split value is the model's output: fine behind the head, and given back whole."""
        state = flow.states[name]
        if not isinstance(state, SplitDimension):
            raise Stop("a list of split values is the output", name)
        head = self.graph[state.origin]
        weight = self._weight(head)
        assert weight is not None
        wide = self._width(head) >= 2 * (self.graph.shape(self._input(head)) or (1,))[-1]
        tied = len(self.graph.users[weight.name]) > 1
        if flow.rows or not (wide or tied):
            raise Stop("its output is the model's, and it is no head", state.origin)
        flow.gathered[name] = state

    def _accept(self, seeds: dict[str, tuple[int, ...]], found: Flow) -> None:
        self.flow.states |= found.states
        self.flow.columns |= found.columns
        self.flow.rows |= found.rows
        self.flow.cut |= found.cut
        self.flow.gathered |= found.gathered
        self.flow.params |= found.params
        for name in seeds:
            self.why.pop(name, None)

    # ------------------------------------------------------------------ tables

    def _table(self, node: GraphNode) -> None:
        """Split a table by entries, if what is looked up is an input of the model."""
        weight = self.graph.param(node.args[0])
        if weight is None:
            return
        split = (0, ((weight.shape or (0,))[0],))
        if weight.name in self.whole:
            self.why[node.name] = self.whole[weight.name]
        elif not self._looked_up(node.args[1].name):
            self.why[node.name] = "not looked up by an input, so small and the same on every rank"
        elif split[1][0] % self.tp:
            self.why[node.name] = f"{split[1][0]} entries, which {self.tp} ranks cannot share"
        elif self.flow.params.get(weight.name, split) != split:
            self.why[node.name] = f"{weight.target} is tied to a use that is split otherwise"
        else:
            self.flow.params[weight.name] = split
            self.flow.tables.add(node.name)

    def _looked_up(self, name: str) -> bool:
        node = self.graph[name]
        while node.kind == "call" and node.op in _CARRIES - {"add", "sub", "where", "mul"}:
            node = self.graph[next(refs(node.args)).name]
        return node.kind == "input" and node.integer

    def _disagreeing(self) -> tuple[str, GraphNode] | None:
        """A split parameter with a use that is not split, and that use."""
        for name in self.flow.params:
            for user in self.graph.users[name]:
                mine = user.name in self.flow.columns | self.flow.rows | self.flow.tables
                held = isinstance(self.flow.states.get(user.name), SplitDimension)
                if not mine and not held:
                    return name, user
        return None

    # ------------------------------------------------------------------ result

    def plan(self) -> TensorPlan:
        """What was found, as a value."""
        graph, flow = self.graph, self.flow
        weights: dict[str, WeightSplit] = {}
        heads = {state.origin for state in flow.gathered.values()}
        for name, (dim, segments) in flow.params.items():
            users = graph.users[name]
            table = any(user.op == "embedding" for user in users)
            head = next((user.module for user in users if user.name in heads), "")
            style: Literal["column", "row", "vocabulary"] = "column"
            if any(user.name in flow.rows for user in users):
                style = "row"
            elif any(user.name in flow.tables for user in users):
                style = "vocabulary"
            target = graph[name].target
            weights[target] = WeightSplit(
                style=style,
                dim=dim,
                segments=segments,
                module=target.rpartition(".")[0],
                table=table,
                head=head if table else "",
                gathered=any(user.name in heads for user in users),
            )
        whole = {}
        for name, reason in self.why.items():
            weight = self._weight(graph[name])
            if weight is not None and weight.name not in flow.params:
                whole[weight.target] = reason
        params = [node for node in graph.nodes if node.kind == "param"]

        def size(node: GraphNode) -> int:
            count = node.item_bytes
            for n in node.shape or ():
                count *= n
            return count

        return TensorPlan(
            model=graph.model,
            tp=self.tp,
            weights=weights,
            whole=whole,
            parameter_bytes=sum(map(size, params)),
            sharded_bytes=sum(size(node) for node in params if node.name in flow.params),
            all_reduces=len(flow.rows) + len(flow.tables),
        )
