"""What ``shoal plan routes`` shows and writes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.app.show import console, table
from shoal.core.config import parse
from shoal.core.errors import ConfigError, require
from shoal.core.files import write_atomic, write_json
from shoal.cost.pipeline_text import lines
from shoal.plan.routes.network import Network
from shoal.plan.routes.plan import Planned, RouteTask, plan

__all__ = ["planned", "show", "sizes_of", "summary", "write"]

_MOST_ROWS = 24
_MOST_MICROBATCHES = 4096


def sizes_of(text: str | None) -> tuple[int, ...] | None:
    """The numbers of ``5,3,3``.

    Raises:
        ConfigError: something else.
    """
    if text is None:
        return None
    words = text.split(",")
    require(
        all(word.strip().isascii() and word.strip().isdigit() for word in words),
        "--sizes",
        text,
        expected="nodes of each stage, such as 5,3,3",
    )
    return tuple(int(word) for word in words)


def planned(file: Path, options: Mapping[str, Any]) -> Planned:
    """Plan the routes of the network in a file.

    Raises:
        ConfigError: the file or an option cannot be used.
        MachineError: nodes or links that cannot be.
        PlanError: no plan keeps the constraints; names the one that binds.
    """
    network = Network.load(file)
    require(
        1 <= options["microbatches"] <= _MOST_MICROBATCHES,
        "--microbatches",
        options["microbatches"],
        expected=f"1 to {_MOST_MICROBATCHES}",
    )
    given = {name: value for name, value in options.items() if value is not None}
    return plan(network, parse(RouteTask, given, where="plan routes"))


def summary(found: Planned) -> dict[str, Any]:
    """The plan as plain values."""
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


def write(found: Planned, files: Mapping[str, Path | None]) -> Iterator[str]:
    """Write the files that are asked for, and say which.

    Raises:
        PlanError: too many passes for a picture.
        ConfigError: a file that cannot be written.
    """
    from shoal.cost.pipeline_picture import page, svg
    from shoal.cost.pipeline_trace import trace

    title = (
        f"{found.network.name}: {found.task.kept} of {found.task.stages} stages, "
        f"{found.task.microbatches} micro-batches"
    )
    timelines = {"predicted": found.timeline}
    for kind, path in files.items():
        if path is None:
            continue
        if kind == "perfetto":
            write_json(path, trace(timelines, unit_s=1.0), error=ConfigError)
        else:
            draw = svg if kind == "svg" else page
            write_atomic(path, draw(timelines, title=title, unit="s"), error=ConfigError)
        yield f"wrote {path}"


def show(found: Planned) -> None:
    """Print where the nodes are, the routes, and the timeline as text."""
    names = [node.name for node in found.network.nodes]
    timeline, routes = found.timeline, found.routes
    how = "the best there is" if routes.optimal else "the best found"
    console().print(
        f"{found.network.name}: {found.task.kept} of {found.task.stages} stages, step "
        f"{timeline.makespan:.4g} s ({how}), bubble {100 * timeline.bubble:.1f} % of the work; "
        f"then gradients are averaged in {found.sync_s:.4g} s",
        markup=False,
    )
    table(
        "stages",
        ("stage", "visits", "nodes"),
        [
            (
                stage,
                sum(node in routes.nodes(mb) for mb in range(len(routes.passes)) for node in nodes),
                ", ".join(names[n] for n in nodes),
            )
            for stage, nodes in enumerate(found.stages)
        ],
        numeric="rr",
    )
    table(
        "routes",
        ("micro-batch", "stages", "nodes", "ends"),
        [
            (
                mb,
                " ".join(str(found.problem.stage_of[n]) for n in routes.nodes(mb)),
                ", ".join(names[n] for n in routes.nodes(mb)),
                f"{route[-1].end * found.tick_s:.4g} s",
            )
            for mb, route in enumerate(routes.passes[:_MOST_ROWS])
        ],
        numeric="r  r",
    )
    if len(routes.passes) > _MOST_ROWS:
        print(f"{len(routes.passes) - _MOST_ROWS} micro-batches more are not shown")
    shown = list(range(min(len(names), _MOST_ROWS)))
    wide = max(len(names[rank]) for rank in shown)
    columns = max(40, min(160, console().width) - wide - 1)
    for rank, line in zip(shown, lines(timeline, columns, shown), strict=True):
        print(f"{names[rank]:>{wide}} {line}")
