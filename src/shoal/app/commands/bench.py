"""``shoal bench``: serving predicted and run for real; kernels and attention beside their peers."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Annotated

import typer

from shoal.app.commands.bench_activations import activations
from shoal.app.commands.bench_decode import decode
from shoal.app.commands.bench_predictions import predictions
from shoal.app.commands.bench_shown import (
    numbers_of,
    show_serve_plan,
    show_serve_report,
    show_served,
    write_files,
)
from shoal.app.commands.bench_tune import tune
from shoal.app.commands.jobs import StudyGroup
from shoal.app.show import Anyway, Format, Output, Quiet, Sets, check_endings

app = typer.Typer(
    cls=StudyGroup,
    help="Benchmark serving and kernels beside their predictions.\n\n**Examples**\n\n"
    "    shoal bench serve --requests 60 --rate 20\n\n"
    "    shoal bench kernels --op linear",
    no_args_is_help=True,
)

app.command("activations")(activations)
app.command("decode")(decode)
app.command("predictions")(predictions)
app.command("tune")(tune)


@app.command("serve")
def serve(
    config: Annotated[
        str | None,
        typer.Argument(help="A model, or a serving job in YAML. [default: the defaults of a job]"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A model directory, ORG/NAME of the hub, or a model of the zoo."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the run in the score.")] = None,
    workload: Annotated[
        str | None, typer.Option(help="chat, code, summary, multiturn, shared_prefix, azure ...")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Trace file of azure or mooncake; without --workload, your own trace as "
            "JSON lines."
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option(help="Requests to send.", min=1)] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second. [default: times of the workload]")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="An OpenAI-compatible server to measure; its key is OPENAI_API_KEY."),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(help="Latency targets in s for goodput, such as ttft=0.25,tpot=0.03."),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="With --url: use chat/completions, with text prompts.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="With --url: send prompts as text, not token ids.")
    ] = False,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="With --url: request the trace's output lengths (ignore_eos, which most engines "
            "support).",
        ),
    ] = True,
    vocab: Annotated[
        int, typer.Option(help="With --url: upper bound of token ids in prompts.", min=2)
    ] = 1000,
    request_timeout: Annotated[
        float, typer.Option(help="With --url: timeout of a request in seconds.")
    ] = 600.0,
    machine: Annotated[str, typer.Option("--machine", "-m", help="Machine to plan for.")] = "local",
    set_: Sets = None,
    profile: Annotated[
        float,
        typer.Option(
            help="Seconds for timing steps before the run, and at most for a rehearsal.", min=0
        ),
    ] = 5.0,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Measure on a busy machine too, and run a plan for GPUs on a CPU (not scored).",
        ),
    ] = False,
    score: Annotated[
        bool, typer.Option("--score/--no-score", help="Add the report to the score.")
    ] = True,
    output: Output = Format.text,
    peers: Annotated[
        bool, typer.Option("--peers", help="Compare with other engines, measured in turn.")
    ] = False,
    environments: Annotated[
        Path | None,
        typer.Option(help="With --peers: directory where scripts/peers installed them."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="With --peers: number of timed rounds.", min=1)] = 6,
    threads: Annotated[
        int, typer.Option(help="With --peers: threads per engine; 0 for all cores.", min=0)
    ] = 0,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="Write the report (.json) or a plot of the latencies (.svg); repeatable."
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Serve a workload in real time, predicted before by the simulator.

    The engine is profiled for some seconds, and serves the first requests with other tokens; the
    simulator predicts with the same scheduler; then every request is sent at its time, and the
    answer's tokens are counted. With --url the requests go to a server that runs elsewhere, and
    nothing is predicted.

    **Examples**

        shoal bench serve --requests 60 --rate 20

        shoal bench serve --model runs/run/export --workload code

        shoal bench serve --trace trace.jsonl --set max_running=16 -o json

        shoal bench serve --url http://127.0.0.1:8000 --workload azure --requests 200 --out r.svg

        shoal bench serve --peers --environments peers --out peers.json
    """
    from shoal import api
    from shoal.api.benching import slo_of, with_known_model
    from shoal.app.show import WorkBar, as_json, show_blocks, wait_until_quiet
    from shoal.core.extras import require_extra
    from shoal.serve.bench.latencies import draw

    files = out or []
    check_endings("--out", files, ".json", *(() if peers else (".svg",)))
    when_quiet = functools.partial(wait_until_quiet, anyway=anyway, quiet=quiet)
    shown = output is Format.text
    if peers:
        from shoal.claims.bench.serving.run import tables

        with WorkBar("bench serve --peers", quiet=quiet) as bar:
            compared = api.bench_peers(
                model,
                environments=environments,
                rounds=rounds,
                threads=threads,
                progress=lambda what, done, total: bar(done, total, what),
                on_ready=functools.partial(when_quiet, bar=bar),
            )
        show_blocks(tables(compared))
        write_files(files, compared.model_dump(mode="json"), str)
        return
    job = api.bench_job(
        config,
        workload=workload,
        trace=trace,
        sets=set_ or [],
        environment=os.environ,
        model=model,
        name=name,
    )
    slo_of(slo)  # refused before anything is loaded
    said = typer.echo if shown and not quiet else None
    if url is not None:
        with WorkBar("bench", quiet=quiet) as bar:
            replayed = api.bench_url(
                job,
                url,
                model=model or "",
                key=os.environ.get("OPENAI_API_KEY") or None,
                requests=requests,
                rate=rate,
                slo=slo,
                chat=chat,
                text=text,
                ignore_eos=ignore_eos,
                vocab=vocab,
                timeout_s=request_timeout,
                progress=lambda done, total, _: bar(done, total, "requests"),
                on_start=said,
            )
        fields = replayed.model_dump(mode="json")
        write_files(files, fields, lambda _: draw(replayed.samples, replayed.model))
        if shown:
            show_blocks(replayed.tables())
        else:
            as_json({name: value for name, value in fields.items() if name != "samples"})
        return
    require_extra("torch", purpose="shoal bench serve")
    job = with_known_model(job)
    when_quiet()
    with WorkBar("bench", quiet=quiet) as bar:
        report, samples = api.bench_serve(
            job,
            machine=machine,
            requests=requests,
            rate=rate,
            slo=slo,
            profile_s=profile,
            score=score,
            anyway=anyway,
            progress=lambda what, done, total: bar(done, total, what),
            on_start=show_served if said else None,
            on_plan=show_serve_plan if said else None,
        )
    fields = report.model_dump(mode="json")
    write_files(files, {**fields, "samples": samples}, lambda _: draw(samples, job.model))
    if shown:
        show_serve_report(report)
    else:
        as_json(fields)


