"""``shoal model routers``: train who chooses among feed-forward layers of two sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format, Output, Quiet


def routers(
    directory: Annotated[Path, typer.Argument(help="Directory of a model with ffn: duo.")],
    out: Annotated[Path, typer.Option(help="Output directory.")],
    budget: Annotated[
        float, typer.Option(help="Target share of the all-big feed-forward operations.")
    ] = 0.5,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = 200,
    length: Annotated[int, typer.Option(help="Tokens per sequence.", min=8)] = 128,
    batch: Annotated[int, typer.Option(help="Sequences per step.", min=1)] = 16,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = 1e-2,
    weight: Annotated[float, typer.Option(help="Weight of the budget penalty.", min=0.0)] = 4.0,
    text: Annotated[
        Path | None,
        typer.Option(help="Text, a file or a directory. [default: Python's standard library]"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of data order and samples.")] = 0,
    quiet: Quiet = False,
    output: Output = Format.text,
) -> None:
    """Train the routers of a model, all else frozen, and measure what each share of it takes.

    The new directory serves requests with `compute`: a share of the feed-forward operations.

    **Examples**

        shoal model routers runs/duo/export --out routed --budget 0.4

        shoal model routers runs/duo/export --out routed --steps 500 --text corpus/ -o json
    """
    from shoal.app.show import WorkBar, as_json, table
    from shoal.train.routers import routers_directory

    with WorkBar("training routers", quiet=quiet or output is Format.json) as bar:
        shifts = routers_directory(
            directory,
            out,
            budget=budget,
            data="stdlib" if text is None else {"name": "text", "path": str(text)},
            steps=steps,
            seq_len=length,
            batch=batch,
            lr=lr,
            weight=weight,
            seed=seed,
            progress=lambda what, done: bar(done, 1.0, what),
        )
    if output is Format.json:
        as_json({"shifts": shifts})
        return
    table(
        "shares of the all-big computation that routers can be set to",
        ("share", "taken from the score of the big layer"),
        [(f"{share:.3f}", f"{shift:.3f}") for share, shift in shifts],
        numeric="rr",
    )
    typer.echo(f"wrote {out}")
