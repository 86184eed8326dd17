"""Placement of a graph of operations: which signature each one takes, and what is boxed.

A user writes the placement of some tensors; the rest is chosen so that the time of boxing
and of computing is least. Chains and trees are solved by dynamic programming from the
leaves on; graphs in which a result has several users, and graphs under a memory limit, as an
integer linear program (HiGHS). Both are exact.

What a choice costs is said, and computed, in :mod:`shoal.plan.sbp.problem`.

Source: Yuan et al., OneFlow, 2021, sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import PlanError, require
from shoal.ir.placement import Mesh
from shoal.plan.sbp.problem import (
    Choice,
    Given,
    Leaf,
    MeshRates,
    OpGraph,
    OpNode,
    PlacementMove,
    SbpPlan,
    SbpProblem,
)

__all__ = [
    "Leaf",
    "MeshRates",
    "OpGraph",
    "OpNode",
    "PlacementMove",
    "SbpPlan",
    "SbpProblem",
    "place",
]


def place(
    graph: OpGraph,
    mesh: Mesh,
    *,
    pins: Mapping[str, str] | None = None,
    rates: MeshRates | None = None,
    memory_limit: float | None = None,
    method: Literal["auto", "dynamic", "ilp"] = "auto",
    time_limit_s: float = 120.0,
) -> SbpPlan:
    """The placement of least time.

    Args:
        graph: what is computed.
        mesh: ranks of each axis, slowest first.
        pins: tensor -> placement it shall have, boxed into it where nothing makes it so;
            ``OPERATION:i`` -> placement in which the operation takes its input i.
        rates: how fast the ranks are.
        memory_limit: bytes of a rank.
        method: which search; ``auto`` takes the one that is exact for this graph.
        time_limit_s: the integer program gives up after.

    Raises:
        PlanError: a pin that cannot be, a graph that does not fit, or no time to search.
    """
    problem = SbpProblem(graph, mesh, pins or {}, rates or MeshRates())
    tree = all(len(users) <= 1 for users in graph.users.values())
    require(
        method != "dynamic" or (tree and memory_limit is None),
        "method",
        method,
        expected="ilp: a tensor of this graph has several users, or memory is limited",
        error=PlanError,
    )
    if tree and method != "ilp":
        chosen = _dynamic(problem)
        plan = problem.plan(*chosen, method="dynamic programming")
        if memory_limit is None or plan.memory_bytes <= memory_limit:
            return plan
    return problem.plan(*_integer(problem, memory_limit, time_limit_s), method="integer program")


def _dynamic(problem: SbpProblem) -> tuple[Choice, Given]:
    """Trees: best[p] of a tensor is the least time of everything before it, and of it in p."""
    graph = problem.graph
    best: dict[str, NDArray[np.float64]] = {}
    for leaf in graph.leaves:
        cost = np.full(len(problem.boxing(leaf.name).placements), np.inf)
        places = problem.given(leaf.name)
        cost[places] = problem.read_s(leaf.name)[places]
        best[leaf.name] = cost
    sources: dict[tuple[str, str], NDArray[np.int64]] = {}
    pick: dict[str, NDArray[np.int64]] = {}
    for op in graph.ops:
        options = problem.options[op.name]
        total = options.seconds.copy()
        for tensor in dict.fromkeys(op.inputs):
            # [from, signature]: of a tensor that is taken twice in one placement, once.
            moved = _moved_s(problem, op, tensor)
            whole = best[tensor][:, None] + moved
            sources[op.name, tensor] = whole.argmin(axis=0)
            total += whole.min(axis=0)
        cost = np.full(len(problem.boxing(op.name).placements), np.inf)
        choice = np.full(len(cost), -1)
        for s in np.argsort(-total, kind="stable"):
            cost[options.output[s]], choice[options.output[s]] = total[s], s
        best[op.name], pick[op.name] = cost, choice
    chosen: Choice = {}
    given: Given = {}
    wanted = {op.name: int(best[op.name].argmin()) for op in graph.ops if not graph.users[op.name]}
    for op in reversed(graph.ops):
        signature = int(pick[op.name][wanted[op.name]])
        chosen[op.name] = problem.options[op.name].legal[signature]
        for tensor in dict.fromkeys(op.inputs):
            wanted[tensor] = int(sources[op.name, tensor][signature])
    for leaf in graph.leaves:
        at = wanted.get(leaf.name, int(problem.given(leaf.name)[0]))
        given[leaf.name] = problem.boxing(leaf.name).placements[at]
    return chosen, given


def _moved_s(problem: SbpProblem, op: OpNode, tensor: str) -> NDArray[np.float64]:
    """[n, signatures]: seconds to bring ``tensor`` from each placement to what ``op`` takes."""
    transit = problem.transit_s(tensor)
    columns = [transit[:, list(w)].sum(axis=1) for w in problem.wanted(op, tensor)]
    return np.stack(columns, axis=1)


class _Program:
    """Rows and columns of an integer linear program, as they come."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.integral: list[int] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def variable(self, cost: float, *, integral: bool = False) -> int:
        self.costs.append(cost)
        self.integral.append(int(integral))
        return len(self.costs) - 1

    def row(self, terms: Mapping[int, float], low: float, high: float) -> None:
        self.rows.append((dict(terms), low, high))

    def solve(self, time_limit_s: float) -> Any:
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        data, rows, columns = [], [], []
        for number, (terms, _, _) in enumerate(self.rows):
            for column, factor in terms.items():
                data.append(factor)
                rows.append(number)
                columns.append(column)
        shape = (len(self.rows), len(self.costs))
        matrix = csr_array((data, (rows, columns)), shape=shape)
        low = [row[1] for row in self.rows]
        high = [row[2] for row in self.rows]
        # Costs near 1, so that tolerances mean what they should.
        scale = max(self.costs) or 1.0
        return milp(
            np.array(self.costs) / scale,
            constraints=LinearConstraint(matrix, low, high),
            integrality=np.array(self.integral),
            bounds=Bounds(0, 1),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0},
        )


