"""``shoal probe gpu``: time serving's kernels on this machine's card."""

from __future__ import annotations

from pathlib import Path

import typer


def sweep(budget: float, out: Path | None, *, json: bool, quiet: bool) -> None:
    """Sweep for ``budget`` seconds and say what the table now has.

    Args:
        budget: seconds of the sweep.
        out: the table; that of the card in Shoal's home if None, where plans find it.
        json: print JSON.
        quiet: no progress.
    """
    from shoal.app.show import WorkBar, as_json, table
    from shoal.cost.kernels.own import sweep_kernels
    from shoal.machine.protocols import ProbeContext

    with WorkBar("kernels", quiet=quiet) as bar, ProbeContext() as context:
        result = sweep_kernels(context, budget_s=budget, path=out, progress=bar)
        skipped = dict(context.skipped)
    typer.echo(f"saved {result.path}", err=json)
    if json:
        as_json({**result._asdict(), "path": str(result.path), "skipped": skipped})
        return
    title = ", ".join(f"{key} {value or 'unknown'}" for key, value in result.facts.items())
    rows = [(name, *counts) for name, counts in result.grids.items()]
    table(title, ("kernel", "measured", "not possible here"), rows, numeric=" rr")
    for where, reason in skipped.items():
        typer.echo(f"skipped {where}: {reason}")
    left = result.total - result.done
    typer.echo(
        f"{left} of {result.total} sizes are left; shoal probe gpu continues"
        if left
        else "complete: every size is measured"
    )
