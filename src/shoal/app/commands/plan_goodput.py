"""``shoal plan serve --slo``: which use of devices serves most requests under targets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from shoal.ir import Machine, ServeJob


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
    from shoal.app.show import WorkBar, as_json, show_blocks
    from shoal.core.errors import require
    from shoal.core.files import to_yaml, write_atomic
    from shoal.core.measure import num_cores
    from shoal.cost.shapes import resolve
    from shoal.ir import ServePlan
    from shoal.plan.serving.disagg import plan_goodput
    from shoal.plan.serving.goodput import FEWEST_REQUESTS, targets_of
    from shoal.plan.serving.goodput_report import GoodputReport, drifted
    from shoal.plan.serving.inputs import arrivals_of

    targets = targets_of(slo)
    if since is not None:
        before = GoodputReport.load(since)
        change = drifted(before, arrivals_of(job, resolve(job.model), count=requests))
        if not change:
            typer.echo(f"the workload is that of {since}; its plan remains valid")
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
            processes=num_cores(),
        )
    if out is not None:
        report.save(out, header="Written by `shoal plan serve --slo`.")
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
            expected=f"a best setting of one device or of two phases; this one is "
            f"{report.best.setting}",
            hint="start its instances by hand, with that tensor parallelism",
        )
        plan = ServePlan(job=report.job, machine=machine, shape=resolve(job.model), why=report.why)
        write_emitted([plan], emit, emit_dir)
    if output == "json":
        as_json(report.model_dump(mode="json", exclude_none=True))
    elif output == "yaml":
        typer.echo(to_yaml(report.model_dump(mode="json", exclude_none=True)), nl=False)
    else:
        show_blocks(report.tables())
