"""``shoal plan moe-overlap``: in how many chunks should the tokens of experts travel?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["Dispatch", "moe_overlap"]


class Dispatch(StrEnum):
    """Ways of tokens to experts; see ``parallel.expert_dispatch``."""

    flat = "flat"
    over_first = "1dh"
    by_place = "2dh"


def moe_overlap(
    model: Annotated[str, typer.Argument(help="A mixture of experts: name, directory or file.")],
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="64xH100, 32xA100@IB100, or a file.")
    ] = "64xH100",
    tokens: Annotated[int, typer.Option(help="Tokens of a rank and micro-batch.", min=1)] = 4096,
    seq_len: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 4096,
    ep: Annotated[
        int | None, typer.Option(help="Ranks that share out the experts; a node each.", min=1)
    ] = None,
    etp: Annotated[
        int | None, typer.Option(help="Ranks that share an expert; all of a node.", min=1)
    ] = None,
    dispatch: Annotated[
        Dispatch, typer.Option(help="Way of tokens between nodes.")
    ] = Dispatch.flat,
    most: Annotated[int, typer.Option(help="Chunks to look at.", min=1)] = 32,
    svg: Annotated[
        Path | None, typer.Option(help="Draw one layer's streams, uncut and as chosen.")
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Cut the tokens of a mixture's layer in chunks that travel while others are computed.

    Links between nodes, links inside a node and devices work at once; forward and backward have
    chunks of their own, and gradients are summed where the network would idle (FSMoE). Nothing
    runs. **Examples**

        shoal plan moe-overlap Mixtral-8x7B-v0.1

        shoal plan moe-overlap Qwen3-30B-A3B -m 32xA100 --tokens 2048 --svg streams.svg

        shoal plan moe-overlap Mixtral-8x22B-v0.1 --ep 8 --etp 4 -o json

        shoal plan moe-overlap Qwen3-30B-A3B --ep 64 --etp 1 --dispatch 2dh
    """
    from shoal.app.show import as_json, table
    from shoal.core.files import write_atomic
    from shoal.core.sizes import human_bytes
    from shoal.machine.described import load
    from shoal.plan.moe_overlap_picture import streams
    from shoal.plan.moe_step import planned

    target = load(machine)
    found = planned(
        model, target, tokens=tokens, seq_len=seq_len, ep=ep, etp=etp,
        dispatch=dispatch.value, most=most,
    )  # fmt: skip
    layer = found.layer
    if svg is not None:
        write_atomic(svg, streams(layer.forward, layer.backward))
    if output is Format.json:
        as_json(found.told())
        return
    table(
        f"{model} on {target.name}: ep {found.parallel.ep}, etp {found.parallel.etp}, "
        f"{tokens} tokens of a rank",
        ("pass", "chunks", "r in theory", "layer", "uncut", "faster", "held up by"),
        [
            (
                name,
                str(one.r),
                f"{one.relaxed:.2f}",
                f"{1e3 * one.seconds:.3g} ms",
                f"{1e3 * uncut:.3g} ms",
                f"{uncut / one.seconds:.2f}x",
                one.bound,
            )
            for name, one, uncut in found.rows()
        ],
        numeric=" rrrrr ",
    )
    table(
        "a task of one chunk: alpha + beta n / r",
        ("task", "alpha", "all chunks", "of a forward chunk", "of a backward chunk"),
        [
            (
                name,
                f"{1e6 * there.alpha:.1f} us",
                f"{1e3 * there.work:.3g} ms",
                f"{1e6 * there.at(found.forward.r):.0f} us",
                f"{1e6 * back.at(found.backward.r):.0f} us",
            )
            for name, there, back in zip(
                ("exchange", "gather", "experts"), layer.forward[:3], layer.backward[:3],
                strict=True,
            )
        ],
        numeric=" rrrr",
    )  # fmt: skip
    sums = found.gradients
    early = sum(one.bytes for one in sums.slices)
    typer.echo(
        f"{found.blocks} blocks: {1e3 * found.seconds:.3g} ms a micro-batch, "
        f"{1e3 * found.uncut_s:.3g} ms uncut with the sums of gradients at the end "
        f"({found.uncut_s / found.seconds:.2f}x)"
    )
    split = found.parallel
    typer.echo(
        f"parallel: {{ep: {split.ep}, etp: {split.etp}, "
        f"expert_chunks: [{found.forward.r}, {found.backward.r}]"
        + (f", expert_dispatch: {split.expert_dispatch}" if dispatch is not Dispatch.flat else "")
        + "}"
    )
    typer.echo(
        f"gradients: {human_bytes(int(early))} can be summed between nodes during the backward "
        f"pass in {len(sums.slices)} slices, {human_bytes(int(sums.tail))} after it "
        f"({1e3 * sums.tail_s:.3g} ms), with gradient_slices: auto"
    )
