"""``shoal model mini``: the mini-models, trained by recipe when first asked for."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["mini"]


def mini(
    names: Annotated[
        list[str] | None, typer.Argument(help="Models to train; without one, what there is.")
    ] = None,
) -> None:
    """Train mini-models by their recipes, or say where they lie.

    **Examples**

        shoal model mini

        shoal model mini shoal-27m shoal-draft-1m
    """
    from shoal.app.show import table
    from shoal.train import zoo

    if not names:
        rows = []
        for name in zoo.names():
            job, place = zoo.recipe(name), zoo.trained_directory(name)
            rows.append(
                (name, f"{job.tokens or 0:,}", job.data.name, str(place) if place else "not yet")
            )
        table("mini-models", ("name", "tokens", "text", "trained"), rows, numeric=" r  ")
        return
    for name in names:
        typer.echo(str(zoo.trained(name, lambda line: typer.echo(line, err=True))))