def _integer(
    problem: SbpProblem, memory_limit: float | None, time_limit_s: float
) -> tuple[Choice, Given]:
    """Any graph: one binary for each signature and each placement of a leaf.

    Between a tensor and each of its users flows one unit from the placement that it has to
    the one that the user takes; a copy exists if any user's unit flows there. Given the
    binaries the flows are those of transport problems, so they need not be integral.
    """
    graph, program = problem.graph, _Program()
    memory: defaultdict[int, float] = defaultdict(float)
    # Tensor -> placement -> the binaries of which one is 1 if the tensor has it.
    has: dict[str, dict[int, list[int]]] = {}
    binaries: dict[str, list[int]] = {}
    for leaf in graph.leaves:
        places = problem.given(leaf.name).tolist()
        reads = problem.read_s(leaf.name)[places].tolist()
        binaries[leaf.name] = [program.variable(s, integral=True) for s in reads]
        has[leaf.name] = {p: [v] for p, v in zip(places, binaries[leaf.name], strict=True)}
    for op in graph.ops:
        options = problem.options[op.name]
        binaries[op.name] = [program.variable(s, integral=True) for s in options.seconds.tolist()]
        has[op.name] = defaultdict(list)
        for variable, out in zip(binaries[op.name], options.output.tolist(), strict=True):
            has[op.name][out].append(variable)
        if memory_limit is not None and op.name in problem.tensors:
            table = problem.boxing(op.name).index
            copied = problem.copied(op.name)
            for variable, signature in zip(binaries[op.name], options.legal, strict=True):
                made, held = table[signature.output], table[problem.tensors[op.name]]
                memory[variable] += copied[made, held] + problem.made(op.name)[made]
                memory[variable] -= problem.made(op.name)[held]
    for variables in binaries.values():
        program.row(dict.fromkeys(variables, 1.0), 1.0, 1.0)
    for tensor, users in graph.users.items():
        own = problem.made(tensor)
        for p, variables in has[tensor].items():
            for variable in variables:
                memory[variable] += float(own[p])
        _flows(problem, program, tensor, users, has[tensor], binaries, memory)
    if memory_limit is not None:
        scaled = {v: size / memory_limit for v, size in memory.items() if size}
        program.row(scaled, -np.inf, 1.0)
    result = program.solve(time_limit_s)
    if result.x is None:
        _unsolved(problem, memory_limit, result, time_limit_s)
    if result.status != 0:
        raise PlanError(
            f"the integer program was not solved within {time_limit_s:g} s; pin some "
            "tensors, or allow more time"
        )
    chosen = {
        op.name: problem.options[op.name].legal[int(result.x[binaries[op.name]].argmax())]
        for op in graph.ops
    }
    given = {
        leaf.name: problem.boxing(leaf.name).placements[
            int(problem.given(leaf.name)[int(result.x[binaries[leaf.name]].argmax())])
        ]
        for leaf in graph.leaves
    }
    return chosen, given


def _flows(
    problem: SbpProblem,
    program: _Program,
    tensor: str,
    users: Sequence[OpNode],
    has: Mapping[int, Sequence[int]],
    binaries: Mapping[str, Sequence[int]],
    memory: defaultdict[int, float],
) -> None:
    """The units that flow from a tensor to its users, and the copies that they share."""
    transit, copied = problem.transit_s(tensor), problem.copied(tensor)
    copies: dict[tuple[int, int], int] = {}

    def copy(p: int, q: int) -> int | None:
        """The variable of the copy in q of a tensor in p; None if it is free."""
        if transit[p, q] == 0 and copied[p, q] == 0:
            return None
        if (p, q) not in copies:
            copies[p, q] = program.variable(float(transit[p, q]))
            memory[copies[p, q]] = float(copied[p, q])
        return copies[p, q]

    for op in users:
        for i, name in enumerate(op.inputs):
            if name != tensor:
                continue
            index = problem.boxing(tensor).index
            wants: dict[int, list[int]] = defaultdict(list)
            for variable, signature in zip(
                binaries[op.name], problem.options[op.name].legal, strict=True
            ):
                wants[index[signature.inputs[i]]].append(variable)
            flow = {(p, q): program.variable(0.0) for p in has for q in wants}
            for p, variables in has.items():
                row = {flow[p, q]: 1.0 for q in wants} | dict.fromkeys(variables, -1.0)
                program.row(row, 0.0, 0.0)
            for q, variables in wants.items():
                row = {flow[p, q]: 1.0 for p in has} | dict.fromkeys(variables, -1.0)
                program.row(row, 0.0, 0.0)
            for (p, q), variable in flow.items():
                made = copy(p, q)
                if made is not None:
                    program.row({made: 1.0, variable: -1.0}, 0.0, np.inf)


def _unsolved(
    problem: SbpProblem, memory_limit: float | None, found: Any, time_limit_s: float
) -> None:
    if memory_limit is not None and found.status == 2:
        raise PlanError(
            f"no placement on {'x'.join(map(str, problem.mesh))} ranks holds this graph in "
            f"{memory_limit:,.0f} bytes a rank; take more ranks or remove pins"
        )
    raise PlanError(
        f"no placement was found within {time_limit_s:g} s ({found.message}); pin some "
        "tensors, or allow more time"
    )
