"""``shoal score --calibrate``, and plans that use what it stored."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.show import Format

NoCalibration = Annotated[
    bool, typer.Option("--no-calibration", help="Ignore the corrections of `score --calibrate`.")
]


def show_calibration(name: str | None, *, forget: bool, output: Format) -> None:
    """Fit and store corrections, or remove them, and print what they are."""
    from shoal.app.show import as_json, show_blocks
    from shoal.cost import calibration
    from shoal.machine.described import load

    machine = None if name is None else load(name)
    if forget:
        had = calibration.forget(machine)
        typer.echo("forgotten" if had else "no calibration is stored")
        return
    made = calibration.calibrate(machine)
    if output is Format.json:
        as_json(made.model_dump(mode="json"))
        return
    show_blocks(made.tables())
    typer.echo(f"saved {calibration.calibration_path()}; plans use it unless --no-calibration")
