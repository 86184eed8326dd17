"""``shoal plan``: what will it cost, and what should I do?"""

from __future__ import annotations

import functools
import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.app.commands.calibrating import NoCalibration
from shoal.app.commands.jobs import PlanKinds
from shoal.app.emitting import write_emitted
from shoal.app.show import (
    Brief,
    Format,
    Output,
    Sets,
    Verbose,
    check_endings,
    show_blocks,
    show_notes,
)

if TYPE_CHECKING:
    from shoal.ir import TrainPlan
    from shoal.plan.what_if import WhatIfResult

app = typer.Typer(
    cls=PlanKinds,
    help="Predict the cost of a job and rank its plans.\n\n**Examples**\n\n"
    "    shoal plan train Qwen3-14B -m 16xH100 --tokens 20B\n\n"
    "    shoal plan serve Qwen3-8B -m H100 --workload chat --rate 20",
    no_args_is_help=True,
)


# The model, as people say it first or as a flag.
Subject = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="A model's name, directory, or a job in YAML."),
]
Model = Annotated[str | None, typer.Option(help="The same, as a flag; or over that of the YAML.")]


class Objective(StrEnum):
    """What the best plan is best at."""

    time = "time"
    cost = "cost"
    energy = "energy"


@app.command("train")
def train(
    subject: Subject = None,
    model: Model = None,
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="local, 16xH100, 8xA100@IB200, or a file.")
    ] = "local",
    tokens: Annotated[
        str | None, typer.Option(help="Training tokens, such as 300M or 20B.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Text or chats, of what --emit and --out write.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences of a step.")] = None,
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate, for --emit and --out.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run, for --emit and --out.")] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="fp32 or bf16; fp8 or mxfp8 for bf16 with matrix products in that format."
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Engine to price plans for, on accelerators: shoal, megatron, nemo, torchtitan, "
            "deepspeed or accelerate. --emit implies it."
        ),
    ] = None,
    objective: Annotated[
        Objective | None, typer.Option(help="What to minimize: time, cost or energy.")
    ] = None,
    planner: Annotated[str, typer.Option(help="search, rules, megatron or galvatron.")] = "search",
    finetune: Annotated[
        str | None, typer.Option(help="Fine-tuning method; auto takes the best one that fits.")
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            help="Also search offloading: auto, or names such as none,zero_infinity,ssdtrain."
        ),
    ] = None,
    set_: Sets = None,
    top: Annotated[int, typer.Option(help="Plans to show.", min=1)] = 5,
    fit: Annotated[
        bool,
        typer.Option("--fit", help="Only check whether the job fits, and show what would help."),
    ] = False,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if", help="Also price the job with more devices, bandwidth or memory."
        ),
    ] = False,
    picture: Annotated[
        Path | None,
        typer.Option(help="Write an HTML page with ranking, time, memory and timeline."),
    ] = None,
    no_calibration: NoCalibration = False,
    calibrate: Annotated[bool, typer.Option("--calibrate", hidden=True)] = False,
    out: Annotated[Path | None, typer.Option(help="Save the best plan with its estimate.")] = None,
    emit: Annotated[
        str | None,
        typer.Option(help="Write launch files for torchtitan, megatron, deepspeed or accelerate."),
    ] = None,
    emit_dir: Annotated[
        Path | None, typer.Option(help="Directory for --emit. [default: launch-ENGINE]")
    ] = None,
    verbose: Verbose = False,
    quiet: Brief = False,
    output: Output = Format.text,
) -> None:
    """Rank plans to train a model on a machine. Nothing runs, and no torch is needed.

    **Examples**

        shoal plan train shoal-4m --tokens 2M

        shoal plan train Qwen3-14B --machine 16xH100 --tokens 20B

        shoal plan train Llama-3-70B -m 8xA100@IB200 --set optimizer=muon --out plan.yaml

        shoal plan train Llama-3-70B -m 64xH100 --objective cost --what-if --picture plan.html

        shoal plan train Llama-3-70B -m 8xRTX-4090 --fit

        shoal plan train Llama-3-8B -m 16xH100 --tokens 20B --emit torchtitan

        shoal plan train DeepSeek-V3 -m 2048xH800 --engine megatron --precision fp8

        shoal plan train Llama-3-8B -m 1xH100 --tokens 20M --finetune auto

        shoal plan train Llama-3-8B -m 1xRTX-4090 --tokens 20M --offload auto --out plan.yaml
    """
    from shoal import api
    from shoal.app.show import as_json
    from shoal.core.errors import require
    from shoal.core.files import write_atomic
    from shoal.cost.gpu.engines import ENGINES
    from shoal.plan.strategy.options import split_options
    from shoal.plan.what_if import answer_tables

    check_endings("--picture", [picture], ".html")
    if engine in ENGINES and emit in ENGINES:
        require(
            ENGINES[engine].launched_as == emit,
            "--emit",
            emit,
            expected=f"{ENGINES[engine].launched_as or 'nothing'} with --engine {engine}, for "
            "which the plans are searched and priced",
        )
    require(
        not calibrate,
        "--calibrate",
        calibrate,
        expected="`shoal score --calibrate` once; later plans for that machine and engine are "
        "then corrected, unless --no-calibration is given",
    )
    options, sets = split_options(set_ or [])
    if offload is not None:
        options["offload"] = offload
    plans = api.plan(
        subject,
        machine,
        kind="train",
        sets=sets,
        environment=os.environ,
        calibration=not no_calibration,
        model=model,
        data=data,
        tokens=tokens,
        seq_len=seq_len,
        global_batch=global_batch,
        name=name,
        **{"optimizer.lr": lr},
        precision=precision,
        engine=engine or (emit if emit in ENGINES else None),
        objective=objective and objective.value,
        finetune=finetune,
        planner=planner,
        planner_options=options,
    )
    best: TrainPlan = plans.best
    if not quiet:
        show_notes(plans.notes)
    if out is not None:
        plans.save(out)
        typer.echo(f"saved {out}", err=True)
    if emit is not None:
        write_emitted(plans, emit, emit_dir)
    if fit:
        from shoal.plan.fit import fit_tables, way_tables

        show_blocks(fit_tables(best))
        show_blocks(way_tables(plans.job, plans.machine))
        raise typer.Exit(0 if best.fits else 1)
    answers: list[WhatIfResult] = []
    if what_if:
        from shoal.plan.what_if import what_if as ask

        answers = ask(plans.job, best, planner=planner)
    if picture is not None:
        from shoal.plan.picture import page

        title = f"{plans.job.model} on {plans.machine.name}"
        write_atomic(picture, page(plans[:top], answers, title=title))
        typer.echo(f"saved {picture}", err=True)
    if output is Format.json:
        as_json([plan.model_dump(mode="json", exclude_none=True) for plan in plans[:top]])
    else:
        show_blocks(plans.tables(top=top, verbose=verbose, brief=quiet))
        show_blocks(answer_tables(answers))
    raise typer.Exit(0 if best.fits else 1)


