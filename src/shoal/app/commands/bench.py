"""``shoal bench``: predict, then run for real, and show both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.ir import ServeJob, ServePlan, ServeReport

__all__ = ["app", "show_serve_plan", "show_serve_report"]

app = typer.Typer(help="Predict a workload, run it for real, show both.", no_args_is_help=True)

_DEFAULT_MODEL = "shoal-4m"


@app.callback()
def _group() -> None:
    """Predict a workload, run it for real, show both."""


@app.command("serve")
def serve(
    config: Annotated[
        Path | None, typer.Argument(help="A serving job in YAML; without one, the defaults.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="A Hugging Face directory, or a model of the zoo.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="chat, code, summary, multiturn, shared_prefix, azure ...")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="The file of azure or mooncake; alone, your own trace as JSON lines."),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests to send.", min=1)] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second; the workload's own times without.")
    ] = None,
    machine: Annotated[str, typer.Option("--machine", "-m", help="What to plan for.")] = "local",
    set_: Annotated[list[str] | None, typer.Option("--set", help="path=value of the job.")] = None,
    profile: Annotated[
        float, typer.Option(help="Seconds to spend on measuring steps before.", min=0)
    ] = 5.0,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Measure on a busy machine too.")
    ] = False,
    score: Annotated[
        bool, typer.Option("--score/--no-score", help="Keep the report in the score.")
    ] = True,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
) -> None:
    """Serve a workload in real time, predicted before by the simulator.

    The engine is profiled for some seconds; the simulator predicts with the same scheduler;
    then every request is sent at its time, and the answer's tokens are counted.

    **Examples**

        shoal bench serve --requests 60 --rate 20

        shoal bench serve --model runs/run/export --workload code

        shoal bench serve --trace trace.jsonl --set max_running=16 -o json
    """
    from shoal.app.show import WorkBar, as_json
    from shoal.cost.score import Score
    from shoal.machine.described import load
    from shoal.serve.bench import bench_serve, weights_of
    from shoal.serve.spinning import spin_briefly

    spin_briefly()
    job = _job(config, model, workload, trace, set_ or [])
    target = load(machine)
    weights, where = weights_of(job)
    text = output is Format.text
    if text and not quiet:
        typer.echo(f"serving {where}")
    with WorkBar("bench", quiet=quiet) as bar:
        report = bench_serve(
            job,
            requests=requests,
            rate=rate,
            machine=target,
            model=weights,
            profile_s=profile,
            wait_s=None if anyway else 60.0,
            progress=lambda what, done, total: bar(done, total, what),
            told=show_serve_plan if text and not quiet else None,
        )
    if score:
        Score().append(report)
    if text:
        show_serve_report(report)
    else:
        as_json(report.model_dump(mode="json"))


def _job(
    config: Path | None,
    model: str | None,
    workload: str | None,
    trace: Path | None,
    sets: list[str],
) -> ServeJob:
    from shoal.core.config import resolve
    from shoal.cost.workloads.choose import choose
    from shoal.ir import ServeJob

    chosen = choose(workload, None if trace is None else str(trace))
    flags: dict[str, object] = {
        "model": model if model is not None or config is not None else _DEFAULT_MODEL,
        "workload": chosen and chosen.model_dump(mode="json"),
    }
    return resolve(ServeJob, file=config, flags=flags, sets=sets).value


_ROWS: tuple[tuple[str, str, float, str], ...] = (
    ("tokens_per_s", "output tokens per second", 1, ""),
    ("requests_per_s", "requests per second", 1, ""),
    ("total_s", "time for all requests", 1, "s"),
    ("ttft_p50_s", "time to first token, median", 1e3, "ms"),
    ("ttft_p95_s", "  95 % of requests within", 1e3, "ms"),
    ("tpot_p50_s", "time per further token, median", 1e3, "ms"),
    ("tpot_p95_s", "  95 % of requests within", 1e3, "ms"),
    ("memory_bytes", "memory of the process", 1 / 2**20, "MiB"),
    ("step_s", "time of a step", 1e3, "ms"),
    ("prefix_hit_share", "prompt tokens found in the cache", 100, "%"),
    ("preemptions", "requests preempted", 1, ""),
)


def _number(value: float, unit: str) -> str:
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{shown} {unit}".strip()


def show_serve_plan(plan: ServePlan) -> None:
    """Print what is predicted, before it is measured."""
    told = plan.predicted["tokens_per_s"]
    typer.echo(
        f"predicted: {told.value:,.0f} output tokens/s ({told.low:,.0f} to {told.high:,.0f}). "
        f"{plan.why}"
    )
    for note in plan.notes:
        typer.echo(f"  {note}")


def show_serve_report(report: ServeReport) -> None:
    """Print prediction beside measurement."""
    from shoal.app.show import table

    predicted = {name: told.value for name, told in report.plan.predicted.items()}
    if report.plan.estimate is not None:
        predicted["memory_bytes"] = report.plan.estimate.memory_total
    rows = []
    for name, label, factor, unit in _ROWS:
        if name not in report.measured:
            continue
        before, error = predicted.get(name), report.errors.get(name)
        rows.append(
            (
                label,
                "" if before is None else _number(before * factor, unit),
                _number(report.measured[name] * factor, unit),
                "" if error is None else f"{100 * error:+.1f} %",
            )
        )
    table("", ("", "predicted", "measured", "error"), rows, numeric=" rrr")
