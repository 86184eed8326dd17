"""``shoal probe gemm``: sweep matrix products and learn to predict them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from shoal.machine.probes.gemm_table import GemmTable


def sweep(
    budget: float, out: Path | None, watts: float, *, importance: bool, json: bool, quiet: bool
) -> None:
    """Sweep for ``budget`` seconds, fit the predictor and say how well it does.

    Args:
        budget: seconds of the sweep.
        out: the table; the machine's own if None. The predictor lies beside it.
        watts: draw of this host under load, 0 if unknown.
        importance: say which features matter.
        json: print JSON.
        quiet: no progress.
    """
    from shoal.app.show import WorkBar, as_json, table
    from shoal.cost.gemm.predictor import fit, predictor_path
    from shoal.cost.gemm.validate import importance as permuted
    from shoal.machine.probes.gemm import Gemm
    from shoal.machine.probes.gemm_table import table_path
    from shoal.machine.protocols import ProbeContext

    path = out or table_path()
    probe = Gemm(budget_s=budget, path=str(path), watts=watts)
    with WorkBar("sweeping", quiet=quiet) as bar, ProbeContext() as context:
        points = probe.sweep(context, progress=bar)
        skipped = dict(context.skipped)
    typer.echo(f"saved {path}", err=json)
    predictor = fit(points)
    place = predictor_path() if out is None else out.with_suffix(".safetensors")
    predictor.save(place)
    typer.echo(f"saved {place}", err=json)
    ranked = permuted(points) if importance else {}
    if json:
        as_json(
            {
                "points": predictor.points,
                "errors": predictor.errors,
                "rates": _rates(points),
                "importance": ranked,
                "skipped": skipped,
            }
        )
        return
    rows = [
        (name, f"{best / 1e12:.3g} TFLOP/s", number)
        for name, (best, number) in _rates(points).items()
    ]
    table("products", ("kernel", "best", "measured"), rows, numeric=" rr")
    for where, reason in skipped.items():
        typer.echo(f"skipped {where}: {reason}")
    typer.echo(
        f"held-out shapes: median error {100 * predictor.errors['median_error']:.1f} %; "
        f"{100 * predictor.errors['coverage']:.0f} % inside the 90 % interval"
    )
    if ranked:
        rises = [(name, f"{rise:.3f}") for name, rise in list(ranked.items())[:10]]
        table("feature importance: rise of the error in log seconds", ("", ""), rises, numeric=" r")


def _rates(table: GemmTable) -> dict[str, tuple[float, int]]:
    """Kernel and type -> (best FLOP/s, products measured)."""
    result: dict[str, tuple[float, int]] = {}
    for point in table.points:
        name = f"own, tile {point.tile}" if point.tile else f"torch {point.dtype}"
        best, number = result.get(name, (0.0, 0))
        result[name] = (max(best, point.flops / point.seconds), number + 1)
    return dict(sorted(result.items()))
