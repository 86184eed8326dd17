"""From a network to a schedule: arrange nodes, plan routes, write down who does what when.

Source: Blagoev et al., SkipPipe: Partial and Reordered Pipelining Framework for Training LLMs
in Heterogeneous Networks, 2025.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from shoal.core.config import Value
from shoal.core.errors import PlanError, require
from shoal.cost.pipeline.simulator import Timeline, simulate
from shoal.ir.schedule import Op, OpCosts, Schedule
from shoal.plan.routes.arrange import Arrangement, arrange, arrangement_cost, default_sizes
from shoal.plan.routes.conflicts import Routes, plan_routes
from shoal.plan.routes.network import WanNetwork
from shoal.plan.routes.path import RouteProblem

# The solver's clock: this many ticks are one forward pass of the slowest node.
_TICKS = 1000


class RouteTask(Value):
    """What is to be routed.

    Args:
        stages: stages of the model; stage 0 holds embedding and output layer as well.
        keep: stages that a micro-batch visits, stage 0 included; None for all.
        swap: a micro-batch may visit two neighbouring stages in reverse order.
        microbatches: of one step.
        forward_s: a stage's forward pass on a node of speed 1.
        backward_s: its backward pass.
        head_s: the output layer's forward pass; its backward takes twice as long.
        boundary_bytes: activations of a micro-batch between stages.
        sync_bytes: gradients of a stage.
        in_flight: largest number of micro-batches of a node without its own limit; None for the
            number of stages.
        sizes: nodes of each stage; None shares them by what the stages have to do.
        effort: nodes of the constraint tree, and attempts to improve a plan.
        seed: of the searches.
    """

    stages: PositiveInt
    keep: PositiveInt | None = None
    swap: bool = False
    microbatches: PositiveInt = 8
    forward_s: PositiveFloat = 0.3
    backward_s: PositiveFloat = 0.6
    head_s: NonNegativeFloat = 0.1
    boundary_bytes: NonNegativeFloat = 8e6
    sync_bytes: NonNegativeFloat = 1e8
    in_flight: NonNegativeInt | None = None
    sizes: tuple[PositiveInt, ...] | None = None
    effort: NonNegativeInt = Field(default=100, le=100_000)
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        require(
            self.kept <= self.stages,
            "keep",
            self.keep,
            expected=f"1 to {self.stages}, the number of stages",
        )
        require(
            self.sizes is None or len(self.sizes) == self.stages,
            "sizes",
            self.sizes,
            expected=f"{self.stages} numbers, one for each stage",
        )
        return self

    @property
    def kept(self) -> int:
        """Stages that a micro-batch visits."""
        return self.stages if self.keep is None else self.keep


@dataclass(frozen=True)
class RoutePlan:
    """Routes through a network, and the schedule that does them.

    Args:
        network: the nodes; node i is rank i.
        task: the routing problem.
        stages: nodes of each stage.
        problem: what was solved, in ticks.
        tick_s: seconds of a tick.
        routes: the solution.
    """

    network: WanNetwork
    task: RouteTask
    stages: Arrangement
    problem: RouteProblem
    tick_s: float
    routes: Routes

    @cached_property
    def schedule(self) -> Schedule:
        """The passes of every node, in the order of the plan."""
        return to_schedule(self.problem, self.routes, ranks=len(self.network.nodes))

    @cached_property
    def costs(self) -> OpCosts:
        """What the passes of the schedule cost, in seconds and bytes."""
        task, schedule = self.task, self.schedule
        head = schedule.num_cells - 1
        speeds = [self.network.nodes[rank].speed for rank in schedule.place]

        def row(stage: float, last: float) -> tuple[float, ...]:
            return tuple(
                (last if cell == head else stage) / speed
                for cell, speed in zip(schedule.cell_of, speeds, strict=True)
            )

        return OpCosts(
            seconds={
                "F": row(task.forward_s, task.head_s),
                "B": row(task.backward_s, 2 * task.head_s),
            },
            boundary_bytes=task.boundary_bytes,
            held_bytes=tuple(float(cell != head) for cell in schedule.cell_of),
        )

    @cached_property
    def timeline(self) -> Timeline:
        """What the simulator makes of it."""
        return simulate(self.schedule, self.costs, self.network)

    @cached_property
    def sync_s(self) -> float:
        """Seconds in which the slowest stage averages its gradients, by rings."""
        task, slowest = self.task, 0.0
        for nodes in self.stages:
            count = len(nodes)
            link = max(
                (self.network.seconds(a, b, task.sync_bytes / count) for a in nodes for b in nodes),
                default=0.0,
            )
            slowest = max(slowest, 2 * (count - 1) * link)
        return slowest

    @cached_property
    def arrangement_s(self) -> tuple[float, float]:
        """(slowest link inside a stage, sum of the bottlenecks between stages), in seconds."""
        return arrangement_cost(
            self.network,
            self.stages,
            sync_bytes=self.task.sync_bytes,
            boundary_bytes=self.task.boundary_bytes,
        )


def problem_of(
    network: WanNetwork, task: RouteTask, stages: Arrangement
) -> tuple[RouteProblem, float]:
    """The problem in ticks, and the seconds of a tick.

    Raises:
        PlanError: more ticks than the solver can count.
    """
    slowest = min(node.speed for node in network.nodes)
    tick = task.forward_s / slowest / _TICKS
    nodes = range(len(network.nodes))

    def ticks(seconds: float) -> int:
        require(
            seconds / tick < 2**40,
            "forward_s",
            task.forward_s,
            expected="a time that compares with those of links and other passes",
            error=PlanError,
        )
        return round(seconds / tick)

    def by_node(seconds: float) -> tuple[int, ...]:
        return tuple(ticks(seconds / node.speed) for node in network.nodes)

    def link(a: int, b: int) -> int | None:
        seconds = network.seconds(a, b, task.boundary_bytes)
        return ticks(seconds) if math.isfinite(seconds) else None

    room = task.stages if task.in_flight is None else task.in_flight
    head, back = by_node(task.head_s), by_node(2 * task.head_s)
    return (
        RouteProblem(
            stages=stages,
            microbatches=task.microbatches,
            keep=task.kept,
            swap=task.swap,
            forward=by_node(task.forward_s),
            backward=by_node(task.backward_s),
            head=tuple(a + b for a, b in zip(head, back, strict=True)),
            links=tuple(tuple(link(a, b) for b in nodes) for a in nodes),
            in_flight=tuple(
                room if node.in_flight is None else node.in_flight for node in network.nodes
            ),
        ),
        tick,
    )


def plan(network: WanNetwork, task: RouteTask) -> RoutePlan:
    """Arrange the nodes of a network into stages, and plan the routes of a step.

    Raises:
        PlanError: nodes cannot reach each other, or no plan keeps the constraints; names the
            one that binds.
    """
    sizes = task.sizes or default_sizes(len(network.nodes), task.stages, task.kept)
    stages = arrange(
        network,
        sizes,
        sync_bytes=task.sync_bytes,
        boundary_bytes=task.boundary_bytes,
        seed=task.seed,
    )
    problem, tick = problem_of(network, task, stages)
    routes = plan_routes(problem, effort=task.effort, seed=task.seed)
    return RoutePlan(network, task, stages, problem, tick, routes)


def to_schedule(
    problem: RouteProblem, routes: Routes, *, ranks: int, name: str = "skippipe"
) -> Schedule:
    """The schedule of a plan: every node does its passes in the order of their planned times.

    Stages of the schedule are pairs of a stage of the model and a node, and behind them the
    output layers of the nodes of stage 0: every route ends on the rank where it began.
    """
    pairs = [(s, node) for s, nodes in enumerate(problem.stages) for node in nodes]
    head = len(problem.stages)
    pairs += [(head, node) for node in problem.stages[0]]
    number = {pair: i for i, pair in enumerate(pairs)}
    timed: list[list[tuple[int, int, int, int, Op]]] = [[] for _ in range(ranks)]
    for mb, route in enumerate(routes.passes):
        for at, one in enumerate(route):
            if one.kind == "H":
                stage = number[head, one.node]
                ops: tuple[Op, ...] = (Op("F", stage, mb), Op("B", stage, mb))
            else:
                ops = (Op(one.kind, number[problem.stage_of[one.node], one.node], mb),)
            # Passes without duration stand where they are planned, in the order of the route.
            for step, op in enumerate(ops):
                timed[one.node].append((one.start, one.end, mb, 2 * at + step, op))
    return Schedule(
        name=name,
        ops=tuple(tuple(row[-1] for row in sorted(rows)) for rows in timed),
        place=tuple(node for _, node in pairs),
        microbatches=problem.microbatches,
        routes={
            mb: tuple(
                number[pair]
                for pair in (
                    *((problem.stage_of[node], node) for node in routes.nodes(mb)),
                    (head, problem.start(mb)),
                )
            )
            for mb in range(problem.microbatches)
        },
        cells=tuple(cell for cell, _ in pairs),
        bare_head=True,
    )
