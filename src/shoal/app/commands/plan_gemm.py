"""``shoal plan gemm``: how long does a matrix product take, and on which tile?"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.cost.gemm import GemmPrediction
    from shoal.ir import Interval

__all__ = ["gemm"]


def gemm(
    m: Annotated[int, typer.Argument(metavar="M", help="Rows of the result.")],
    n: Annotated[int, typer.Argument(metavar="N", help="Columns of the result.")],
    k: Annotated[int, typer.Argument(metavar="K", help="Inner size.")],
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or int8.")] = "fp32",
    layout: Annotated[
        str, typer.Option(help="nn, nt, tn or tt: A and B stored as they are or transposed.")
    ] = "nt",
    threads: Annotated[int | None, typer.Option(help="Threads; all cores by default.")] = None,
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="local, H100, or a file.")
    ] = "local",
    tiles: Annotated[
        bool, typer.Option("--tiles", help="Rank the tiles of Shoal's own kernel (fp32).")
    ] = False,
    objective: Annotated[str, typer.Option(help="Of --tiles: time or energy.")] = "time",
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a predictor that was swept elsewhere.")
    ] = False,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Predict time, rate and energy of one product, from the sweep of `shoal probe gemm`.

    A machine that nobody swept answers by the rates that it was described with.

    **Examples**

        shoal plan gemm 4096 4096 4096 --dtype bf16

        shoal plan gemm 1000 1000 1000 --tiles

        shoal plan gemm 8192 8192 8192 --dtype bf16 --machine H100
    """
    from shoal.app.show import as_json, table
    from shoal.core.errors import ConfigError, require
    from shoal.cost.gemm import GemmPredictor, by_rates, predictor_path
    from shoal.machine import host
    from shoal.machine.probes.gemm_table import GemmShape

    require(objective in ("time", "energy"), "--objective", objective, expected="time or energy")
    for name, size in (("M", m), ("N", n), ("K", k)):
        require(size > 0, name, size, expected="a size above 0")
    path = predictor_path()
    told: list[GemmPrediction]
    if machine == "local":
        require(
            path.exists(),
            "machine",
            machine,
            expected=f"a predictor at {path}",
            hint="run: shoal probe gemm",
            error=ConfigError,
        )
        predictor = GemmPredictor.load(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is told as a note
            if tiles:
                told = predictor.best_tile(
                    m, n, k, objective="energy" if objective == "energy" else "time", strict=strict
                )
            else:
                shape = {"dtype": dtype, "layout": layout, "threads": threads or len(host.cpus())}
                told = predictor.predict([GemmShape(M=m, N=n, K=k, **shape)], strict=strict)
        error = predictor.errors.get("median_error")
        said = f"learnt from {predictor.points} products"
        if error is not None:
            said += f"; shapes it had not seen are off by {100 * error:.0f} % in the median"
    else:
        from shoal.machine.described import load

        require(
            not tiles,
            "--tiles",
            machine,
            expected="the machine local, whose kernel was swept",
            hint="leave --machine out",
        )
        found = load(machine)
        shape = {"dtype": dtype, "layout": layout, "threads": threads or 1}
        told = [by_rates(GemmShape(M=m, N=n, K=k, **shape), found)]
        said = f"by the rates that {machine} is described with; nobody swept it"
    if output is Format.json:
        as_json([one.model_dump(mode="json", exclude_none=True) for one in told])
        return
    rows = [
        (
            one.shape.tile or "torch" if machine == "local" else "",
            _span(one.seconds, 1e6, "us"),
            _span(one.tflops, 1.0, ""),
            f"{1e6 * one.roofline_s:,.3g} us",
            _span(one.watts, 1.0, "W") if one.watts else "unknown",
            _span(one.joules, 1e3, "mJ") if one.joules else "unknown",
        )
        for one in told
    ]
    columns = ("tile", "time", "TFLOP/s", "roofline", "draw", "energy")
    table(f"[{m}, {k}] x [{k}, {n}] {told[0].shape.dtype}", columns, rows, numeric=" rrrrr")
    typer.echo(said)
    powers = {one.power for one in told}
    if "modelled" in powers:
        typer.echo("draw and energy are modelled from the declared draw, not measured")
    for note in dict.fromkeys(one.note for one in told if one.note):
        typer.echo(f"note: {note}")


def _span(interval: Interval, scale: float, unit: str) -> str:
    """Value and 90 % interval."""
    low, value, high = (f"{scale * x:,.3g}" for x in (interval.low, interval.value, interval.high))
    return f"{value} {unit}".rstrip() + f" ({low} .. {high})"
