"""``shoal plan scaling``: how much data does a target error need?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["scaling"]


def scaling(
    curve: Annotated[Path, typer.Argument(help="CSV with columns size,value[,spread,trials].")],
    target: Annotated[
        float | None, typer.Option(help="An error: how much data does it take?")
    ] = None,
    law: Annotated[
        str | None, typer.Option(help="power, power_floor or three_regime; the best of them.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw curve and fit as SVG.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Fit a learning curve, and say how much data a target error needs.

    **Examples**

        shoal plan scaling curve.csv

        shoal plan scaling curve.csv --target 1.9 --picture curve.svg
    """
    from shoal.app.show import as_json, table
    from shoal.core.files import write_atomic
    from shoal.cost.scaling.ask import data_needed, fit_best
    from shoal.cost.scaling.fit import fit
    from shoal.cost.scaling.picture import picture as draw
    from shoal.cost.scaling.read import read_curve

    points = read_curve(curve)
    fitted = fit_best(points) if law is None else fit(law, points)
    needed = None if target is None else data_needed(fitted, target)
    if picture is not None:
        write_atomic(picture, draw({curve.stem: (points, fitted)}))
        typer.echo(f"drew {picture}", err=output is Format.json)
    if output is Format.json:
        shown = fitted.model_dump(mode="json", exclude={"samples"})
        as_json({"fit": shown, "data_needed": needed and needed.model_dump(mode="json")})
        return
    table(
        f"law {fitted.law}, R2 {fitted.r2:.4f}",
        ("parameter", "value", "low", "high"),
        [
            (name, *(f"{number:.4g}" for number in (i.value, i.low, i.high)))
            for name, i in fitted.parameters.items()
        ],
        numeric=" rrr",
    )
    if target is not None and needed is None:
        typer.echo(f"an error of {target:g} is below the floor of this law: no data is enough")
    elif needed is not None:
        typer.echo(
            f"an error of {target:g} needs {needed.value:.4g} examples "
            f"({needed.low:.4g} to {needed.high:.4g})"
        )
