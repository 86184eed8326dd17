"""``shoal train`` of a job with ``job: drafter``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import typer

from shoal.app.show import Format, as_json, table

if TYPE_CHECKING:
    from shoal.ir import DrafterJob, DrafterPlan, DrafterReport

__all__ = ["drafter_job", "is_drafter_job", "show_drafter_plan", "train_drafter"]


def is_drafter_job(config: Path | None) -> TypeGuard[Path]:
    """Whether a file is the job of a drafter."""
    from shoal.core.files import read_yaml

    if config is None or not config.is_file():
        return False
    raw = read_yaml(config)
    return isinstance(raw, dict) and raw.get("job") == "drafter"


def drafter_job(config: Path, flags: dict[str, object], sets: list[str]) -> DrafterJob:
    """The job in a file, with what flags say.

    Raises:
        ConfigError: names what is wrong.
    """
    from shoal.core.config import resolve
    from shoal.ir import DrafterJob

    return resolve(DrafterJob, file=config, flags=flags, sets=sets).value


def train_drafter(
    job: DrafterJob,
    directory: Path | None,
    machine: str,
    *,
    resume: bool,
    dry_run: bool,
    quiet: bool,
) -> None:
    """Plan it, run it, report prediction beside measurement."""
    from shoal.app.show import WorkBar
    from shoal.machine.described import load
    from shoal.plan.drafting import plan_drafter

    plan = plan_drafter(job, load(machine))
    if dry_run:
        show_drafter_plan(plan)
        return
    from shoal.train.drafters.execute import execute

    directory = directory or Path("runs") / job.name
    with WorkBar("drafter", quiet=quiet) as bar:

        def watch(event: dict[str, Any]) -> None:
            if event["kind"] == "prepare":
                bar(*event["state"])
            elif event["kind"] == "step":
                rate = f"loss {event['loss']:.3f}  {event['tokens_per_s']:,.0f} tok/s"
                bar(event["step"] + 1, job.steps, rate)

        report = execute(plan, directory, resume=resume, watch=watch)
    _show_report(report, directory)


def show_drafter_plan(plan: DrafterPlan, output: Format = Format.text) -> None:
    """Print what training a drafter is predicted to cost."""
    if output is Format.json:
        as_json(plan.model_dump(mode="json", exclude_none=True))
        return
    cost = plan.estimate
    assert cost is not None
    assert cost.total_s is not None
    total = cost.total_s
    table(
        f"{plan.job.drafter.name} for {plan.shape.name} on {plan.machine.name}",
        ("", "predicted"),
        [
            ("parameters", f"{plan.parameters:,}"),
            ("the drafter's file", f"{plan.drafter_bytes / 2**20:,.2f} MiB"),
            ("step time", f"{cost.step_s.value * 1e3:,.1f} ms, bound by {cost.bound}"),
            ("steps", f"{plan.job.steps:,}"),
            ("whole run", f"{total.value:,.0f} s ({total.low:,.0f} to {total.high:,.0f})"),
            ("memory", f"{cost.memory_total / 2**20:,.0f} MiB"),
            ("features on disk", f"{cost.memory_bytes['features'] / 2**20:,.0f} MiB"),
            ("fits", "yes" if plan.fits else "no"),
        ],
        numeric=" r",
    )
    typer.echo(plan.why)


def _show_report(report: DrafterReport, directory: Path) -> None:
    from shoal.cost.score import predictions

    told = predictions(report.plan)
    units = (
        ("step_s", "step time", 1e3, "ms"),
        ("tokens_per_s", "tokens per second", 1.0, ""),
        ("features_s", "time for the target's features", 1.0, "s"),
        ("total_s", "time for them and all steps", 1.0, "s"),
        ("memory_bytes", "memory", 2.0**-20, "MiB"),
        ("drafter_bytes", "the drafter's file", 2.0**-20, "MiB"),
        ("loss", "training loss, last step", 1.0, ""),
    )
    table(
        "prediction beside measurement",
        ("", "predicted", "measured", "error"),
        [
            (
                label,
                f"{told[key][0] * factor:,.4g} {unit}".strip() if key in told else "",
                f"{report.measured[key] * factor:,.4g} {unit}".strip(),
                f"{100 * report.errors[key]:+.1f} %" if key in report.errors else "",
            )
            for key, label, factor, unit in units
            if key in report.measured
        ],
        numeric=" rrr",
    )
    table(
        "how often a guess is right, of the target's own greedy text",
        ("level", "first", "among 2", "among 3", "among 5", "among 10"),
        [
            (str(level), *(f"{100 * sum(shares[:n]):.1f} %" for n in (1, 2, 3, 5, 10)))
            for level, shares in enumerate(report.calibration)
        ],
        numeric="rrrrrr",
    )
    typer.echo(f"drafter: {directory / 'drafter'}")
    if (directory / "target").is_dir():
        typer.echo(f"target:  {directory / 'target'} (changed with it; serve this one)")