@app.command("attention")
def attention(
    kernels: Annotated[str, typer.Option(help="all, none, or a comma-separated list.")] = "all",
    masks: Annotated[str, typer.Option(help="all, or a comma-separated list.")] = "all",
    cp: Annotated[
        str, typer.Option(help="Context-parallel methods: all, none, or a comma-separated list.")
    ] = "all",
    lengths: Annotated[
        str | None,
        typer.Option(help="Sequence lengths in tokens. [default: 1024,2048; 256 with --quick]"),
    ] = None,
    cp_lengths: Annotated[
        str | None,
        typer.Option(
            help="Sequence length for context parallelism. [default: the shortest length]"
        ),
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of context-parallel ranks.")] = "2,4,8",
    batch: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.", min=1)] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head.", min=1)] = 32,
    dtype: Annotated[str, typer.Option(help="fp64, fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    backward: Annotated[
        bool, typer.Option("--backward/--no-backward", help="Gradients too.")
    ] = True,
    repeats: Annotated[int, typer.Option(help="Timed rounds.", min=1)] = 5,
    block: Annotated[int, typer.Option(help="Block size of sparse masks.", min=1)] = 64,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0 for its default.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of masks, inputs and order.", min=0)] = 0,
    links: Annotated[str, typer.Option(help="Links between ranks: mesh or ring.")] = "mesh",
    bandwidth: Annotated[
        float, typer.Option(help="Bandwidth of a link in one direction, in byte/s.")
    ] = 5e10,
    latency: Annotated[float, typer.Option(help="Latency of a link, in seconds.")] = 5e-6,
    flops: Annotated[
        float, typer.Option(help="Speed of a context-parallel rank, in FLOP/s.")
    ] = 1e14,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of a node.", min=1)] = 4,
    node_bandwidth: Annotated[
        float, typer.Option(help="Bandwidth between nodes, in byte/s.")
    ] = 1.25e10,
    node_latency: Annotated[float, typer.Option(help="Latency between nodes, in seconds.")] = 1e-5,
    quick: Annotated[
        bool, typer.Option("--quick", help="256 tokens, one round, one thread, no flex.")
    ] = False,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Write the result as .html or .json; repeatable."),
    ] = None,
    output: Output = Format.text,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print counts only.")] = False,
) -> None:
    """Compare attention kernels and context-parallel methods under many masks.

    Every cell is compared with float64 before it is timed. What a kernel or a method cannot do
    is a row with its reason. Context-parallel ranks compute for real and communicate on a
    virtual clock. The status is 1 when a cell is wrong or fails.

    **Examples**

        shoal bench attention --quick

        shoal bench attention --masks all --cp all --ranks 8 --out report.html

        shoal bench attention --kernels sdpa,flex,tiled --cp none --lengths 1024,4096 --out r.json
    """
    from shoal import api
    from shoal.app.show import WorkBar, as_json, show_blocks
    from shoal.claims.bench.attention.report import tables, to_html

    files = out or []
    check_endings("--out", files, ".html", ".json")
    with WorkBar("bench attention", quiet=quiet) as bar:
        report = api.bench_attention(
            kernels=kernels,
            masks=masks,
            methods=cp,
            lengths=None if lengths is None else numbers_of(lengths, "--lengths"),
            context_lengths=None if cp_lengths is None else numbers_of(cp_lengths, "--cp-lengths"),
            ranks=numbers_of(ranks, "--ranks"),
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            backward=backward,
            repeats=repeats,
            block=block,
            threads=threads,
            seed=seed,
            network={
                "flops": flops,
                "bandwidth": bandwidth,
                "latency_s": latency,
                "shape": links,
                "ranks_per_node": ranks_per_node,
                "node_bandwidth": node_bandwidth,
                "node_latency_s": node_latency,
            },
            quick=quick,
            progress=lambda text, done, total: bar(done, total, text),
        )
    fields = report.model_dump(mode="json")
    write_files(files, fields, lambda _: to_html(report))
    counts = report.counts()
    if output is Format.json:
        as_json(fields)
    elif not quiet:
        show_blocks(tables(report))
    if output is Format.text:
        typer.echo(", ".join(f"{count} {name}" for name, count in counts.items()))
    if counts["wrong"] or counts["failed"]:
        raise typer.Exit(1)


