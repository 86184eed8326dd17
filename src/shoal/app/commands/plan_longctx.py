"""``shoal plan longctx``: what does long context cost, at the peak of the hardware?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.counts import count
from shoal.app.show import Format

__all__ = ["longctx"]


def longctx(
    model: Annotated[str, typer.Argument(help="Name, directory or shape file of a model.")],
    machine: Annotated[str, typer.Option(help="Name or file; one device of it is used.")] = "A100",
    compare: Annotated[
        str, typer.Option(help="Several machines beside each other, such as a100,h100,h200.")
    ] = "",
    first: Annotated[str, typer.Option("--from", help="Shortest context.")] = "4K",
    last: Annotated[str, typer.Option("--to", help="Longest context.")] = "10M",
    tp: Annotated[int, typer.Option("--tp", help="Devices that share every layer.")] = 1,
    precision: Annotated[str, typer.Option(help="Dtype of the weights.")] = "bf16",
    kv: Annotated[str, typer.Option(help="Dtype of the cache; as the weights, if empty.")] = "",
    attention: Annotated[
        str,
        typer.Option(help="FLOP of a prompt's attention: causal (exact), unmasked, or paper."),
    ] = "causal",
    link: Annotated[
        float, typer.Option(help="B/s to the host, each way; 0: PCIe of the device.")
    ] = 0.0,
    compute_efficiency: Annotated[float, typer.Option(help="Share of the peak FLOP/s.")] = 1.0,
    memory_efficiency: Annotated[float, typer.Option(help="Share of the peak bandwidth.")] = 1.0,
    reduce: Annotated[
        list[str] | None,
        typer.Option(help="A way to make the cache smaller, such as window=4096; repeatable."),
    ] = None,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.")] = 250,
    long: Annotated[str, typer.Option(help="Which context shall be as cheap as --short.")] = "1M",
    short: Annotated[str, typer.Option(help="See --long.")] = "4K",
    users: Annotated[
        int, typer.Option(help="Users who ask about documents: gives sessions an hour.")
    ] = 0,
    think: Annotated[float, typer.Option(help="Seconds that a user thinks.")] = 30.0,
    rounds: Annotated[int, typer.Option(help="Questions of a session.")] = 5,
    picture: Annotated[Path | None, typer.Option(help="Draw it into this SVG file.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Say what long context costs: users that fit, prompt, answer and switch, by length.

    Everything is at the peak of the hardware. Also: from which length the cache outweighs the
    weights, and by what factor it must shrink for a long context to cost what a short one does.

    **Examples**

        shoal plan longctx CodeLlama-34b --from 4K --to 10M

        shoal plan longctx Llama-3-8B --compare a100,h100,h200 --picture longctx.svg

        shoal plan longctx Llama-3-8B --reduce window=4096 --reduce bits=4

        shoal plan longctx Llama-3-8B --machine H100 --users 8 --from 25K --to 100K

        shoal plan longctx Llama-3-70B --machine H200 --tp 4 -o json
    """
    from shoal.app.longctx import Question, show, summary
    from shoal.app.longctx import answer as found_of

    asked = Question(
        model=model,
        machines=[one.strip() for one in (compare or machine).split(",")],
        first=count(first, "--from"),
        last=count(last, "--to"),
        tp=tp,
        precision=precision,
        kv=kv or None,
        attention=attention,
        link=link or None,
        efficiency=(compute_efficiency, memory_efficiency),
        reduce=reduce or (),
        output=answer,
        long=count(long, "--long"),
        short=count(short, "--short"),
        users=users,
        think_s=think,
        rounds=rounds,
    )
    found = found_of(asked)
    if output is Format.json:
        from shoal.app.show import as_json

        as_json(summary(asked, found))
    else:
        show(asked, found)
    if picture is not None:
        from shoal.core.files import write_atomic
        from shoal.cost.longctx_picture import picture as drawn

        write_atomic(picture, drawn(found.settings, found.tokens, answer=answer))
        typer.echo(f"wrote {picture}", err=True)
