"""``shoal plan t3``: what do products gain whose stores trigger their reduce-scatter?"""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["t3"]


def t3(
    hidden: Annotated[int, typer.Option("--hidden", help="Hidden size of the model.")] = 4256,
    tp: Annotated[int, typer.Option("--tp", help="Devices of a layer.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a pass.")] = 8192,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="path=value of the device, such as link_bandwidth=1.5e11."),
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Simulate products whose stores trigger their reduce-scatter (T3), layer by layer.

    A row-split layer's output is summed over the tensor-parallel devices. With trackers, triggered
    DMAs and additions near memory that travels while the product is computed.

    **Examples**

        shoal plan t3 --hidden 4256 --tp 8

        shoal plan t3 --hidden 12288 --tp 16 --tokens 4096 --set link_bandwidth=1.5e11

        shoal plan t3 --set update_cost=2 --set policy=round_robin -o json
    """
    from shoal.app.show import as_json, table
    from shoal.core.config import resolve
    from shoal.cost.t3 import Device, compare, sublayers

    device = resolve(Device, environment={}, sets=set_ or []).value
    found = [compare(layer, device) for layer in sublayers("", hidden, tokens, tp)]
    if output is Format.json:
        as_json(
            [
                {**c.model_dump(mode="json"), "speedup": c.speedup, "movement": c.movement}
                for c in found
            ]
        )
        return
    columns = ("sublayer", "product", "reduce-scatter", "all-gather", "sequential", "T3", "ideal")
    rows = [
        (
            c.sublayer.name,
            *(
                f"{1e6 * seconds:,.0f} us"
                for seconds in (
                    c.product_s,
                    c.reduce_scatter_s,
                    c.all_gather_s,
                    c.sequential_s,
                    c.t3_s,
                    c.ideal_s,
                )
            ),
            f"{c.speedup:.2f}x",
            f"{100 * c.movement:+.0f} %",
        )
        for c in found
    ]
    title = f"hidden {hidden}, tp {tp}, {tokens} tokens"
    table(title, (*columns, "faster", "bytes moved"), rows, numeric=" rrrrrrrr")
