"""The least cost of a graph's placement by looking at every choice: what planners must equal.

It shares with :mod:`~shoal.plan.sbp.search` the table of signatures alone. Transitions are
relaxed over all sequences of steps, and every combination of signatures is visited, except
those whose first operations cost more already than a whole combination that was seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from shoal.cost.price.boxing import step_elements, step_weight, weighed
from shoal.ir.placement import (
    Mesh,
    Placement,
    Reduction,
    every_placement,
    local_box,
    parse_placement,
)
from shoal.ir.signatures import MeshSignature, legal, operation
from shoal.plan.sbp.search import MeshRates, OpGraph


def transitions(
    shape: tuple[int, ...], mesh: Mesh, reductions: tuple[Reduction, ...]
) -> dict[tuple[Placement, Placement], float]:
    """Weight of the cheapest way between any two placements: elements, then steps."""
    nodes = every_placement(len(shape), len(mesh), reductions)
    cost: dict[tuple[Placement, Placement], float] = {}
    for p in nodes:
        for q in nodes:
            moved = step_elements(shape, mesh, p, q)
            cost[p, q] = math.inf if moved is None else step_weight(p, q, moved)
        cost[p, p] = 0.0
    for middle in nodes:
        for p in nodes:
            first = cost[p, middle]
            if first == math.inf:
                continue
            for q in nodes:
                way = first + cost[middle, q]
                if way < cost[p, q]:
                    cost[p, q] = way
    return cost


def least_seconds(
    graph: OpGraph,
    mesh: Mesh,
    *,
    pins: Mapping[str, str] | None = None,
    rates: MeshRates | None = None,
    start: float = math.inf,
) -> float:
    """The least seconds of any placement of ``graph``.

    Args:
        graph: what is computed; small.
        mesh: ranks of each axis.
        pins: tensor -> placement.
        rates: how fast the ranks are.
        start: a cost that some combination is known to have; dearer ones are cut off sooner.
    """
    rates, shapes = rates or MeshRates(), graph.shapes
    pinned = {name: parse_placement(text) for name, text in (pins or {}).items()}
    maxima = any(op.kind == "amax" for op in graph.ops)
    reductions: tuple[Reduction, ...] = ("sum", "max") if maxima else ("sum",)
    rate = math.prod(mesh) * rates.bytes_per_s
    tables = {shape: transitions(shape, mesh, reductions) for shape in set(shapes.values())}

    def move_s(tensor: str, source: Placement, target: Placement) -> float:
        elements, sends = weighed(tables[shapes[tensor]][source, target])
        return elements * graph.itemsizes[tensor] / rate + sends * rates.latency_s

    corner = (0,) * len(mesh)

    def read_s(leaf: str, placement: Placement) -> float:
        elements = local_box(shapes[leaf], placement, mesh, corner).volume
        return elements * graph.itemsizes[leaf] / rates.read_bytes_per_s

    choices: list[list[tuple[float, MeshSignature, Placement]]] = []
    for op in graph.ops:
        results = []
        for signature in legal(op.kind, [shapes[n] for n in op.inputs], op.attributes, mesh):
            named = zip((*op.inputs, op.name), (*signature.inputs, signature.output), strict=True)
            if any((p, p) not in tables[shapes[name]] for name, p in named):
                continue
            local = [
                local_box(shapes[n], p, mesh, corner).shape
                for n, p in zip(op.inputs, signature.inputs, strict=True)
            ]
            out = local_box(shapes[op.name], signature.output, mesh, corner).shape
            seconds = operation(op.kind).flops(local, out) / rates.flops_per_s
            at = pinned.get(op.name, signature.output)
            seconds += move_s(op.name, signature.output, at)
            results.append((seconds, signature, at))
        choices.append(sorted(results, key=lambda entry: entry[0]))
    # What is left costs at least this.
    rest = [0.0] * (len(graph.ops) + 1)
    for i in reversed(range(len(graph.ops))):
        rest[i] = rest[i + 1] + choices[i][0][0]
    dims = {name: len(shape) for name, shape in shapes.items()}
    places = {
        leaf.name: [pinned[leaf.name]]
        if leaf.name in pinned
        else every_placement(dims[leaf.name], len(mesh), reductions)
        for leaf in graph.leaves
    }
    best = start
    held: dict[str, Placement] = {}
    users: dict[str, frozenset[Placement]] = {name: frozenset() for name in shapes}
    leaf_s: dict[tuple[str, frozenset[Placement]], float] = {}

    def uses_s(tensor: str, wanted: frozenset[Placement]) -> float:
        """Seconds to bring a tensor to all of its users so far."""
        if not wanted:
            return 0.0
        if tensor in held:
            return sum(move_s(tensor, held[tensor], q) for q in wanted)
        key = (tensor, wanted)
        if key not in leaf_s:
            leaf_s[key] = min(
                read_s(tensor, p) + sum(move_s(tensor, p, q) for q in wanted)
                for p in places[tensor]
            )
        return leaf_s[key]

    def visit(i: int, spent: float) -> None:
        nonlocal best
        if i == len(graph.ops):
            best = min(best, spent)
            return
        op = graph.ops[i]
        for seconds, signature, out in choices[i]:
            if spent + seconds + rest[i + 1] >= best:
                break
            total, before = spent + seconds, dict[str, frozenset[Placement]]()
            for name, wanted in zip(op.inputs, signature.inputs, strict=True):
                before.setdefault(name, users[name])
                more = users[name] | {wanted}
                total += uses_s(name, more) - uses_s(name, users[name])
                users[name] = more
            if total + rest[i + 1] < best:
                held[op.name] = out
                visit(i + 1, total)
                del held[op.name]
            users.update(before)

    visit(0, 0.0)
    return best
