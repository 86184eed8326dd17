"""``shoal model mini``: the mini-models, trained by recipe when first asked for."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.show import Format, Output


def mini(
    names: Annotated[
        list[str] | None, typer.Argument(help="Models to train; without a name, list them.")
    ] = None,
    output: Output = Format.text,
) -> None:
    """Train mini-models by their recipes, or say where they lie.

    **Examples**

        shoal model mini

        shoal model mini shoal-27m shoal-draft-1m
    """
    from shoal.app.show import as_json, table
    from shoal.train import zoo

    if not names:
        rows = []
        for name in zoo.names():
            job, place = zoo.recipe(name), zoo.trained_directory(name)
            rows.append((name, job.tokens or 0, job.data.name, str(place) if place else None))
        if output is Format.json:
            columns = ("name", "tokens", "text", "trained")
            as_json([dict(zip(columns, row, strict=True)) for row in rows])
            return
        shown = [(name, f"{n:,}", text, place or "not yet") for name, n, text, place in rows]
        table("mini-models", ("name", "tokens", "text", "trained"), shown, numeric=" r  ")
        return
    places = [str(zoo.trained(name, lambda line: typer.echo(line, err=True))) for name in names]
    if output is Format.json:
        as_json([{"name": n, "trained": place} for n, place in zip(names, places, strict=True)])
    else:
        typer.echo("\n".join(places))
