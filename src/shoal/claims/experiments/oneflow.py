"""[21] OneFlow: placement in one line, and actors instead of a schedule.

Source: Yuan et al., OneFlow: Redesign the Distributed Deep Learning Framework from Scratch, 2021.

(a) On random graphs the planner's cost is the best of all choices. (b) Where memory forbids to
replicate weights it finds what Megatron-LM splits by hand, and moves fewer bytes than DTensor's
propagation with the better of both shardings; for attention both move as much. (c) Three actors
with two registers overlap, hold no more than these, and a slow consumer throttles its producer. The
A/A run has operations placed one by one, DTensor, one register, and queues without end.
"""

from __future__ import annotations

import math
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt
from pydantic import JsonValue

from shoal.claims.catalogue import BaseClaim
from shoal.claims.frame import ClaimRun
from shoal.claims.lab.sbp_exhaustive import least_seconds
from shoal.claims.ranks import on_ranks
from shoal.core.errors import require
from shoal.core.parts import part
from shoal.ir.placement import Mesh, Placement
from shoal.ir.signatures import MeshSignature
from shoal.parallel.pipeline.actor import ActorGraph
from shoal.plan.sbp.search import Leaf, MeshRates, OpGraph, OpNode, SbpPlan, SbpProblem, place

MESHES: tuple[Mesh, ...] = ((2,), (3,), (4,), (2, 2))
# Memory of a rank over its share of everything, input and result aside: no weight fits twice.
MEMORY_SHARE = 1.25
BLOCKS = ("mlp", "attention")


@part
class OneFlow(BaseClaim, row=21):
    """Planner against every choice, bytes against DTensor, actors against one register.

    Args:
        graphs: random graphs of the full run; the quick run takes a tenth.
        ranks: real ranks on which bytes are counted.
        stage_s: seconds that each of the three actors sleeps for an item.
        items: items of a throughput sample.
        repeats: pairs of throughput samples.
    """

    graphs: Annotated[int, Ge(10)] = 300
    ranks: Annotated[int, Ge(2)] = 4
    stage_s: Annotated[float, Gt(0)] = 0.004
    items: Annotated[int, Ge(4)] = 50
    repeats: Annotated[int, Ge(3)] = 11

    def collect(self, run: ClaimRun) -> None:
        """Place random graphs, blocks on ranks, and run actors; two minutes in full."""
        one_by_one = run.as_baseline
        count = self.graphs // 10 if run.quick else self.graphs
        optimal = []
        for number in range(count):
            run.progress("random graphs", 0.6 * number / count)
            optimal.append(_is_optimal(run.seed, number, one_by_one))
        run.put("optimal", optimal)
        run.progress("blocks", 0.6)
        run.put(
            "column_row",
            (column_row(block, ranks, one_by_one) for block in BLOCKS for ranks in (4, 8)),
        )
        run.progress("registers", 0.65)
        held = [_held(regs, endless=run.as_baseline) for regs in (1, 2, 3)]
        run.put("memory_over_registers", (memory for memory, _ in held))
        run.put("lead_over_registers", (lead for _, lead in held))
        if run.quick:
            return
        for number, block in enumerate(BLOCKS):
            run.progress(f"{block} on {self.ranks} ranks", 0.7 + 0.1 * number)
            ranks = run.remember(block, partial(self._ranks, block, run.seed))
            moved = math.fsum(rank["plan"] for rank in ranks)
            by_dim = {dim: math.fsum(rank["dtensor"][dim] for rank in ranks) for dim in ("0", "1")}
            # The plan is the same however DTensor's weights are sharded; its better way counts.
            least = min(by_dim.values())
            run.put(f"{block}_bytes", run.pick(moved, least), least)
            run.details[block] = {"dtensor_bytes_by_dimension": by_dim}
        run.progress("throughput", 0.9)
        pairs = [(self._seconds(run.pick(2, 1)), self._seconds(1)) for _ in range(self.repeats)]
        # One stage sleeps all the time: nothing can be faster. And a split by columns and rows
        # ends in one all-reduce, which is what DTensor's two gathers of attention move.
        run.put("throughput", *zip(*pairs, strict=True), bound=2.0)
        run.bounds["attention_bytes"] = 1.0
        run.profile = "; ".join(f"{block}: {run.details[block]}" for block in BLOCKS)

    def _ranks(self, block: str, seed: int) -> list[Any]:
        plan = planned(block, self.ranks)
        target = "shoal.claims.experiments.oneflow_ranks:compare"
        ranks = on_ranks(target, self.ranks, block=block, plan=plan, seed=seed)
        worst = max(rank["error"] for rank in ranks)
        require(
            worst <= 1e-4,
            f"claim.oneflow: {block}: relative error against one process",
            worst,
            expected="at most 1e-4 in fp32, by the plan and by DTensor",
        )
        return ranks

    def _seconds(self, regs: int) -> float:
        """Seconds of a pipeline of three equal stages."""

        def stage(_: Any) -> int:
            time.sleep(self.stage_s)
            return 0

        graph = ActorGraph()
        graph.actor("load", stage, regs=regs)
        graph.actor("transform", stage, "load", regs=regs)
        graph.actor("compute", stage, "transform", regs=regs)
        begin = time.perf_counter()
        graph.run(self.items)
        return time.perf_counter() - begin


