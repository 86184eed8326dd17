"""``shoal bench tune``: measure an engine's settings on this machine, and write the best ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Anyway, Format, Output, Quiet, Sets
from shoal.core.counts import duration

if TYPE_CHECKING:
    from shoal.plan.tune.protocols import TuningResult

# Engine -> what gives its knobs, and loads it with its workload.
ENGINES = {
    "shoal": "shoal.serve.bench.tune:shoal_engine",
    "transformers": "shoal.claims.bench.serving.generate:transformers_engine",
}


def tune(
    subject: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="A model directory, ORG/NAME of the hub, or one of the zoo; shoal-4m.",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The same, as a flag.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Your own requests, as JSON lines. [default: chat]")
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Use the first N requests.", min=1)] = None,
    budget: Annotated[str, typer.Option(help="Time budget, such as 90s or 5m.")] = "5m",
    goal: Annotated[str, typer.Option(help="throughput, latency or ttft.")] = "throughput",
    engine: Annotated[str, typer.Option(help="shoal, or transformers (its generate).")] = "shoal",
    knob: Annotated[
        list[str] | None,
        typer.Option("--knob", help="knob=value[,value...], such as max_running=4,8,16."),
    ] = None,
    tuner: Annotated[str, typer.Option(help="bayes, random, halving or exhaustive.")] = "bayes",
    trials: Annotated[int, typer.Option(help="Maximum number of configurations.", min=1)] = 64,
    width: Annotated[
        float, typer.Option(help="Repeat until the relative error of the mean is below this.")
    ] = 0.05,
    limit: Annotated[str, typer.Option(help="Time limit of one measurement.")] = "60s",
    warm: Annotated[
        Path | None,
        typer.Option(help="A study of another machine, whose best configurations are tried first."),
    ] = None,
    set_: Sets = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the job with the best settings, as YAML.")
    ] = None,
    study: Annotated[Path | None, typer.Option(help="Write all trials, as YAML.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Write a plot of all trials, as HTML.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the search.")] = 0,
    anyway: Anyway = False,
    output: Output = Format.text,
    quiet: Quiet = False,
) -> None:
    """Tune the settings of a serving engine by really serving a workload with them.

    Every trial is measured until its mean is known well enough. What runs out of memory or time
    is a failed trial, from which the search learns.

    **Examples**

        shoal bench tune MODEL --trace trace.jsonl --budget 5m --out best.yaml

        shoal bench tune --knob max_running=4,8,16 --knob threads=1,2 --picture tune.html

        shoal bench tune MODEL --engine transformers --knob batch=1,4,16

        shoal bench tune MODEL --warm study-of-the-old-machine.yaml --study here.yaml
    """
    import contextlib
    import time

    from shoal.app.show import WorkBar, as_json, wait_until_quiet
    from shoal.core.config import resolve
    from shoal.core.errors import require
    from shoal.core.files import write_atomic
    from shoal.core.hub import fetched
    from shoal.core.parts import load_object
    from shoal.cost.workloads.choose import choose
    from shoal.ir import ServeJob
    from shoal.plan.tune import TUNERS
    from shoal.plan.tune.landscape import summary
    from shoal.plan.tune.landscape_page import page
    from shoal.plan.tune.protocols import TuningResult
    from shoal.plan.tune.repeats import Repeats
    from shoal.plan.tune.serving import (
        GOALS,
        UNITS,
        ServingObjective,
        job_of,
        knob_of,
        tune_serving,
    )

    seconds, limit_s = duration(budget, "--budget"), duration(limit, "--limit")
    require(goal in GOALS, "--goal", goal, expected=f"one of {', '.join(GOALS)}")
    require(
        engine == "shoal" or out is None,
        "--out",
        str(out),
        expected="the engine shoal, whose settings a job can contain",
        hint="keep the trials with --study",
    )
    elsewhere = TuningResult.load(warm).trials if warm is not None else ()
    model = subject or model or "shoal-4m"
    chosen = choose(None, None if trace is None else str(trace))
    flags = {"model": model, "workload": chosen and chosen.model_dump(mode="json")}
    job = fetched(resolve(ServeJob, flags=flags, sets=set_ or []).value)
    require(engine in ENGINES, "--engine", engine, expected=f"one of {', '.join(ENGINES)}")
    space, load = load_object(ENGINES[engine])(job, dict(knob_of(word) for word in knob or []))
    options = {"starts": min(16, max(4, space.size // 10))} if tuner == "bayes" else {}
    searcher = TUNERS.build({"name": tuner, **options}, where="--tuner")
    repeats = Repeats(width=width)
    runner, workload = load(requests)
    wait_until_quiet(anyway=anyway, quiet=quiet)
    objective = ServingObjective(
        runner=runner,
        workload=workload,
        goal=goal,  # type: ignore[arg-type]
        repeats=repeats,
        limit_s=limit_s,
        until=time.monotonic() + seconds,
    )
    with contextlib.closing(runner), WorkBar("tuning", quiet=quiet) as bar:
        result = tune_serving(
            searcher,
            space,
            objective,
            trials,
            name=tuner,
            seed=seed,
            elsewhere=elsewhere,
            progress=bar,
        )
    if study is not None:
        result.save(study, header="Trials of `shoal bench tune`.")
        typer.echo(f"saved {study}", err=True)
    if out is not None:
        best = job_of(job, result.best.config)
        best.save(out, header="The best settings of `shoal bench tune`.")
        typer.echo(f"saved {out}", err=True)
    if picture is not None:
        write_atomic(
            picture, page(result, title=f"{model} with {engine}: {goal}", unit=UNITS[goal])
        )
        typer.echo(f"saved {picture}", err=True)
    if output is Format.json:
        as_json({"goal": goal, "engine": engine, **summary(result)})
    else:
        _show(result, UNITS[goal])


def _show(study: TuningResult, unit: str) -> None:
    """Print tables."""
    from shoal.app.show import echo, table
    from shoal.plan.tune.landscape_page import tables

    best = study.best
    for one in tables(study, unit):
        if one.rows:
            table(one.title, one.columns, one.rows[:8])
    failed = len(study.trials) - len(study.feasible)
    spelt = ", ".join(f"{name}={value}" for name, value in best.config.items())
    echo(
        f"{len(study.trials)} of {study.space.size} configurations tried, {failed} failed; "
        f"the best reaches {best.value:.4g} {unit}: {spelt}"
    )
