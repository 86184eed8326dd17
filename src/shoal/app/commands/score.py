"""``shoal score``: how good were the predictions so far?"""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["score"]


def score(
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
    last: Annotated[int, typer.Option(help="Newest rows to show.")] = 20,
) -> None:
    """Show every past prediction beside what was measured, and the errors in sum.

    **Examples**

        shoal score

        shoal score -o json --last 1000
    """
    from shoal.app.show import as_json, table
    from shoal.cost.score import Score

    store = Score()
    found = store.rows()[-last:]
    summary = store.summary()
    if output is Format.json:
        as_json(
            {
                "rows": [row.model_dump(mode="json") for row in found],
                "summary": [s.model_dump(mode="json") for s in summary],
            }
        )
        return
    if not found:
        typer.echo("no runs yet; `shoal train --minutes 1` makes one")
        return
    table(
        "predictions",
        ("when", "job", "machine", "quantity", "predicted", "measured", "error"),
        [
            (
                row.when[:16],
                row.job,
                row.machine,
                row.quantity,
                f"{row.predicted:.4g}",
                f"{row.measured:.4g}",
                f"{100 * row.error:+.1f} %",
            )
            for row in found
        ],
        numeric="    rrr",
    )
    table(
        "errors",
        ("quantity", "runs", "median", "90th percentile", "inside the 90 % interval"),
        [
            (
                s.quantity,
                s.count,
                f"{100 * s.median:.1f} %",
                f"{100 * s.p90:.1f} %",
                f"{100 * s.inside:.0f} %",
            )
            for s in summary
        ],
        numeric=" rrrr",
    )
