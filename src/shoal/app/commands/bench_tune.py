"""``shoal bench tune``: measure an engine's settings on this machine, and write the best ones."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Anyway, Format, Output, Quiet, Sets, check_endings
from shoal.core.counts import duration


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
    from shoal import api
    from shoal.app.show import WorkBar, as_json, show_blocks, wait_until_quiet
    from shoal.core.errors import require
    from shoal.core.files import write_atomic
    from shoal.plan.tune.serving import knob_of

    check_endings("--picture", [picture], ".html")
    seconds, limit_s = duration(budget, "--budget"), duration(limit, "--limit")
    require(
        engine == "shoal" or out is None,
        "--out",
        str(out),
        expected="the engine shoal, whose settings a job can contain",
        hint="keep the trials with --study",
    )
    with WorkBar("tuning", quiet=quiet) as bar:
        tuned = api.bench_tune(
            subject or model or "shoal-4m",
            trace=trace,
            requests=requests,
            budget_s=seconds,
            goal=goal,
            engine=engine,
            knobs=dict(knob_of(word) for word in knob or []),
            tuner=tuner,
            trials=trials,
            width=width,
            limit_s=limit_s,
            warm=warm,
            sets=set_ or [],
            seed=seed,
            progress=bar,
            on_ready=functools.partial(wait_until_quiet, anyway=anyway, quiet=quiet, bar=bar),
        )
    if study is not None:
        tuned.result.save(study, header="Trials of `shoal bench tune`.")
        typer.echo(f"saved {study}", err=True)
    if out is not None:
        tuned.best_job().save(out, header="The best settings of `shoal bench tune`.")
        typer.echo(f"saved {out}", err=True)
    if picture is not None:
        write_atomic(picture, tuned.page())
        typer.echo(f"saved {picture}", err=True)
    if output is Format.json:
        as_json(tuned.as_json())
    else:
        show_blocks(tuned.tables())
