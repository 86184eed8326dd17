"""``shoal score``: how good were the predictions so far?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.app.show import Format, Output

if TYPE_CHECKING:
    from shoal.cost.imports.measure import SteadyState
    from shoal.ir import Report

__all__ = ["score"]


def score(
    output: Output = Format.text,
    last: Annotated[int, typer.Option(help="Newest rows to show.")] = 20,
    import_: Annotated[
        Path | None,
        typer.Option("--import", help="The log of another engine, to read and to score."),
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="auto, torchtitan, megatron, deepspeed, accelerate, vllm, sglang, llamacpp, "
            "tensorboard or wandb.",
        ),
    ] = "auto",
    plan: Annotated[
        Path | None, typer.Option(help="The plan that was run; without, nothing is scored.")
    ] = None,
    published: Annotated[
        str | None,
        typer.Option(
            help="training, serving, closed-loop or a CSV file of such runs; furthest off first."
        ),
    ] = None,
) -> None:
    """Show every past prediction beside what was measured, and the errors in sum.

    With `--import`, read what another engine logged; with `--plan`, set it beside what was
    predicted and keep it in the score.

    **Examples**

        shoal score

        shoal score -o json --last 1000

        shoal score --import train.log --plan launch-torchtitan/plan.yaml

        shoal score --published training

        shoal score --published my-runs.csv
    """
    if published is not None:
        from shoal.app.published import show_published

        show_published(published, output, last)
        return
    if import_ is not None:
        _import(import_, format_, plan, output)
        return
    _show(output, last)


def _import(path: Path, format_: str, plan: Path | None, output: Format) -> None:
    """Read a log, keep it in the score if its plan is known, and show it."""
    from shoal.app.show import as_json
    from shoal.cost.imports.measure import measure, read, report
    from shoal.cost.score import Score
    from shoal.plan.saved import read_plan

    planned = None if plan is None else read_plan(plan)
    measured = measure(read(path, format_), planned)
    scored = None
    if planned is not None:
        scored = report(measured, planned)
        Score().append(scored)
    if output is Format.json:
        as_json(
            {
                "format": measured.log.format,
                "entries": len(measured.log.entries),
                "steady_entries": measured.used,
                "measured": measured.quantities,
                "errors": {} if scored is None else scored.errors,
            }
        )
    else:
        _print(measured, scored)


def _print(measured: SteadyState, scored: Report[Any] | None) -> None:
    from shoal.app.show import table
    from shoal.ir import predictions

    log = measured.log
    fields = {} if scored is None else predictions(scored.plan)
    errors = {} if scored is None else scored.errors
    rows = [
        (
            name + (" (from the plan's batch)" if name in measured.derived else ""),
            f"{fields[name].value:.4g}" if name in fields else "",
            f"{value:.4g}",
            _percent(errors.get(name), sign=True),
        )
        for name, value in sorted(measured.quantities.items())
    ]
    title = f"{log.path.name}, a log of {log.format}"
    table(title, ("quantity", "predicted", "measured", "error"), rows, numeric=" rrr")
    if log.entries:
        typer.echo(
            f"median of the last {measured.used} of {len(log.entries)} entries; the others are "
            "warm-up, or idle"
        )
    if scored is None:
        typer.echo("not scored: give the plan that was run with --plan")


def _show(output: Format, last: int) -> None:
    """The rows of the score and their errors."""
    from shoal.app.show import as_json, table
    from shoal.cost.score import Score

    store = Score()
    rows = store.rows(jobs=False)[-last:]
    summaries = store.errors()
    if output is Format.json:
        as_json(
            {
                "rows": [row.model_dump(mode="json", exclude={"job"}) for row in rows],
                "errors": [summary.model_dump(mode="json") for summary in summaries],
            }
        )
        return
    if not rows:
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
                "not counted" if row.elsewhere else _percent(row.error, sign=True),
            )
            for row in rows
        ],
        numeric="    rrr",
    )
    if left := [row for row in rows if row.elsewhere]:
        kinds = " and a ".join(sorted({row.device.upper() for row in left}))
        typer.echo(
            f"not counted: {len(left)} of these rows were measured on a {kinds} and predicted for "
            "another kind of device"
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
