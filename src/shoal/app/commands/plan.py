"""``shoal plan``: what will it cost, and what should I do?"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.ir import Plan, ServePlan

__all__ = ["app", "show_plans", "show_serve_plan"]

app = typer.Typer(help="Say what a job will cost and what to do.", no_args_is_help=True)


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
    planner: Annotated[str, typer.Option(help="search or rules.")] = "search",
    set_: Annotated[list[str] | None, typer.Option("--set", help="path=value of the job.")] = None,
    top: Annotated[int, typer.Option(help="Plans to show.")] = 5,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Show estimates corrected by past errors here.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Save the best plan, its estimate as it was priced.")
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Rank the ways to train a model on a machine; nothing runs and no torch is needed.

    **Examples**

        shoal plan train shoal-4m --tokens 2M

        shoal plan train Qwen3-14B --machine 16xH100 --tokens 20B

        shoal plan train Llama-3-70B -m 8xA100@IB200 --set optimizer=muon --out plan.yaml
    """
    from shoal.app.show import as_json
    from shoal.core.config import resolve
    from shoal.core.errors import PlanError
    from shoal.ir import TrainJob
    from shoal.machine.described import load
    from shoal.plan.strategy import PLANNERS

    file = Path(model) if model.endswith((".yaml", ".yml")) else None
    flags: dict[str, object] = {
        "model": None if file else model,
        "tokens": _count(tokens) if tokens else None,
        "seq_len": seq_len,
        "global_batch": global_batch,
        "precision": precision,
    }
    target = load(machine)
    if file is None and target.device.kind == "gpu":
        # What people train on such machines, unless they say otherwise.
        flags["seq_len"] = seq_len or 4096
        flags["global_batch"] = global_batch or max(128, target.num_devices)
    job = resolve(TrainJob, file=file, flags=flags, sets=set_ or []).value
    plans = PLANNERS.build(planner, where="--planner").plan(job, target)
    if not plans:
        raise PlanError(f"{model} on {machine}: no legal plan")
    if out is not None:
        plans[0].save(out, header="The best plan; run it with `shoal train --plan`.")
        typer.echo(f"saved {out}", err=True)
    plans = plans[:top]
    if calibrate:
        plans = [_calibrated(plan) for plan in plans]
    if output is Format.json:
        as_json([plan.model_dump(mode="json", exclude_none=True) for plan in plans])
    else:
        show_plans(plans)


def _calibrated(plan: Plan) -> Plan:
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


