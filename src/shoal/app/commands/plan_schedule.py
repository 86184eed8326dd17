"""``shoal plan schedule``: who does what when in a pipeline?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["schedule"]


def schedule(
    name: Annotated[
        str,
        typer.Argument(
            help="gpipe, 1f1b, interleaved, zb_h1, zbv, vhalf, skippipe, or a CSV file of torch's."
        ),
    ],
    pp: Annotated[int, typer.Option("--pp", help="Ranks of the pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 8,
    vpp: Annotated[
        int | None, typer.Option("--vpp", help="Stages of a rank; what the schedule needs, or 2.")
    ] = None,
    forward: Annotated[
        float, typer.Option(help="Time of one micro-batch's forward through a rank's layers.")
    ] = 1.0,
    backward: Annotated[
        float, typer.Option(help="Time of its backward; half of it is for the weights.")
    ] = 2.0,
    send: Annotated[float, typer.Option(help="Time of a boundary from rank to rank.")] = 0.0,
    output_layer: Annotated[
        float, typer.Option(help="Time of a forward through the whole output layer.")
    ] = 0.0,
    vocab_barriers: Annotated[
        int,
        typer.Option(help="Split the vocabulary over all ranks, with 1 or 2 meetings; 0 does not."),
    ] = 0,
    unit: Annotated[str, typer.Option(help="Unit of the times: s, ms, us or none.")] = "none",
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw it as SVG.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Draw it as one web page.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write it for torch.distributed.pipelining.")
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Show a pipeline's schedule: who does what when, what is idle and what is held.

    It is simulated with equal stages; the runtime executes the very same passes.

    **Examples**

        shoal plan schedule 1f1b --pp 4 --microbatches 8

        shoal plan schedule interleaved --vpp 2 --send 0.05 --svg schedule.svg

        shoal plan schedule vhalf --vocab-barriers 1 --output-layer 2 --html schedule.html

        shoal plan schedule zbv --csv zbv.csv --perfetto zbv.json

        shoal plan schedule zbv.csv --send 0.1
    """
    from shoal.app.schedule import Times, built, show, summary, write

    times = Times(
        forward=forward, backward=backward, send=send, output_layer=output_layer, unit=unit
    )
    made = built(name, pp, microbatches, vpp, vocab_barriers)
    timeline = times.simulate(made)
    for line in write(
        made, timeline, times, files={"svg": svg, "html": html, "perfetto": perfetto, "csv": csv}
    ):
        typer.echo(line, err=True)
    if output is Format.json:
        from shoal.app.show import as_json

        as_json(summary(made, timeline))
    else:
        show(made, timeline, times)
