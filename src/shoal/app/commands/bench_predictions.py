"""``shoal bench predictions``: Shoal's predictions beside those of peers, on published runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format, Output, Quiet, check_endings


def predictions(
    rows: Annotated[
        list[str] | None, typer.Option("--rows", help="serving or training. [default: both]")
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(help="Interpreter with AIConfigurator. [default: a new environment]"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Rows of each kind, evenly spaced. [default: all]", min=1)
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the table as JSON.")] = None,
    output: Output = Format.text,
    quiet: Quiet = False,
) -> None:
    """Compare Shoal's predictions of published runs with those of other predictors.

    Each predictor gets the same model, devices, engine, degrees, formats and load, and its error
    is that of what was measured. Shoal's constants are set without the runs of the model, device
    or publication that is judged. Serving: NVIDIA AIConfigurator, in an environment of its own
    below Shoal's home; its answers are kept there, so that a run that was stopped goes on.
    Training: models in the style of llm-analysis, Calculon and SimuMax.

    **Examples**

        shoal bench predictions

        shoal bench predictions --rows serving --limit 200

        shoal bench predictions --python ~/aiconfigurator/bin/python --out predictors.json

        shoal bench predictions --rows training -o json
    """
    from shoal.app.show import WorkBar, as_json, show
    from shoal.claims.bench.predictions.comparison import KINDS, compare, tables
    from shoal.core.files import write_json

    check_endings("--out", [out], ".json")
    with WorkBar("bench predictions", quiet=quiet) as bar:
        result = compare(
            rows or KINDS,
            python=python,
            limit=limit,
            progress=lambda text, done, total: bar(done, total, text),
            notice=lambda text: typer.echo(text, err=True),
        )
    if out is not None:
        write_json(out, result.model_dump(mode="json"))
    if output is Format.json:
        as_json(result.model_dump(mode="json"))
        return
    for one in tables(result):
        show(one)
    for name, version in result.versions.items():
        typer.echo(f"{name} {version}")