def random_graph(rng: random.Random) -> tuple[OpGraph, dict[str, str], Mesh, MeshRates]:
    """A graph of at most 7 operations, with pins, a mesh and rates."""
    mesh = rng.choice(MESHES)
    sizes = {name: rng.choice((4, 6, 8)) for name in "mn"}
    shape = (sizes["m"], sizes["n"])
    leaves = [Leaf(name="x", shape=shape), Leaf(name="y", shape=shape)]
    ops: list[OpNode] = []
    shapes = {"x": shape, "y": shape}
    kinds = ("matmul", "matmul", "add", "mul", "relu", "gelu", "scale", "softmax", "permute")
    for number in range(rng.randint(1, 7)):
        kind, name = rng.choice(kinds), f"op{number}"
        first = rng.choice(list(shapes)[-3:])
        inputs, attributes = [first], dict[str, JsonValue]()
        rows, columns = shapes[first]
        if kind == "matmul":
            wide = rng.choice((4, 6, 8))
            leaves.append(Leaf(name=f"w{number}", shape=(columns, wide)))
            inputs.append(f"w{number}")
            made = (rows, wide)
        elif kind == "permute":
            attributes["order"] = [1, 0]
            made = (columns, rows)
        else:
            made = (rows, columns)
            if kind in ("add", "mul"):
                inputs.append(rng.choice([n for n, s in shapes.items() if s == made]))
            if kind in ("softmax", "scale"):
                attributes["dim" if kind == "softmax" else "factor"] = (
                    -1 if kind == "softmax" else 0.5
                )
        ops.append(OpNode(name=name, kind=kind, inputs=tuple(inputs), attributes=attributes))
        shapes[name] = made
    pins = {"x": _pin(rng, mesh), ops[-1].name: _pin(rng, mesh)}
    rates = MeshRates(
        flops_per_s=1e9,
        bytes_per_s=rng.choice((1e8, 1e9, 1e10)),
        latency_s=1e-8,
        read_bytes_per_s=1e10,
    )
    return OpGraph(leaves=tuple(leaves), ops=tuple(ops)), pins, mesh, rates


def _pin(rng: random.Random, mesh: Mesh) -> str:
    return ",".join(rng.choice(("B", "S(0)", "S(1)", "P(sum)")) for _ in mesh)


def _is_optimal(seed: int, number: int, as_baseline: bool) -> float:
    graph, pins, mesh, rates = random_graph(random.Random(f"oneflow {seed} {number}"))
    if as_baseline:
        cost = greedy(graph, mesh, pins, rates).seconds
    else:
        cost = place(graph, mesh, pins=pins, rates=rates).seconds
    # A little above, so that a cost that nothing has is not taken for the best.
    least = least_seconds(graph, mesh, pins=pins, rates=rates, start=cost * (1 + 1e-6))
    return float(abs(cost - least) <= 1e-9 * least)