class Written(StrEnum):
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
    scheduler: Annotated[str | None, typer.Option(help="fcfs or static.")] = None,
    kv: Annotated[str | None, typer.Option("--kv", help="paged or contiguous.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32 or bf16.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="path=value of the job.")] = None,
    compare: Annotated[
        bool, typer.Option(help="Rank the other schedulers and caches beside it.")
    ] = True,
    out: Annotated[Path | None, typer.Option(help="Save the plan.")] = None,
    output: Annotated[
        Written, typer.Option("--output", "-o", help="text, json or yaml.")
    ] = Written.text,
) -> None:
    """Say how fast a model will answer on a machine; nothing runs and no torch is needed.

    The workload is simulated with the scheduler and the cache bookkeeping that would serve it.

    **Examples**

        shoal plan serve shoal-4m --machine laptop

        shoal plan serve Qwen3-8B --machine H100 --workload chat --rate 20

        shoal plan serve Llama-3.1-8B -m RTX-4090 --workload shared_prefix --set max_position=8192

        shoal plan serve Qwen3-0.6B -m laptop --workload mooncake --set workload.scale=16
    """
    from shoal.app.show import as_json
    from shoal.core.config import resolve
    from shoal.core.files import to_yaml
    from shoal.cost.workloads.choose import choose
    from shoal.ir import ServeJob
    from shoal.machine.described import load
    from shoal.plan.serving import alternatives, plan_serve

    file = Path(model) if model.endswith((".yaml", ".yml")) else None
    target = load(machine)
    chosen = choose(workload, trace)
    flags: dict[str, object] = {
        "model": None if file else model,
        "workload": chosen and chosen.model_dump(mode="json"),
        "scheduler": scheduler,
        "kv": kv,
        "precision": precision,
    }
    if file is None and target.device.kind == "gpu":
        # A GPU needs more tokens in a step than a CPU to be busy.
        flags.update({"max_step_tokens": 8192, "max_running": 256})
    resolved = resolve(ServeJob, file=file, flags=flags, sets=set_ or [])
    if rate is not None:
        resolved = resolved.replace({"workload.rate": rate}, "--rate")
    if requests is not None:
        resolved = resolved.replace({"workload.requests": requests}, "--requests")
    job = resolved.value
    asked = plan_serve(job, target)
    if out is not None:
        asked.save(out, header="Planned by `shoal plan serve`.")
        typer.echo(f"saved {out}", err=True)
    if output is Written.json:
        as_json(asked.model_dump(mode="json", exclude_none=True))
    elif output is Written.yaml:
        typer.echo(to_yaml(asked.model_dump(mode="json", exclude_none=True)), nl=False)
    else:
        others = alternatives(job) if compare and asked.fits else []
        show_serve_plan(asked, [plan_serve(other, target) for other in others])


def show_serve_plan(plan: ServePlan, others: Sequence[ServePlan] = ()) -> None:
    """Print a serving plan among its competitors, what it costs and what binds it."""
    from shoal.app.show import human_bytes, table
    from shoal.plan.serving_table import COLUMNS, explain, rank

    ranked = rank([plan, *others])
    rows = explain(ranked)
    title = "plans, best first" if others else "plan"
    table(title, COLUMNS, [[row[column] for column in COLUMNS] for row in rows], numeric="  rrrrr")
    if plan.estimate is not None:
        step = plan.estimate
        total = step.step_s.value
        shares = [
            (cause, f"{1e3 * seconds:,.3g} ms", f"{100 * seconds / total:.0f} %")
            for cause, seconds in sorted(step.terms_s.items(), key=lambda item: -item[1])
            if seconds > 0
        ]
        spelled = f"{plan.job.scheduler} {plan.job.kv}"
        many = f"{step.tokens:.0f} request{'s' if step.tokens > 1 else ''}"
        title = f"where the time of a decode step of {many} goes, {spelled}"
        if plan.fits:
            table(title, ("", "", ""), shares, numeric=" rr")
        memory = [(cause, human_bytes(size)) for cause, size in step.memory_bytes.items()]
        table("memory", ("", ""), memory, numeric=" r")
    typer.echo(plan.why)
    for note in plan.notes:
        typer.echo(f"note: {note}")


@app.command("scaling")
def scaling(
    curve: Annotated[Path, typer.Argument(help="CSV with columns size,value[,spread,trials].")],
    target: Annotated[
        float | None, typer.Option(help="An error: how much data does it take?")
    ] = None,
    law: Annotated[
        str | None, typer.Option(help="power, power_floor or three_regime; the best of them.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw curve and fit as SVG.")] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Fit a learning curve, and say how much data a target error needs.

    **Examples**

        shoal plan scaling curve.csv

        shoal plan scaling curve.csv --target 1.9 --picture curve.svg
    """
    from shoal.app.show import as_json, table
    from shoal.core.files import write_atomic
    from shoal.cost.scaling.ask import data_needed, fit_best
    from shoal.cost.scaling.fit import fit
    from shoal.cost.scaling.picture import picture as draw
    from shoal.cost.scaling.read import read_curve

    points = read_curve(curve)
    fitted = fit_best(points) if law is None else fit(law, points)
    needed = None if target is None else data_needed(fitted, target)
    if picture is not None:
        write_atomic(picture, draw({curve.stem: (points, fitted)}))
        typer.echo(f"drew {picture}", err=output is Format.json)
    if output is Format.json:
        shown = fitted.model_dump(mode="json", exclude={"samples"})
        as_json({"fit": shown, "data_needed": needed and needed.model_dump(mode="json")})
        return
    table(
        f"law {fitted.law}, R2 {fitted.r2:.4f}",
        ("parameter", "value", "low", "high"),
        [
            (name, *(f"{number:.4g}" for number in (i.value, i.low, i.high)))
            for name, i in fitted.parameters.items()
        ],
        numeric=" rrr",
    )
    if target is not None and needed is None:
        typer.echo(f"an error of {target:g} is below the floor of this law: no data is enough")
    elif needed is not None:
        typer.echo(
            f"an error of {target:g} needs {needed.value:.4g} examples "
            f"({needed.low:.4g} to {needed.high:.4g})"
        )


@app.command("schedule")
def schedule(
    name: Annotated[
        str,
        typer.Argument(
            help="gpipe, 1f1b, interleaved, zb_h1, zbv, vhalf, skippipe, or a CSV file of torch's."
        ),
    ],
    pp: Annotated[int, typer.Option("--pp", help="Ranks of the pipeline.")] = 4,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 8,
    vpp: Annotated[
        int | None, typer.Option("--vpp", help="Stages of a rank; what the schedule needs, or 2.")
    ] = None,
    forward: Annotated[
        float, typer.Option(help="Time of one micro-batch's forward through a rank's layers.")
    ] = 1.0,
    backward: Annotated[
        float, typer.Option(help="Time of its backward; half of it is for the weights.")
    ] = 2.0,
    send: Annotated[float, typer.Option(help="Time of a boundary from rank to rank.")] = 0.0,
    output_layer: Annotated[
        float, typer.Option(help="Time of a forward through the whole output layer.")
    ] = 0.0,
    vocab_barriers: Annotated[
        int,
        typer.Option(help="Split the vocabulary over all ranks, with 1 or 2 meetings; 0 does not."),
    ] = 0,
    unit: Annotated[str, typer.Option(help="Unit of the times: s, ms, us or none.")] = "none",
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw it as SVG.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Draw it as one web page.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write it for torch.distributed.pipelining.")
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Show a pipeline's schedule: who does what when, what is idle and what is held.

    It is simulated with equal stages; the runtime executes the very same passes.

    **Examples**

        shoal plan schedule 1f1b --pp 4 --microbatches 8

        shoal plan schedule interleaved --vpp 2 --send 0.05 --svg schedule.svg

        shoal plan schedule vhalf --vocab-barriers 1 --output-layer 2 --html schedule.html

        shoal plan schedule zbv --csv zbv.csv --perfetto zbv.json

        shoal plan schedule zbv.csv --send 0.1
    """
    from shoal.app.schedule import Times, built, show, summary, write

    times = Times(
        forward=forward, backward=backward, send=send, output_layer=output_layer, unit=unit
    )
    made = built(name, pp, microbatches, vpp, vocab_barriers)
    timeline = times.simulate(made)
    for line in write(
        made, timeline, times, files={"svg": svg, "html": html, "perfetto": perfetto, "csv": csv}
    ):
        typer.echo(line, err=True)
    if output is Format.json:
        from shoal.app.show import as_json

        as_json(summary(made, timeline))
    else:
        show(made, timeline, times)


@app.command("t3")
def t3(
    hidden: Annotated[int, typer.Option("--hidden", help="Hidden size of the model.")] = 4256,
    tp: Annotated[int, typer.Option("--tp", help="Devices of a layer.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a pass.")] = 8192,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="path=value of the device, such as link_bandwidth=1.5e11."),
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Simulate products whose stores trigger their reduce-scatter (T3), layer by layer.

    A row-split layer's output is summed over the tensor-parallel devices. With trackers, triggered
    DMAs and additions near memory that travels while the product is computed.

    **Examples**

        shoal plan t3 --hidden 4256 --tp 8

        shoal plan t3 --hidden 12288 --tp 16 --tokens 4096 --set link_bandwidth=1.5e11

        shoal plan t3 --set update_cost=2 --set policy=round_robin -o json
    """
    from shoal.app.show import as_json, table
    from shoal.core.config import resolve
    from shoal.cost.t3 import Device, compare, sublayers

    device = resolve(Device, environment={}, sets=set_ or []).value
    found = [compare(layer, device) for layer in sublayers("", hidden, tokens, tp)]
    if output is Format.json:
        as_json(
            [
                {**c.model_dump(mode="json"), "speedup": c.speedup, "movement": c.movement}
                for c in found
            ]
        )
        return
    columns = ("sublayer", "product", "reduce-scatter", "all-gather", "sequential", "T3", "ideal")
    rows = [
        (
            c.sublayer.name,
            *(
                f"{1e6 * seconds:,.0f} us"
                for seconds in (
                    c.product_s,
                    c.reduce_scatter_s,
                    c.all_gather_s,
                    c.sequential_s,
                    c.t3_s,
                    c.ideal_s,
                )
            ),
            f"{c.speedup:.2f}x",
            f"{100 * c.movement:+.0f} %",
        )
        for c in found
    ]
    title = f"hidden {hidden}, tp {tp}, {tokens} tokens"
    table(title, (*columns, "faster", "bytes moved"), rows, numeric=" rrrrrrrr")


@app.command("routes")
def routes(
    network: Annotated[Path, typer.Argument(help="Nodes and their links, in YAML.")],
    stages: Annotated[int, typer.Option(help="Stages of the model.", min=1)] = 4,
    keep: Annotated[
        int | None, typer.Option(help="Stages that a micro-batch visits; all, if not given.", min=1)
    ] = None,
    microbatches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 8,
    swap: Annotated[
        bool, typer.Option("--swap", help="Neighbouring stages may be visited in reverse order.")
    ] = False,
    sizes: Annotated[
        str | None, typer.Option(help="Nodes of each stage, such as 5,3,3; by load, if not given.")
    ] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(help="Micro-batches that a node holds; the number of stages.", min=0),
    ] = None,
    forward: Annotated[float, typer.Option(help="Seconds of a stage's forward pass.")] = 0.3,
    backward: Annotated[float, typer.Option(help="Seconds of its backward pass.")] = 0.6,
    head: Annotated[float, typer.Option(help="Seconds of the output layer's forward.")] = 0.1,
    boundary_bytes: Annotated[
        float, typer.Option(help="Bytes of a micro-batch's activations between stages.")
    ] = 8e6,
    sync_bytes: Annotated[float, typer.Option(help="Bytes of a stage's gradients.")] = 1e8,
    effort: Annotated[
        int, typer.Option(help="Nodes of the search tree, and attempts to improve.", min=0)
    ] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the searches.", min=0)] = 0,
    svg: Annotated[Path | None, typer.Option("--svg", help="Draw the timeline as SVG.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Draw it as one web page.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write a trace for ui.perfetto.dev.")
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Choose which nodes of a slow network each micro-batch visits, and when.

    Nodes are arranged into stages, and routes planned that skip stages, avoid slow links and do
    not collide; the schedule `skippipe` runs them.

    **Examples**

        shoal plan routes net.yaml --stages 6 --microbatches 20

        shoal plan routes net.yaml --stages 6 --keep 4 --microbatches 20 --swap --svg routes.svg

        shoal plan routes net.yaml --stages 3 --sizes 2,1,1 --in-flight 2 -o json
    """
    from shoal.app.routes import planned, show, sizes_of, summary, write

    found = planned(
        network,
        {
            "stages": stages,
            "keep": keep,
            "swap": swap,
            "microbatches": microbatches,
            "forward_s": forward,
            "backward_s": backward,
            "head_s": head,
            "boundary_bytes": boundary_bytes,
            "sync_bytes": sync_bytes,
            "in_flight": in_flight,
            "sizes": sizes_of(sizes),
            "effort": effort,
            "seed": seed,
        },
    )
    for line in write(found, {"svg": svg, "html": html, "perfetto": perfetto}):
        typer.echo(line, err=True)
    if output is Format.json:
        from shoal.app.show import as_json

        as_json(summary(found))
    else:
        show(found)


@app.command("context")
def context(
    heads: Annotated[int, typer.Option("--heads", help="Query heads of one rank.")] = 32,
    kv_heads: Annotated[
        int | None, typer.Option("--kv-heads", help="Key/value heads; as many, if not given.")
    ] = None,
    head_dim: Annotated[int, typer.Option("--head-dim", help="Width of a head.")] = 128,
    tokens: Annotated[str, typer.Option(help="Tokens of a sequence, such as 32768.")] = "32768",
    cp: Annotated[int, typer.Option("--cp", help="Ranks that share a sequence.")] = 4,
    links: Annotated[
        str, typer.Option(help="switch; mesh, a link between every two ranks; or ring.")
    ] = "switch",
    duplex: Annotated[str, typer.Option(help="full, or half: one direction at a time.")] = "full",
    bandwidth: Annotated[float, typer.Option(help="Byte/s of a link in one direction.")] = 25e9,
    latency: Annotated[float, typer.Option(help="Seconds of a small message.")] = 1e-5,
    precision: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    causal: Annotated[bool, typer.Option(help="A query sees what came before it; or all.")] = True,
    tflops: Annotated[
        float,
        typer.Option(help="TFLOP/s of a rank's attention, which hides messages; 0: hides none."),
    ] = 0.0,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Rank the ways for ranks to share one long sequence, and say why.

    Bytes on the busiest link, seconds on the wire, seconds that computation does not hide, and
    what a rank holds besides its own share, of one layer.

    **Examples**

        shoal plan context --heads 32 --kv-heads 8 --links mesh

        shoal plan context --heads 32 --links ring --cp 8 --tokens 131072 --tflops 400

        shoal plan context --kv-heads 4 --duplex half --bandwidth 6e9 -o json
    """
    from shoal.app.context import Question, advice, show, summary, warnings

    asked = Question(
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        tokens=_count(tokens),
        cp=cp,
        links=links,
        duplex=duplex,
        bandwidth=bandwidth,
        latency=latency,
        precision=precision,
        causal=causal,
        tflops=tflops,
    )
    rows = advice(asked)
    for line in warnings(asked):
        typer.echo(f"warning: {line}", err=True)
    if output is Format.json:
        from shoal.app.show import as_json

        as_json(summary(asked, rows))
    else:
        show(asked, rows)


def show_plans(plans: Sequence[Plan]) -> None:
    """Print ranked plans, why the first wins, and what it costs."""
    from shoal.app.show import human_bytes, table
    from shoal.plan.table import COLUMNS, explain

    columns = [column for column in COLUMNS if column != "why"]
    rows = [[row[column] for column in columns] for row in explain(plans)]
    table("plans, best first", columns, rows, numeric=" " + "r" * (len(columns) - 2))
    best = plans[0]
    if best.estimate is not None:
        total = best.estimate.step_s.value
        shares = [
            (cause, f"{1e3 * seconds:,.3g} ms", f"{100 * seconds / total:.0f} %")
            for cause, seconds in sorted(best.estimate.terms_s.items(), key=lambda item: -item[1])
            if seconds > 0
        ]
        table("where a step's time goes, in the best plan", ("", "", ""), shares, numeric=" rr")
        memory = [
            (cause, human_bytes(size))
            for cause, size in best.estimate.memory_bytes.items()
            if size > 0
        ]
        table("memory of a rank", ("", ""), memory, numeric=" r")
    if best.why:
        typer.echo(best.why)
    for note in best.notes:
        typer.echo(f"note: {note}")


def _count(text: str) -> int:
    from shoal.core.errors import ConfigError

    factors = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    number, factor = text.strip().upper(), 1.0
    if number[-1:] in factors:
        factor = factors[number[-1]]
        number = number[:-1]
    try:
        count = int(float(number) * factor)
    except (ValueError, OverflowError):
        count = 0
    if count < 1:
        raise ConfigError(f"--tokens = {text!r}: expected a number such as 300M or 20B")
    return count
