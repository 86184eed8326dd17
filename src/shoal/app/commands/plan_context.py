"""``shoal plan context``: how should ranks share a long sequence?"""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.counts import count
from shoal.app.show import Format

__all__ = ["context"]


def context(
    heads: Annotated[int, typer.Option("--heads", help="Query heads of one rank.")] = 32,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", help="Key/value heads; as many, if not given.")
    ] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Width of a head.")] = 128,
    tokens: Annotated[str, typer.Option(help="Tokens of a sequence, such as 32768.")] = "32768",
    cp: Annotated[int, typer.Option("--cp", help="Ranks that share a sequence.")] = 4,
    links: Annotated[
        str, typer.Option(help="switch; mesh, a link between every two ranks; or ring.")
    ] = "switch",
    duplex: Annotated[str, typer.Option(help="full, or half: one direction at a time.")] = "full",
    bandwidth: Annotated[float, typer.Option(help="Byte/s of a link in one direction.")] = 25e9,
    latency: Annotated[float, typer.Option(help="Seconds of a small message.")] = 1e-5,
    precision: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    causal: Annotated[bool, typer.Option(help="A query sees what came before it; or all.")] = True,
    tflops: Annotated[
        float,
        typer.Option(help="TFLOP/s of a rank's attention, which hides messages; 0: hides none."),
    ] = 0.0,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Rank the ways for ranks to share one long sequence, and say why.

    Bytes on the busiest link, seconds on the wire, seconds that computation does not hide, and
    what a rank holds besides its own share, of one layer.

    **Examples**

        shoal plan context --heads 32 --kv-heads 8 --links mesh

        shoal plan context --heads 32 --links ring --cp 8 --tokens 131072 --tflops 400

        shoal plan context --kv-heads 4 --duplex half --bandwidth 6e9 -o json
    """
    from shoal.app.context import Question, advice, show, summary, warnings

    asked = Question(
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        tokens=count(tokens),
        cp=cp,
        links=links,
        duplex=duplex,
        bandwidth=bandwidth,
        latency=latency,
        precision=precision,
        causal=causal,
        tflops=tflops,
    )
    rows = advice(asked)
    for line in warnings(asked):
        typer.echo(f"warning: {line}", err=True)
    if output is Format.json:
        from shoal.app.show import as_json

        as_json(summary(asked, rows))
    else:
        show(asked, rows)
