"""``shoal plan routes``: which nodes should each micro-batch visit?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["routes"]


def routes(
    network: Annotated[Path, typer.Argument(help="Nodes and their links, in YAML.")],
    stages: Annotated[int, typer.Option(help="Stages of the model.", min=1)] = 4,
    keep: Annotated[
        int | None, typer.Option(help="Stages that a micro-batch visits; all, if not given.", min=1)
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 8,
    swap: Annotated[
        bool, typer.Option("--swap", help="Neighbouring stages may be visited in reverse order.")
    ] = False,
    sizes: Annotated[
        str | None, typer.Option(help="Nodes of each stage, such as 5,3,3; by load, if not given.")
    ] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(help="Micro-batches that a node holds; the number of stages.", min=0),
    ] = None,
    forward: Annotated[float, typer.Option(help="Seconds of a stage's forward pass.")] = 0.3,
    backward: Annotated[float, typer.Option(help="Seconds of its backward pass.")] = 0.6,
    head: Annotated[float, typer.Option(help="Seconds of the output layer's forward.")] = 0.1,
    boundary_bytes: Annotated[
        float, typer.Option(help="Bytes of a micro-batch's activations between stages.")
    ] = 8e6,
    sync_bytes: Annotated[float, typer.Option(help="Bytes of a stage's gradients.")] = 1e8,
    effort: Annotated[
        int, typer.Option(help="Nodes of the search tree, and attempts to improve.", min=0)
    ] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the searches.", min=0)] = 0,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the timeline as SVG.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Draw it as one web page.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Choose which nodes of a slow network each micro-batch visits, and when.

    Nodes are arranged into stages, and routes planned that skip stages, avoid slow links and do
    not collide; the schedule `skippipe` runs them.

    **Examples**

        shoal plan routes net.yaml --stages 6 --microbatches 20

        shoal plan routes net.yaml --stages 6 --keep 4 --microbatches 20 --swap --svg routes.svg

        shoal plan routes net.yaml --stages 3 --sizes 2,1,1 --in-flight 2 -o json
    """
    from shoal.app.routes import planned, show, sizes_of, summary, write

    found = planned(
        network,
        {
            "stages": stages,
            "keep": keep,
            "swap": swap,
            "microbatches": microbatches,
            "forward_s": forward,
            "backward_s": backward,
            "head_s": head,
            "boundary_bytes": boundary_bytes,
            "sync_bytes": sync_bytes,
            "in_flight": in_flight,
            "sizes": sizes_of(sizes),
            "effort": effort,
            "seed": seed,
        },
    )
    for line in write(found, {"svg": svg, "html": html, "perfetto": perfetto}):
        typer.echo(line, err=True)
    if output is Format.json:
        from shoal.app.show import as_json

        as_json(summary(found))
    else:
        show(found)
