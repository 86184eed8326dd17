"""``shoal plan``: what will it cost, and what should I do?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.commands.jobs import PlanKinds, same_kind
from shoal.app.commands.plan_fit import show_fit, show_ways
from shoal.app.emitting import write_emitted
from shoal.app.show import Format, Output, Sets
from shoal.core.counts import count

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from shoal.core.config import ResolvedValue
    from shoal.ir import ServePlan, TrainPlan
    from shoal.plan.what_if import WhatIfResult

__all__ = ["app", "show_plans", "show_serve_plan"]

app = typer.Typer(
    cls=PlanKinds, help="Say what a job will cost and what to do.", no_args_is_help=True
)


class Objective(StrEnum):
    """What the best plan is best at."""

    time = "time"
    cost = "cost"
    energy = "energy"


@app.command("train")
def train(
    model: Annotated[str, typer.Argument(help="A model's name, directory, or a job in YAML.")],
    machine: Annotated[
        str, typer.Option("--machine", "-m", help="local, 16xH100, 8xA100@IB200, or a file.")
    ] = "local",
    tokens: Annotated[
        str | None, typer.Option(help="Training tokens, such as 300M or 20B.")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a sequence.")] = None,
    global_batch: Annotated[int | None, typer.Option(help="Sequences of a step.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16.")] = None,
    objective: Annotated[
        Objective | None, typer.Option(help="What the best plan saves: time, cost or energy.")
    ] = None,
    planner: Annotated[str, typer.Option(help="search, rules, megatron or galvatron.")] = "search",
    finetune: Annotated[
        str | None, typer.Option(help="Fine-tune by this method; auto takes the best that fits.")
    ] = None,
    offload: Annotated[
        str | None,
        typer.Option(
            help="Search ways beyond the device's memory too: auto, or names such as "
            "none,zero_infinity,ssdtrain."
        ),
    ] = None,
    set_: Sets = None,
    top: Annotated[int, typer.Option(help="Plans to show.")] = 5,
    fit: Annotated[
        bool, typer.Option("--fit", help="Only say whether it fits, and what would help.")
    ] = False,
    what_if: Annotated[
        bool, typer.Option("--what-if", help="Say what more devices, links or memory would do.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Write a page: ranking, time, memory, timeline.")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Show estimates corrected by past errors here.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Save the best plan, its estimate as it was priced.")
    ] = None,
    emit: Annotated[
        str | None,
        typer.Option(help="Write launch files for torchtitan, megatron, deepspeed or accelerate."),
    ] = None,
    emit_dir: Annotated[
        Path | None, typer.Option(help="Where to; launch-ENGINE if not given.")
    ] = None,
    output: Output = Format.text,
) -> None:
    """Rank the ways to train a model on a machine; nothing runs and no torch is needed.

    **Examples**

        shoal plan train shoal-4m --tokens 2M

        shoal plan train Qwen3-14B --machine 16xH100 --tokens 20B

        shoal plan train Llama-3-70B -m 8xA100@IB200 --set optimizer=muon --out plan.yaml

        shoal plan train Llama-3-70B -m 64xH100 --objective cost --what-if --picture plan.html

        shoal plan train Llama-3-70B -m 8xRTX-4090 --fit

        shoal plan train Llama-3-8B -m 16xH100 --tokens 20B --emit torchtitan

        shoal plan train Llama-3-8B -m 1xH100 --tokens 20M --finetune auto

        shoal plan train Llama-3-8B -m 1xRTX-4090 --tokens 20M --offload auto --out plan.yaml
    """
    from shoal.app.show import as_json, show_taken
    from shoal.core.config import resolve
    from shoal.core.files import write_atomic
    from shoal.cost.shapes import resolve as shape_of
    from shoal.ir import TrainJob
    from shoal.machine.described import load
    from shoal.plan.strategy import PLANNERS
    from shoal.plan.strategy.options import split_options

    file = Path(model) if model.endswith((".yaml", ".yml")) else None
    same_kind("train", file, "plan")
    flags: dict[str, object] = {
        "model": None if file else model,
        "tokens": count(tokens) if tokens else None,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "precision": precision,
        "objective": objective and objective.value,
        "finetune": None if finetune == "auto" else finetune,
    }
    target = load(machine)
    options, sets = split_options(set_ or [])
    if offload is not None:
        options["offload"] = offload
    usual: dict[str, int] = {}
    if file is None and target.device.kind == "gpu":
        usual = {
            "seq_len": min(4096, shape_of(model).max_position),
            "global_batch": max(128, target.num_devices),
        }
    resolved = resolve(TrainJob, usual=usual, file=file, flags=flags, sets=sets)
    job = resolved.value
    if finetune == "auto":
        from shoal.plan.peft import advise

        best = advise(job, target)[0]
        job = job.model_copy(update={"finetune": best.method})
        typer.echo(f"finetune: {best.method} ({best.reason})", err=True)
    plans = PLANNERS.build({"name": planner, **options}, where="--planner").plan(job, target)
    if out is not None:
        plans[0].save(out, header="The best plan; run it with `shoal train --plan`.")
        typer.echo(f"saved {out}", err=True)
    if emit is not None:
        write_emitted(plans, emit, emit_dir)
    if fit:
        show_fit(plans[0])
        show_ways(job, target)
        raise typer.Exit(0 if plans[0].fits else 1)
    answers: list[WhatIfResult] = []
    if what_if:
        from shoal.plan.what_if import what_if as ask

        answers = ask(job, plans[0], planner=planner)
    plans = plans[:top]
    if calibrate:
        plans = [_calibrated(plan) for plan in plans]
    if picture is not None:
        from shoal.plan.picture import page

        write_atomic(picture, page(plans, answers, title=f"{job.model} on {target.name}"))
        typer.echo(f"saved {picture}", err=True)
    if output is Format.json:
        as_json([plan.model_dump(mode="json", exclude_none=True) for plan in plans])
    else:
        best = plans[0]
        chosen = [
            ("recompute", best.job.recompute, "of the first plan"),
            ("engine", "shoal", "default; --emit prices the launch files as their engine runs"),
        ]
        show_taken([*_taken(resolved, _TRAINED), *chosen])
        show_plans(plans)
        show_answers(answers)


# What an estimate rests on and a user may not have said.
_TRAINED = ("seq_len", "global_batch", "tokens", "steps", "precision", "optimizer")
_SERVED = (
    "workload.name",
    "workload.rate",
    "weights",
    "kv_format",
    "max_running",
    "max_step_tokens",
    "engine",
)


def _taken(resolved: ResolvedValue[Any], names: Sequence[str]) -> list[tuple[str, str, str]]:
    """(name, value, why) of these leaves that have a value."""
    rows = [(path, value, why) for path, value, why in resolved.lines() if path in names]
    return [row for row in rows if row[1] != "none"]


def _calibrated(plan: TrainPlan) -> TrainPlan:
    """The plan with its estimate corrected by what similar runs on its machine took.

    It is for reading only: a saved plan keeps the estimate as it was priced, or the
    score would judge its own corrections.
    """
    from shoal.cost.score import Score
    from shoal.cost.score import calibrate as correct

    assert plan.estimate is not None
    rows = Score().rows(quantity="step_s")
    estimate, note = correct(plan.estimate, rows, job=plan.job, machine=plan.machine)
    note = note or "not calibrated: fewer than three similar runs on this machine are in the score"
    return plan.model_copy(update={"estimate": estimate, "notes": (*plan.notes, note)})


class PlanFormat(StrEnum):
    """Formats of a plan that can be saved."""

    text = "text"
    json = "json"
    yaml = "yaml"


@app.command("serve")
def serve(
    model: Annotated[
        str, typer.Argument(help="A model's name, directory, or a serving job in YAML.")
    ],
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
        typer.Option(help="Requests per second; without, all at once or as in the trace."),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests to simulate.")] = None,
    scheduler: Annotated[str | None, typer.Option(help="fcfs, prefill_first or static.")] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="Targets, such as ttft=0.25,tpot=0.03: search for the most requests."),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(help="With --slo: so many devices; all of the machine.")
    ] = None,
    since: Annotated[
        Path | None,
        typer.Option(help="With --slo: plan anew only if the workload left that of this report."),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="With --slo: draw the share that meets the targets.")
    ] = None,
    kv: Annotated[str | None, typer.Option("--kv", help="paged or contiguous.")] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="Directory of a drafter or draft model that may guess; again for more."),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32 or bf16.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="On GPUs, price it as shoal, vllm, sglang or trtllm runs it."),
    ] = None,
    set_: Sets = None,
    compare: Annotated[
        bool, typer.Option(help="Rank the other parts that could serve it beside it.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Save the plan.")] = None,
    emit: Annotated[
        str | None,
        typer.Option(help="Write launch files for vllm, sglang or llamacpp."),
    ] = None,
    emit_dir: Annotated[
        Path | None, typer.Option(help="Where to; launch-ENGINE if not given.")
    ] = None,
    output: Annotated[
        PlanFormat, typer.Option("--output", "-o", help="text, json or yaml.")
    ] = PlanFormat.text,
) -> None:
    """Say how fast a model will answer on a machine; nothing runs and no torch is needed.

    The workload is simulated with the scheduler and the cache bookkeeping that would serve it.

    **Examples**

        shoal plan serve shoal-4m --machine laptop

        shoal plan serve Qwen3-8B --machine H100 --workload chat --rate 20 --emit vllm

        shoal plan serve Qwen3-32B --machine 2xH200 --set parallel.tp=2 --engine sglang

        shoal plan serve Llama-3.1-8B -m RTX-4090 --workload shared_prefix --set max_position=8192

        shoal plan serve Qwen3-0.6B -m laptop --workload mooncake --set workload.scale=16

        shoal plan serve Qwen3-8B -m H100 --workload code --rate 4 --drafter runs/heads/drafter

        shoal plan serve Qwen3-8B -m 4xH100 --workload code --slo ttft=0.25,tpot=0.03
    """
    from shoal.app.show import as_json, show_taken
    from shoal.core.config import resolve
    from shoal.core.errors import require
    from shoal.core.files import to_yaml
    from shoal.cost.kernels.serving_engines import ENGINES
    from shoal.cost.workloads.choose import choose
    from shoal.ir import ServeJob
    from shoal.machine.described import load
    from shoal.plan.serving.plans import competing, plan_serve

    file = Path(model) if model.endswith((".yaml", ".yml")) else None
    target = load(machine)
    chosen = choose(workload, trace)
    flags: dict[str, object] = {
        "model": None if file else model,
        "workload": chosen and chosen.model_dump(mode="json"),
        "scheduler": scheduler,
        "kv": kv,
        "precision": precision,
        # Who gets the files runs them.
        "engine": engine or (emit if emit in ENGINES else None),
    }
    usual: dict[str, int] = {}
    if file is None and target.device.kind == "gpu":
        # A GPU needs more tokens in a step than a CPU to be busy.
        usual = {"max_step_tokens": 8192, "max_running": 256}
    resolved = resolve(ServeJob, usual=usual, file=file, flags=flags, sets=set_ or [])
    if rate is not None:
        resolved = resolved.replace({"workload.rate": rate}, "--rate")
    if requests is not None:
        resolved = resolved.replace({"workload.requests": requests}, "--requests")
    job = resolved.value
    if slo is not None:
        from shoal.app.commands.plan_goodput import goodput

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
    request = plan_serve(job, target)
    if out is not None:
        request.save(out, header="Planned by `shoal plan serve`.")
        typer.echo(f"saved {out}", err=True)
    if emit is not None:
        write_emitted([request], emit, emit_dir)
    if output is PlanFormat.json:
        as_json(request.model_dump(mode="json", exclude_none=True))
    elif output is PlanFormat.yaml:
        typer.echo(to_yaml(request.model_dump(mode="json", exclude_none=True)), nl=False)
    else:
        show_taken([*_taken(resolved, _SERVED), ("numbers", request.job.precision, "of the plan")])
        show_serve_plan(request, competing(job, request, drafters=drafter or ()) if compare else ())


def show_serve_plan(plan: ServePlan, ranked: Sequence[ServePlan] = ()) -> None:
    """Print a serving plan among its competitors, what it costs and what binds it."""
    from shoal.app.show import show_estimate, table
    from shoal.plan.serving.table import COLUMNS, explain

    rows = explain(ranked or [plan])
    title = "plans, best first" if len(ranked) > 1 else "plan"
    table(title, COLUMNS, [[row[column] for column in COLUMNS] for row in rows], numeric="  rrrrr")
    if plan.estimate is not None:
        spelled = f"{plan.job.scheduler} {plan.job.kv}"
        many = f"{plan.estimate.tokens:.0f} request{'s' if plan.estimate.tokens > 1 else ''}"
        title = f"where the time of a decode step of {many} goes, {spelled}"
        terms = plan.estimate.terms_s if plan.fits else {}
        shown = plan.estimate.model_copy(update={"terms_s": terms})
        show_estimate(shown, title=title, memory_title="memory")
    typer.echo(plan.why)
    for note in plan.notes:
        typer.echo(f"note: {note}")


def show_answers(answers: Sequence[WhatIfResult]) -> None:
    """Print what other machines would do."""
    from shoal.app.show import table

    if not answers:
        return
    rows = [
        (
            answer.question,
            f"{answer.step:.2f}x" if answer.step else "-",
            f"{answer.price:.2f}x" if answer.price else "-",
            answer.plan,
        )
        for answer in answers
    ]
    table("what if", ("with", "step", "price", "best plan there"), rows, numeric=" rr ")


def show_plans(plans: Sequence[TrainPlan]) -> None:
    """Print ranked plans, why the first wins, and what it costs."""
    from shoal.app.show import show_estimate, table
    from shoal.plan.table import COLUMNS, explain

    columns = [column for column in COLUMNS if column != "why"]
    rows = [[row[column] for column in columns] for row in explain(plans)]
    table("plans, best first", columns, rows, numeric=" " + "r" * (len(columns) - 2))
    best = plans[0]
    show_estimate(best.estimate, title="where a step's time goes, in the best plan")
    if best.why:
        typer.echo(best.why)
    for note in best.notes:
        typer.echo(f"note: {note}")


# The order of the help.