@app.command("kernels")
def kernels(
    op: Annotated[
        list[str] | None, typer.Option(help="Operator to measure; repeatable. [default: all]")
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Rows (tokens) of a call, comma-separated.")
    ] = "1,4,16,64",
    shapes: Annotated[
        str, typer.Option(help="Outputs x inputs of products, comma-separated.")
    ] = "4096x4096",
    formats: Annotated[
        str, typer.Option("--format", help="Weight formats of linear_lowbit, comma-separated.")
    ] = "int4-g128",
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "bf16",
    backend: Annotated[
        list[str] | None, typer.Option(help="Only this kernel, such as cpp; repeatable.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three rounds over a quarter of the memory.")
    ] = False,
    anyway: Anyway = False,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            help="Write the table (.json), or a plot of one operator (.svg); repeatable.",
        ),
    ] = None,
    output: Output = Format.text,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the table only.")] = False,
) -> None:
    """Time every kernel beside its peers, and beside the roofline of the probed machine.

    Kernels of a case take turns, over operands that exceed the last cache. `of roof` is what was
    reached of what the machine could do at best; `x torch` how much faster than PyTorch.

    **Examples**

        shoal bench kernels --op linear

        shoal bench kernels --op linear_lowbit --format int4-g128,int8-channel --rows 1,16

        shoal bench kernels --op paged_attention --out paged.svg --out paged.json
    """
    import dataclasses

    from shoal import api
    from shoal.app.show import WorkBar, as_json, wait_until_quiet
    from shoal.claims.bench.kernels import draw, format_rows
    from shoal.core.errors import ConfigError, require

    files = out or []
    check_endings("--out", files, ".json", ".svg")
    sizes = []
    for shape in shapes.split(","):
        outputs, _, inputs = shape.partition("x")
        if not (outputs.isdigit() and inputs.isdigit() and int(outputs) and int(inputs)):
            raise ConfigError(f"--shapes {shape}: expected outputs x inputs, such as 4096x11008")
        sizes.append((int(outputs), int(inputs)))
    with WorkBar("bench kernels", quiet=quiet) as bar:
        result = api.bench_kernels(
            op or (),
            rows=tuple(numbers_of(rows, "--rows")),
            shapes=tuple(sizes),
            formats=tuple(formats.split(",")),
            dtype=dtype,
            wanted=tuple(backend or ()),
            quick=quick,
            progress=lambda text, done, total: bar(done, total, text),
            on_ready=functools.partial(wait_until_quiet, anyway=anyway, quiet=quiet, bar=bar),
        )
    values = [dataclasses.asdict(row) for row in result]

    def picture(file: Path) -> str:
        names = sorted({row.op for row in result})
        require(len(names) == 1, "--out", str(file), expected="one --op for one picture")
        return draw(result, names[0])

    if output is Format.json:
        as_json(values)
    else:
        typer.echo(format_rows(result))
    write_files(files, values, picture)