def greedy(graph: OpGraph, mesh: Mesh, pins: dict[str, str], rates: MeshRates) -> SbpPlan:
    """Each operation in turn takes what costs least with what is there; no look ahead."""
    problem = SbpProblem(graph, mesh, pins, rates)
    held: dict[str, int] = {}
    chosen: dict[str, MeshSignature] = {}
    given: dict[str, Placement] = {}
    for op in graph.ops:
        options = problem.options[op.name]
        cost = options.seconds.copy()
        for tensor in dict.fromkeys(op.inputs):
            wanted, transit = problem.wanted(op, tensor), problem.transit_s(tensor)
            at = np.array([held[tensor]]) if tensor in held else problem.given(tensor)
            read = 0.0 if tensor in held else problem.read_s(tensor)[at]
            cost += np.array([(read + transit[at][:, list(w)].sum(axis=1)).min() for w in wanted])
        best = int(cost.argmin())
        chosen[op.name] = options.legal[best]
        for tensor in dict.fromkeys(op.inputs):
            if tensor not in held:
                places, transit = problem.given(tensor), problem.transit_s(tensor)
                columns = transit[:, list(problem.wanted(op, tensor)[best])]
                seconds = problem.read_s(tensor)[places] + columns[places].sum(axis=1)
                held[tensor] = int(places[seconds.argmin()])
                given[tensor] = problem.boxing(tensor).placements[held[tensor]]
        held[op.name] = int(options.output[best])
    for leaf in graph.leaves:
        if leaf.name not in given:
            given[leaf.name] = problem.boxing(leaf.name).placements[problem.given(leaf.name)[0]]
    return problem.plan(chosen, given)


def planned(block: str, ranks: int, *, one_by_one: bool = False) -> SbpPlan:
    """The plan of a block whose input and result are replicated, where memory is short."""
    from shoal.claims.experiments.oneflow_ranks import traced

    result = traced(block)
    pins = {"x": "B", result.result: "B"}
    if one_by_one:
        return greedy(result.graph, (ranks,), pins, MeshRates())
    both = 2 * 4 * math.prod(result.graph.shapes["x"])
    limit = MEMORY_SHARE * (result.graph.bytes_alone / ranks + both)
    return place(result.graph, (ranks,), pins=pins, memory_limit=limit)


def column_row(block: str, ranks: int, one_by_one: bool = False) -> bool:
    """Whether the first layers are split by columns and the last one by rows.

    A weight is [out, in]: columns of the product are its dimension 0, rows dimension 1.
    """
    plan = planned(block, ranks, one_by_one=one_by_one)
    first = ("up",) if block == "mlp" else ("query", "key", "value")
    return (
        all(plan.placements[f"{name}.weight"] == "S(0)" for name in first)
        and plan.placements["down.weight"] == "S(1)"
        and plan.results["down"] == "P(sum)"
        and [move.tensor for move in plan.moves if move.bytes] == ["down"]
    )


def _held(regs: int, *, endless: bool) -> tuple[float, float]:
    """Memory, and the lead of the producer over a slow consumer, both over all registers."""
    size, items = 4096, 24
    alive = most = lead = made = used = 0
    lock = threading.Lock()

    def gone() -> None:
        nonlocal alive
        with lock:
            alive -= size

    def produce() -> Any:
        nonlocal alive, most
        out = np.zeros(size, dtype=np.uint8)
        weakref.finalize(out, gone)
        with lock:
            alive += size
            most = max(most, alive)
        return out

    def load(_: Any) -> Any:
        nonlocal made, lead
        with lock:
            made += 1
            lead = max(lead, made - used)
        return produce()

    def transform(_: Any) -> Any:
        return produce()

    def compute(_: Any) -> None:
        nonlocal used
        time.sleep(0.002)
        with lock:
            used += 1

    if endless:
        _endless(load, transform, compute, items)
    else:
        graph = ActorGraph()
        graph.actor("load", load, regs=regs)
        graph.actor("transform", transform, "load", regs=regs)
        graph.actor("compute", compute, "transform", regs=regs)
        graph.run(items)
    # Two actors make something; what the last one has is in the registers of the second.
    return most / (2 * regs * size), lead / (2 * regs)


def _endless(
    load: Callable[[Any], Any],
    transform: Callable[[Any], Any],
    compute: Callable[[Any], None],
    items: int,
) -> None:
    """The same three stages as threads between queues that take everything."""
    first: queue.SimpleQueue[Any] = queue.SimpleQueue()
    second: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def loads() -> None:
        for number in range(items):
            first.put(load(number))

    def transforms() -> None:
        for _ in range(items):
            second.put(transform(first.get()))

    threads = [threading.Thread(target=loads), threading.Thread(target=transforms)]
    for thread in threads:
        thread.start()
    # A consumer that comes late finds everything made.
    for thread in threads:
        thread.join()
    for _ in range(items):
        compute(second.get())
