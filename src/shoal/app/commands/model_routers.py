"""``shoal model routers``: train who chooses among feed-forward layers of two sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format, Output

__all__ = ["routers"]


def routers(
    directory: Annotated[Path, typer.Argument(help="Directory of a model of ffn: duo.")],
    out: Annotated[Path, typer.Option(help="The new directory.")],
    budget: Annotated[
        float, typer.Option(help="Share of the all-big feed-forward operations to spend.")
    ] = 0.5,
    steps: Annotated[int, typer.Option(help="Of the optimizer.", min=1)] = 200,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=8)] = 128,
    batch: Annotated[int, typer.Option(help="Sequences of a step.", min=1)] = 16,
    lr: Annotated[float, typer.Option(help="The highest learning rate.")] = 1e-2,
    weight: Annotated[float, typer.Option(help="Of being off the budget.", min=0.0)] = 4.0,
    text: Annotated[
        Path | None,
        typer.Option(help="Text, a file or a directory; Python's standard library otherwise."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order of the text, and of samples.")] = 0,
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

    with WorkBar("training routers", quiet=output is Format.json) as bar:
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
