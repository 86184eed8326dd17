"""``shoal plan paths``: which way should the flows of a collective take?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["paths"]


def paths(
    fabric: Annotated[
        Path | None, typer.Argument(help="A leaf-spine fabric, in YAML; the flags go over it.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", "-m", help="A machine described with a fabric.")
    ] = None,
    leaves: Annotated[int | None, typer.Option(help="Leaf switches; 16.")] = None,
    hosts: Annotated[int | None, typer.Option(help="Ports of a leaf to hosts; 8.")] = None,
    spines: Annotated[int | None, typer.Option(help="Spines, the uplinks of a leaf; 8.")] = None,
    rails: Annotated[
        int | None, typer.Option(help="Network cards of a node, each on a leaf of its own; 1.")
    ] = None,
    ports: Annotated[
        int | None, typer.Option(help="Bonded ports of a card, each on a leaf of its own; 1.")
    ] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Byte/s of a host; 50e9.")] = None,
    uplink: Annotated[
        float | None, typer.Option(help="Byte/s of a link between leaf and spine; a host's port.")
    ] = None,
    broken: Annotated[
        list[str] | None,
        typer.Option(help="LEAF-SPINE that is down, or LEAF-SPINE=SHARE of its bandwidth."),
    ] = None,
    collective: Annotated[
        str,
        typer.Option(help="all_reduce, all_gather, reduce_scatter, all_to_all or broadcast."),
    ] = "all_reduce",
    algorithm: Annotated[
        str | None,
        typer.Option(help="ring, halving_doubling, hierarchical, pairwise, direct or tree."),
    ] = None,
    size: Annotated[float, typer.Option("--bytes", help="Bytes that each rank holds.")] = 1e9,
    ranks: Annotated[int | None, typer.Option(help="Ranks; one on every host.")] = None,
    placement: Annotated[
        str, typer.Option(help="Ranks on hosts: packed, strided or random.")
    ] = "random",
    policy: Annotated[
        list[str] | None,
        typer.Option(help="ecmp, greedy, on_arrival, split, spray, lp, c4p or all; repeatable."),
    ] = None,
    jitter: Annotated[
        float, typer.Option(help="Beginnings are this share of a phase apart.", min=0, max=1)
    ] = 0.0,
    size_jitter: Annotated[
        float, typer.Option(help="Sizes differ by this share.", min=0, max=1)
    ] = 0.0,
    resolution: Annotated[
        float, typer.Option(help="Ends closer than this share of a phase count as one.", min=0)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of placement, hashes and jitter.", min=0)] = 0,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw loads of links as SVG.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Choose paths for the flows of a collective, and simulate what it takes.

    Flows share links fairly, and a collective ends with its last flow. Planned single paths are
    held against hashing and against ideal packet spraying.

    **Examples**

        shoal plan paths --leaves 16 --hosts 8 --spines 8 --collective all_reduce --policy split

        shoal plan paths --policy ecmp --policy c4p --ports 2 --svg loads.svg

        shoal plan paths --broken 3-0 --broken 5-2=0.5 --policy all

        shoal plan paths topology.yaml --collective all_to_all --jitter 0.1 -o json
    """
    from shoal.app.paths import asked, compared, show, summary, write

    there = asked(
        fabric,
        {
            "leaves": leaves,
            "hosts": hosts,
            "spines": spines,
            "rails": rails,
            "ports": ports,
            "bandwidth": bandwidth,
            "uplink_bandwidth": uplink,
        },
        broken or [],
        machine,
    )
    job, found = compared(
        there,
        name=collective,
        algorithm=algorithm,
        size=size,
        placement=placement,
        ranks=ranks,
        policies=policy or ["ecmp", "split", "spray"],
        seed=seed,
        start=jitter,
        jitter=size_jitter,
        resolution=resolution,
    )
    if svg is not None:
        write(svg, job, found)
        typer.echo(f"wrote {svg}", err=True)
    if output is Format.json:
        from shoal.app.show import as_json

        as_json(summary(there, job, found))
    else:
        show(there, job, found)
