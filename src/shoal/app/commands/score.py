"""``shoal score``: how good were the predictions so far?"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["score"]


def score(
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
    last: Annotated[int, typer.Option(help="Newest rows to show.")] = 20,
    published: Annotated[
        str | None,
        typer.Option(
            "--published",
            help="training or serving: published runs, predicted beside reported, worst first.",
        ),
    ] = None,
) -> None:
    """Show every past prediction beside what was measured, and the errors in sum.

    **Examples**

        shoal score

        shoal score -o json --last 1000

        shoal score --published training
    """
    if published is not None:
        from shoal.app.published import show_published

        show_published(published, output, last)
        return
    from shoal.app.show import as_json, table
    from shoal.cost.score import Score

    store = Score()
    found = store.rows(jobs=False)[-last:]
    summaries = store.errors()
    if output is Format.json:
        as_json(
            {
                "rows": [row.model_dump(mode="json", exclude={"job"}) for row in found],
                "errors": [summary.model_dump(mode="json") for summary in summaries],
            }
        )
        return
    if not found:
        typer.echo("no runs yet; `shoal train --minutes 1` makes one")
        return
    table(
        "predictions",
        ("when", "run", "model", "quantity", "predicted", "measured", "error"),
        [
            (
                time.strftime("%Y-%m-%d %H:%M", time.localtime(row.recorded_s)),
                row.name,
                row.model,
                row.quantity,
                "" if row.predicted is None else f"{row.predicted:.4g}",
                f"{row.measured:.4g}",
                _percent(row.error, sign=True),
            )
            for row in found
        ],
        numeric="    rrr",
    )
    table(
        "errors",
        ("quantity", "runs", "median", "median size", "inside the 90 % interval"),
        [
            (
                s.quantity,
                s.count,
                _percent(s.median, sign=True),
                _percent(s.median_abs),
                _percent(s.inside),
            )
            for s in summaries
        ],
        numeric=" rrrr",
    )


def _percent(share: float | None, *, sign: bool = False) -> str:
    if share is None:
        return ""
    return f"{100 * share:+.1f} %" if sign else f"{100 * share:.1f} %"
