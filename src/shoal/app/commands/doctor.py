"""``shoal doctor``: is this machine ready, and what would make it so?"""

from __future__ import annotations

import typer

from shoal.app.show import Format, Output


def doctor(
    output: Output = Format.text,
) -> None:
    """Check what Shoal needs on this machine; exit 1 when something must be fixed.

    **Examples**

        shoal doctor

        shoal doctor -o json
    """
    from dataclasses import asdict

    from shoal.app.show import as_json, echo, table
    from shoal.machine.doctor import doctor as examine

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