class PlanFormat(StrEnum):
    """Formats of a plan that can be saved."""

    text = "text"
    json = "json"
    yaml = "yaml"


@app.command("serve")
def serve(
    subject: Subject = None,
    model: Model = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the run, of what --emit and --out write.")
    ] = None,
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="local, H100, RTX-4090, or a file.")
    ] = "local",
    workload: Annotated[
        str | None,
        typer.Option(
            help="chat, code, summary, multiturn, shared_prefix, azure, mooncake or trace."
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(help="The file of azure or mooncake; alone, your own trace as JSON lines."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests per second; by default all at once, or as in the trace."),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests to simulate.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="fcfs, prefill_first or static.")] = None,
    slo: Annotated[
        str | None,
        typer.Option(
            help="Latency targets in s, such as ttft=0.25,tpot=0.03; search for the "
            "highest goodput."
        ),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="With --slo: number of devices. [default: all]")
    ] = None,
    since: Annotated[
        Path | None,
        typer.Option(
            help="With --slo: a report; plan again only if the workload has changed since."
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(help="With --slo: plot the share of requests that meet the targets."),
    ] = None,
    kv: Annotated[str | None, typer.Option("--kv", help="paged or contiguous.")] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="Directory of a drafter or draft model for speculative decoding; repeatable."
        ),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32 or bf16.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="Engine to price plans for: shoal, vllm, sglang, trtllm or llamacpp."),
    ] = None,
    set_: Sets = None,
    no_calibration: NoCalibration = False,
    compare: Annotated[
        bool, typer.Option(help="Also rank alternatives to the job's parts.")
    ] = True,
    top: Annotated[int, typer.Option(help="Plans to show.", min=1)] = 5,
    out: Annotated[Path | None, typer.Option(help="Save the plan.")] = None,
    verbose: Verbose = False,
    emit: Annotated[
        str | None,
        typer.Option(help="Write launch files for vllm, sglang or llamacpp."),
    ] = None,
    emit_dir: Annotated[
        Path | None, typer.Option(help="Directory for --emit. [default: launch-ENGINE]")
    ] = None,
    quiet: Brief = False,
    output: Annotated[
        PlanFormat, typer.Option("--output", "-o", help="text, json or yaml.")
    ] = PlanFormat.text,
) -> None:
    """Predict throughput and latency of serving a model. Nothing runs, and no torch is needed.

    The workload is simulated with the scheduler and cache manager of the server.

    **Examples**

        shoal plan serve shoal-4m --machine laptop

        shoal plan serve Qwen3-8B --machine H100 --workload chat --rate 20 --emit vllm

        shoal plan serve Qwen3-32B --machine 2xH200 --set parallel.tp=2 --engine sglang

        shoal plan serve Llama-3.1-8B -m RTX-4090 --workload shared_prefix --set max_position=8192

        shoal plan serve Qwen3-0.6B -m laptop --workload mooncake --set workload.scale=16

        shoal plan serve Qwen3-8B -m H100 --workload code --rate 4 --drafter runs/heads/drafter

        shoal plan serve Qwen3-8B -m 4xH100 --workload code --slo ttft=0.25,tpot=0.03
    """
    from shoal import api
    from shoal.app.show import as_json
    from shoal.core.errors import require
    from shoal.core.files import to_yaml
    from shoal.cost.kernels.serving_engines import ENGINES
    from shoal.cost.workloads.choose import choose

    check_endings("--picture", [picture], ".svg")
    chosen = choose(workload, trace)
    values: dict[str, Any] = {
        "model": model,
        "name": name,
        "workload": chosen and chosen.model_dump(mode="json"),
        "workload.rate": rate,
        "workload.requests": requests,
        "scheduler": scheduler,
        "kv": kv,
        "precision": precision,
        # Who gets the files runs them.
        "engine": engine or (emit if emit in ENGINES else None),
    }
    if slo is not None:
        from shoal.api.jobs import machine_of, read_job
        from shoal.app.commands.plan_goodput import goodput
        from shoal.ir import kind_named

        target = machine_of(machine)
        job = read_job(subject, kind_named("serve"), target, values, sets=set_ or []).value
        goodput(
            job,
            target,
            slo,
            devices=devices,
            rate=rate,
            requests=requests,
            since=since,
            picture=picture,
            out=out,
            emit=emit,
            emit_dir=emit_dir,
            output=output.value,
        )
        return
    for flag, value in (("--devices", devices), ("--since", since), ("--picture", picture)):
        require(value is None, flag, value, expected="--slo beside it")
    ask = functools.partial(
        api.plan,
        subject,
        machine,
        kind="serve",
        sets=set_ or [],
        environment=os.environ,
        calibration=not no_calibration,
        **values,
    )
    # What is written is the job as it is; what is shown, that job among its competitors.
    written = out is not None or emit is not None or output is not PlanFormat.text
    asked = ask(compare=False) if written else None
    if asked is not None and out is not None:
        asked.save(out)
        typer.echo(f"saved {out}", err=True)
    if asked is not None and emit is not None:
        write_emitted(asked, emit, emit_dir)
    if asked is not None and output is not PlanFormat.text:
        shown = asked.best.model_dump(mode="json", exclude_none=True)
        if output is PlanFormat.json:
            as_json(shown)
        else:
            typer.echo(to_yaml(shown), nl=False)
        raise typer.Exit(0 if asked.best.fits else 1)
    plans = ask(drafters=tuple(drafter or ()), compare=compare)
    if not quiet:
        show_notes(plans.notes)
    show_blocks(plans.tables(top=top, verbose=verbose, brief=quiet))
    raise typer.Exit(0 if plans.best.fits else 1)
