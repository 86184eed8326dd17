"""``shoal explain routes``: which nodes should each micro-batch visit?"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from shoal.core.config import parse
from shoal.core.files import to_json
from shoal.core.parts import part
from shoal.core.tables import Table, digits
from shoal.cost.pipeline.picture import MOST_BOXES, page, svg
from shoal.cost.pipeline.text import lines
from shoal.cost.pipeline.trace import trace
from shoal.ir import Explanation, Machine, Progress
from shoal.ir.explanation import Text
from shoal.plan.routes.network import WanNetwork
from shoal.plan.routes.plan import RoutePlan, RouteTask, plan

_MOST_ROWS = 24


@part
class RoutesStudy:
    """Choose which nodes of a slow network each micro-batch visits, and when.

    Nodes are arranged into stages, and routes planned that skip stages, avoid slow links and do
    not collide; the schedule `skippipe` runs them. `--out` writes the timeline as a web page, and
    as a trace for ui.perfetto.dev.

    **Examples**

        shoal explain routes net.yaml --stages 6 --microbatches 20

        shoal explain routes net.yaml --stages 6 --keep 4 --microbatches 20 --swap --picture a.svg

        shoal explain routes net.yaml --stages 3 --sizes '[2, 1, 1]' --in-flight 2 -o json

    Args:
        network: nodes and their links, in YAML.
        stages: stages of the model.
        keep: stages that a micro-batch visits; all if not given.
        microbatches: micro-batches of a step.
        swap: neighbouring stages may be visited in reverse order.
        sizes: nodes of each stage, such as [5, 3, 3]; by load if not given.
        in_flight: micro-batches that a node holds; the number of stages if not given.
        forward: seconds of a stage's forward pass.
        backward: seconds of its backward pass.
        head: seconds of the output layer's forward pass.
        boundary_bytes: bytes of a micro-batch's activations between stages.
        sync_bytes: bytes of a stage's gradients.
        effort: nodes of the search tree and attempts at improvement.
        seed: seed of the searches.
    """

    subject: ClassVar = "network"
    machine: ClassVar = None

    network: Path
    stages: int = 4
    keep: int | None = None
    microbatches: Annotated[int, Ge(1), Le(4096)] = 8
    swap: bool = False
    sizes: tuple[int, ...] | None = None
    in_flight: int | None = None
    forward: float = 0.3
    backward: float = 0.6
    head: float = 0.1
    boundary_bytes: float = 8e6
    sync_bytes: float = 1e8
    effort: int = 100
    seed: int = 0

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """Where the nodes are, the routes, and the timeline."""
        task = {
            "stages": self.stages,
            "keep": self.keep,
            "swap": self.swap,
            "microbatches": self.microbatches,
            "forward_s": self.forward,
            "backward_s": self.backward,
            "head_s": self.head,
            "boundary_bytes": self.boundary_bytes,
            "sync_bytes": self.sync_bytes,
            "in_flight": self.in_flight,
            "sizes": self.sizes,
            "effort": self.effort,
            "seed": self.seed,
        }
        network = WanNetwork.load(self.network)
        plans = plan(network, parse(RouteTask, task, where="explain routes"))
        title = (
            f"{network.name}: {plans.task.kept} of {self.stages} stages, "
            f"{self.microbatches} micro-batches"
        )
        timelines = {"predicted": plans.timeline}
        files: dict[str, Text] = {"routes.json": lambda: to_json(trace(timelines))}
        if len(plans.timeline) <= MOST_BOXES:
            files["routes.html"] = lambda: page(timelines, title=title, unit="s")
        return Explanation(
            blocks=tuple(_blocks(plans)),
            data=_record(plans),
            picture=lambda: svg(timelines, title=title, unit="s"),
            files=files,
        )


def _record(found: RoutePlan) -> dict[str, Any]:
    names = [node.name for node in found.network.nodes]
    tick = found.tick_s
    within, around = found.arrangement_s
    return {
        "network": found.network.name,
        "stages": [[names[n] for n in nodes] for nodes in found.stages],
        "keep": found.task.kept,
        "swap": found.task.swap,
        "step_s": found.timeline.makespan,
        "planned_s": found.routes.makespan * tick,
        "bubble": found.timeline.bubble,
        "sync_s": found.sync_s,
        "slowest_link_inside_s": within,
        "bottlenecks_s": around,
        "optimal": found.routes.optimal,
        "expanded": found.routes.expanded,
        "routes": [
            {
                "microbatch": mb,
                "stages": [found.problem.stage_of[n] for n in found.routes.nodes(mb)],
                "nodes": [names[n] for n in found.routes.nodes(mb)],
                "end_s": route[-1].end * tick,
            }
            for mb, route in enumerate(found.routes.passes)
        ],
        "events": [
            {"rank": rank, "pass": str(op), "start": start, "end": end}
            for rank, op, start, end in found.timeline.events()
        ],
    }


def _blocks(found: RoutePlan) -> list[Table | str]:
    names = [node.name for node in found.network.nodes]
    timeline, routes = found.timeline, found.routes
    how = "the optimum" if routes.optimal else "best found"
    blocks: list[Table | str] = [
        f"{found.network.name}: {found.task.kept} of {found.task.stages} stages, step "
        f"{digits(timeline.makespan)} s ({how}), bubble {100 * timeline.bubble:.1f} % of the work; "
        f"then gradients are averaged in {digits(found.sync_s)} s",
        Table(
            title="stages",
            columns=("stage", "visits", "nodes"),
            rows=tuple(
                (
                    str(stage),
                    str(
                        sum(
                            node in routes.nodes(mb)
                            for mb in range(len(routes.passes))
                            for node in nodes
                        )
                    ),
                    ", ".join(names[n] for n in nodes),
                )
                for stage, nodes in enumerate(found.stages)
            ),
            right="rr",
        ),
        Table(
            title="routes",
            columns=("micro-batch", "stages", "nodes", "ends"),
            rows=tuple(
                (
                    str(mb),
                    " ".join(str(found.problem.stage_of[n]) for n in routes.nodes(mb)),
                    ", ".join(names[n] for n in routes.nodes(mb)),
                    f"{digits(route[-1].end * found.tick_s)} s",
                )
                for mb, route in enumerate(routes.passes[:_MOST_ROWS])
            ),
            right="r  r",
        ),
    ]
    if len(routes.passes) > _MOST_ROWS:
        blocks.append(f"{len(routes.passes) - _MOST_ROWS} micro-batches more are not shown")
    shown = list(range(min(len(names), _MOST_ROWS)))
    wide = max(len(names[rank]) for rank in shown)
    columns = max(40, min(160, shutil.get_terminal_size((160, 0)).columns) - wide - 1)
    drawn = lines(timeline, columns, shown)
    return [
        *blocks,
        *(f"{names[rank]:>{wide}} {line}" for rank, line in zip(shown, drawn, strict=True)),
    ]
