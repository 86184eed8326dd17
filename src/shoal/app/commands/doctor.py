"""``shoal doctor``: is this machine ready, and what would make it so?"""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.app.show import Format, Output


def doctor(
    build: Annotated[
        bool,
        typer.Option(
            "--build", help="Compile all kernels for this processor now, not when first used."
        ),
    ] = False,
    output: Output = Format.text,
) -> None:
    """Check what Shoal needs on this machine; exit 1 when something must be fixed.

    **Examples**

        shoal doctor

        shoal doctor -o json

        shoal doctor --build                       # half a minute, once for a kind of processor
    """
    from dataclasses import asdict

    from shoal.app.show import as_json, echo, table
    from shoal.core.native import cpu_model
    from shoal.machine.doctor import doctor as examine

    if build:
        from shoal.api.probing import build_kernels
        from shoal.app.show import WorkBar

        with WorkBar("compiling", quiet=output is Format.json) as bar:
            built = build_kernels(bar)
        echo(f"{built} libraries are compiled for {cpu_model()}", stderr=output is Format.json)
    checks = examine()
    if output is Format.json:
        as_json([asdict(check) for check in checks])
    else:
        signs = {"ok": "ok", "warn": "warn", "fail": "FAIL"}
        rows = [(c.name, signs[c.status], c.detail) for c in checks]
        table("", ("check", "status", "result"), rows)
        for check in checks:
            if check.fix:
                echo(f"{check.name}: {check.fix}")
    if any(check.status == "fail" for check in checks):
        raise typer.Exit(1)
