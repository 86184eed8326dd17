"""``shoal plan serve --slo``: which use of devices serves most requests under targets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from shoal.ir import Machine, ServeJob
    from shoal.plan.serving.goodput import Slo
    from shoal.plan.serving.goodput_report import GoodputReport

__all__ = ["goodput"]


def goodput(
    job: ServeJob,
    machine: Machine,
    slo: str,
    *,
    devices: int | None,
    rate: float | None,
    requests: int | None,
    since: Path | None,
    picture: Path | None,
    out: Path | None,
    emit: str | None,
    emit_dir: Path | None,
    output: str,
) -> None:
    """Search, print what was found, and write what was asked for."""
    from shoal.app.emitting import write_emitted
    from shoal.app.show import WorkBar, as_json
    from shoal.core.errors import require
    from shoal.core.files import to_yaml, write_atomic
    from shoal.cost.shapes import resolve
    from shoal.ir import ServePlan
    from shoal.plan.serving.disagg import plan_goodput
    from shoal.plan.serving.goodput import FEWEST_REQUESTS
    from shoal.plan.serving.goodput_report import GoodputReport, drifted
    from shoal.plan.serving.inputs import arrivals_of

    targets = targets_of(slo)
    if since is not None:
        before = GoodputReport.load(since)
        change = drifted(before, arrivals_of(job, resolve(job.model), count=requests))
        if not change:
            typer.echo(f"the workload is that of {since}: its plan stands")
            return
        typer.echo(f"the workload has changed: {change}", err=True)
    with WorkBar("settings", quiet=output != "text") as bar:
        report = plan_goodput(
            job,
            machine,
            targets,
            devices=devices,
            requests=FEWEST_REQUESTS if requests is None else requests,
            wanted=rate,
            progress=bar,
        )
    if out is not None:
        report.save(out, header="Found by `shoal plan serve --slo`.")
        typer.echo(f"saved {out}", err=True)
    if picture is not None:
        write_atomic(picture, report.picture())
        typer.echo(f"saved {picture}", err=True)
    if emit is not None:
        both = report.best.setting.both
        require(
            both is None or both.tp == 1,
            "--emit",
            emit,
            expected=f"a best setting of one device or of two phases, and it is "
            f"{report.best.setting}",
            hint="start its instances with that tensor parallelism by hand",
        )
        plan = ServePlan(job=report.job, machine=machine, shape=resolve(job.model), why=report.why)
        write_emitted([plan], emit, emit_dir)
    if output == "json":
        as_json(report.model_dump(mode="json", exclude_none=True))
    elif output == "yaml":
        typer.echo(to_yaml(report.model_dump(mode="json", exclude_none=True)), nl=False)
    else:
        _show(report)


def targets_of(text: str) -> Slo:
    """The targets of the flag.

    Raises:
        ConfigError: one is missing, unknown or no number above 0.
    """
    from shoal.core.config import parse
    from shoal.core.errors import ConfigError
    from shoal.plan.serving.goodput import Slo

    values: dict[str, float] = {}
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(
                f"--slo {text}: {word!r}: expected name=number, such as ttft=0.25,tpot=0.03"
            ) from None
    return parse(Slo, values, where="--slo")


def _show(report: GoodputReport) -> None:
    from shoal.app.show import table

    rows = [
        (str(one.setting), f"{one.goodput:.3g}", f"{one.per_device:.3g}", one.setting.devices)
        for one in report.tried
    ]
    slo = report.slo
    table(
        f"settings of {report.devices} devices, best first: {slo.share:.0%} of the requests within "
        f"ttft {slo.ttft:g} s and tpot {slo.tpot:g} s",
        ("setting", "requests/s", "a device", "devices used"),
        rows,
        numeric=" rrr",
    )
    for one in report.tried:
        if one.curve:
            points = [(f"{rate:.3g}", f"{share:.0%}") for rate, share in one.curve]
            table(
                f"within both targets: {one.setting}", ("a device", "share"), points, numeric="rr"
            )
    typer.echo(report.why)
    for note in report.notes:
        typer.echo(f"note: {note}")
