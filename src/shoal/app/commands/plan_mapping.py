"""``shoal plan mapping``: what of a program should be in fast memory, when, and where?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["mapping"]


def mapping(
    model: Annotated[
        str, typer.Option(help="A model's name, a sample such as resnet, or a program in YAML.")
    ] = "shoal-1m",
    fast: Annotated[str, typer.Option(help="Size of the fast memory, such as 4MiB.")] = "4MiB",
    mapper: Annotated[str, typer.Option(help="greedy, milp, anneal, muzero or hybrid.")] = "hybrid",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="OPTION=VALUE of the mapper; repeatable.")
    ] = None,
    length: Annotated[int, typer.Option(help="Tokens of the model's input.", min=1)] = 64,
    fast_bandwidth: Annotated[
        float | None, typer.Option(help="Byte/s of the fast memory; ten times the slow one.")
    ] = None,
    slow_bandwidth: Annotated[
        float | None, typer.Option(help="Byte/s of the slow memory; of --machine, or 20e9.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="FLOP/s of products; of --machine, or 1e12.")
    ] = None,
    machine: Annotated[
        str | None, typer.Option("--machine", "-m", help="Whose memory and FLOP/s.")
    ] = None,
    fit: Annotated[str, typer.Option(help="Hole that a buffer takes: first or best.")] = "first",
    times: Annotated[
        str, typer.Option(help="Seconds of operators: model, or measured here.")
    ] = "model",
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    svg: Annotated[
        Path | None, typer.Option(help="Draw the buffers in fast memory over time.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Save the program as YAML.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Map the buffers of a program to a small fast memory: what is copied when, and where it lies.

    The time is modelled; `greedy`, the way of a compiler, is shown beside what was asked for.

    **Examples**

        shoal plan mapping --model shoal-1m --fast 4MiB --mapper hybrid --svg mapping.svg

        shoal plan mapping --model resnet --fast 512KiB --mapper anneal --set rounds=5000

        shoal plan mapping --model program.yaml --fast 64KiB --mapper milp -o json
    """
    from shoal.app.mapping import asked, compared, picture, show, summary
    from shoal.app.show import as_json
    from shoal.core.errors import ConfigError
    from shoal.core.files import write_atomic

    program, tiers = asked(
        model,
        fast=fast,
        fast_bandwidth=fast_bandwidth,
        slow_bandwidth=slow_bandwidth,
        flops=flops,
        machine=machine,
        fit=fit,
        length=length,
        times=times,
    )
    if out is not None:
        program.save(out, header="A program of memory, by `shoal plan mapping`.")
        typer.echo(f"saved {out}", err=True)
    found = compared(program, tiers, mapper=mapper, sets=set_ or [], seed=seed)
    if svg is not None:
        write_atomic(svg, picture(found[0]), error=ConfigError)
        typer.echo(f"wrote {svg}", err=True)
    if output is Format.json:
        as_json(summary(found))
    else:
        show(found)
