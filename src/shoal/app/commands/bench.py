"""``shoal bench``: serving predicted and run for real; kernels and attention beside their peers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.commands.bench_activations import activations
from shoal.app.commands.bench_decode import decode
from shoal.app.commands.bench_shown import (
    files_of,
    show_serve_plan,
    show_serve_report,
    write_served,
)
from shoal.app.commands.bench_tune import tune
from shoal.app.commands.jobs import StudyGroup
from shoal.app.show import Anyway, Format, Output, Quiet, Sets

if TYPE_CHECKING:
    from shoal.claims.bench.attention.values import AttentionReport
    from shoal.ir import ServeJob

__all__ = ["app"]

app = typer.Typer(
    cls=StudyGroup,
    help="Predict a workload and run it for real; compare kernels.",
    no_args_is_help=True,
)

app.command("activations")(activations)
app.command("decode")(decode)
app.command("tune")(tune)

_DEFAULT_MODEL = "shoal-4m"


@app.callback()
def _group() -> None:
    """Predict a workload and run it for real; compare kernels."""


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
    url: Annotated[
        str | None,
        typer.Option(help="A server that speaks OpenAI's completions; its key: OPENAI_API_KEY."),
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="Targets in s for goodput, such as ttft=0.25,tpot=0.03.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="With --url: ask chat/completions, with words.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="With --url: prompts are words, not token ids.")
    ] = False,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="With --url: ask for the trace's lengths, by an extension that most engines know.",
        ),
    ] = True,
    vocab: Annotated[
        int, typer.Option(help="With --url: token ids of prompts are below it.", min=2)
    ] = 1000,
    request_timeout: Annotated[
        float, typer.Option(help="With --url: seconds after which a request counts as hung.")
    ] = 600.0,
    machine: Annotated[str, typer.Option("--machine", "-m", help="What to plan for.")] = "local",
    set_: Sets = None,
    profile: Annotated[
        float,
        typer.Option(help="Seconds for timing steps before, and at most for a rehearsal.", min=0),
    ] = 5.0,
    anyway: Annotated[
        bool,
        typer.Option(
            "--anyway",
            help="Measure on a busy machine too, and a plan for GPUs on a CPU, unscored.",
        ),
    ] = False,
    score: Annotated[
        bool, typer.Option("--score/--no-score", help="Keep the report in the score.")
    ] = True,
    output: Output = Format.text,
    peers: Annotated[
        bool, typer.Option("--peers", help="Compare with other engines, one at a time, in turns.")
    ] = False,
    environments: Annotated[
        Path | None, typer.Option(help="With --peers: where scripts/peers installed them.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="With --peers: timed rounds.", min=1)] = 6,
    threads: Annotated[
        int, typer.Option(help="With --peers: threads of every engine; 0 for all cores.", min=0)
    ] = 0,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="A file .json, or .svg of how long clients waited; repeatable."),
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
    files = files_of(out or [], (".json",) if peers else (".json", ".svg"))
    if peers:
        from shoal.app.commands import bench_peers

        bench_peers.run(
            model,
            environments=environments,
            rounds=rounds,
            threads=threads,
            anyway=anyway,
            out=files[0] if files else None,
            quiet=quiet,
        )
        return
    job = _job(config, model, workload, trace, set_ or [])
    targets = None
    if slo is not None:
        from shoal.app.commands.plan_goodput import targets_of

        result = targets_of(slo)
        targets = (result.ttft, result.tpot)
    if url is not None:
        from shoal.app.commands import bench_url

        bench_url.run(
            job,
            url=url,
            model=model or "",
            requests=requests,
            rate=rate,
            targets=targets,
            chat=chat,
            text=text,
            ignore_eos=ignore_eos,
            vocab=vocab,
            timeout_s=request_timeout,
            output=output,
            files=files,
            quiet=quiet,
        )
        return
    from shoal.app.show import WorkBar, as_json
    from shoal.cost.score import Score
    from shoal.machine.described import load
    from shoal.serve.bench.replay import bench_serve, weights_of
    from shoal.serve.ranks.spinning import spin_briefly

    spin_briefly()
    target = load(machine)
    weights, where = weights_of(job)
    shown = output is Format.text
    samples: dict[str, list[float]] = {}
    if shown and not quiet:
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
            on_plan=show_serve_plan if shown and not quiet else None,
            targets=targets,
            seen=samples.update,
            anyway=anyway,
        )
    if score:
        Score().append(report)
    write_served(files, {**report.model_dump(mode="json"), "samples": samples}, job.model)
    if shown:
        show_serve_report(report)
    else:
        as_json(report.model_dump(mode="json"))


@app.command("attention")
def attention(
    kernels: Annotated[str, typer.Option(help="all, none, or some of them with commas.")] = "all",
    masks: Annotated[str, typer.Option(help="all, or some of them with commas.")] = "all",
    cp: Annotated[
        str, typer.Option(help="Context-parallel methods: all, none, or some with commas.")
    ] = "all",
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of a sequence; 1024,2048, or 256 if quick.")
    ] = None,
    cp_lengths: Annotated[
        str | None, typer.Option(help="Tokens for context parallelism; the shortest length.")
    ] = None,
    ranks: Annotated[str, typer.Option(help="Numbers of context-parallel ranks.")] = "2,4,8",
    batch: Annotated[int, typer.Option(help="Sequences.", min=1)] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads.", min=1)] = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head.", min=1)] = 32,
    dtype: Annotated[str, typer.Option(help="fp64, fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str, typer.Option(help="Where kernels run: cpu or cuda.")] = "cpu",
    backward: Annotated[
        bool, typer.Option("--backward/--no-backward", help="Gradients too.")
    ] = True,
    repeats: Annotated[int, typer.Option(help="Timed rounds.", min=1)] = 5,
    block: Annotated[int, typer.Option(help="Edge of the blocks of sparse masks.", min=1)] = 64,
    threads: Annotated[int, typer.Option(help="Threads of torch; 0 for its own.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Of masks, inputs and turns.", min=0)] = 0,
    links: Annotated[str, typer.Option(help="Links between ranks: mesh or ring.")] = "mesh",
    bandwidth: Annotated[float, typer.Option(help="Byte/s of a link in one direction.")] = 5e10,
    latency: Annotated[float, typer.Option(help="Seconds of a link.")] = 5e-6,
    flops: Annotated[float, typer.Option(help="FLOP/s of a context-parallel rank.")] = 1e14,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks of a node.", min=1)] = 4,
    node_bandwidth: Annotated[float, typer.Option(help="Byte/s between nodes.")] = 1.25e10,
    node_latency: Annotated[float, typer.Option(help="Seconds between nodes.")] = 1e-5,
    quick: Annotated[
        bool, typer.Option("--quick", help="256 tokens, one round, one thread, no flex.")
    ] = False,
    out: Annotated[
        list[Path] | None, typer.Option("--out", "-o", help="A file .html or .json; repeatable.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the counts only.")] = False,
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
    from shoal.app.show import WorkBar
    from shoal.claims.bench.attention.harness import chosen, run
    from shoal.claims.bench.attention.report import to_html
    from shoal.claims.bench.attention.values import AttentionSettings
    from shoal.core.config import parse
    from shoal.core.errors import require
    from shoal.core.files import write_atomic, write_json

    files = out or []
    for file in files:
        require(
            file.suffix in (".html", ".json"),
            "--out",
            str(file),
            expected="a name in .html or .json",
        )
    sizes = _numbers(lengths or ("256" if quick else "1024,2048"), "--lengths")
    names = chosen(kernels, "attention_kernel")
    raw = {
        "kernels": [name for name in names if not (quick and name == "flex" and kernels == "all")],
        "masks": chosen(masks, "mask"),
        "methods": chosen(cp, "context"),
        "lengths": sizes,
        "context_lengths": [min(sizes)]
        if cp_lengths is None
        else _numbers(cp_lengths, "--cp-lengths"),
        "ranks": _numbers(ranks, "--ranks"),
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": dtype,
        "device": device,
        "backward": backward,
        "repeats": 1 if quick else repeats,
        "block": block,
        "threads": 1 if quick else threads,
        "seed": seed,
        "network": {
            "flops": flops,
            "bandwidth": bandwidth,
            "latency_s": latency,
            "shape": links,
            "ranks_per_node": ranks_per_node,
            "node_bandwidth": node_bandwidth,
            "node_latency_s": node_latency,
        },
    }
    with WorkBar("bench attention", quiet=quiet) as bar:
        report = run(
            parse(AttentionSettings, raw, where=""),
            progress=lambda text, done, total: bar(done, total, text),
        )
    for file in files:
        if file.suffix == ".json":
            write_json(file, report.model_dump(mode="json"))
        else:
            write_atomic(file, to_html(report))
    counts = report.counts()
    if not quiet:
        _show_attention(report)
    typer.echo(", ".join(f"{count} {name}" for name, count in counts.items()))
    if counts["wrong"] or counts["failed"]:
        raise typer.Exit(1)


@app.command("kernels")
def kernels(
    op: Annotated[
        list[str] | None, typer.Option(help="Operators; all that are measured without. Repeatable.")
    ] = None,
    rows: Annotated[str, typer.Option(help="Rows (tokens) of a call, with commas.")] = "1,4,16,64",
    shapes: Annotated[
        str, typer.Option(help="Outputs x inputs of products, with commas.")
    ] = "4096x4096",
    formats: Annotated[
        str, typer.Option("--format", help="Weight formats of linear_lowbit, with commas.")
    ] = "int4-g128",
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "bf16",
    backend: Annotated[
        list[str] | None, typer.Option(help="Only these kernels, such as cpp. Repeatable.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three rounds, and a quarter of the memory.")
    ] = False,
    anyway: Anyway = False,
    out: Annotated[
        list[Path] | None,
        typer.Option("--out", "-o", help="A file .json, or .svg of one operator; repeatable."),
    ] = None,
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

    from shoal.app.show import WorkBar
    from shoal.claims.bench.kernels import KernelBenchOptions, bench, draw, format_rows
    from shoal.core.errors import ConfigError, require
    from shoal.core.files import write_atomic, write_json
    from shoal.core.measure import check_quiet

    files = out or []
    for file in files:
        require(
            file.suffix in (".json", ".svg"), "--out", str(file), expected="a name in .json or .svg"
        )
    require(dtype in ("fp32", "bf16"), "--dtype", dtype, expected="fp32 or bf16")
    sizes = []
    for shape in shapes.split(","):
        outputs, _, inputs = shape.partition("x")
        if not (outputs.isdigit() and inputs.isdigit() and int(outputs) and int(inputs)):
            raise ConfigError(f"--shapes {shape}: expected outputs x inputs, such as 4096x11008")
        sizes.append((int(outputs), int(inputs)))
    options = KernelBenchOptions(
        ops=tuple(op or ()),
        rows=tuple(_numbers(rows, "--rows")),
        shapes=tuple(sizes),
        formats=tuple(formats.split(",")),
        dtype=dtype,
        pairs=3 if quick else 15,
        rotated_bytes=(160 if quick else 640) * 2**20,
        wanted=tuple(backend or ()),
    )
    if not anyway:
        check_quiet(wait_s=60.0)
    with WorkBar("bench kernels", quiet=quiet) as bar:
        result = bench(options, progress=lambda text, done, total: bar(done, total, text))
    typer.echo(format_rows(result))
    for file in files:
        if file.suffix == ".json":
            write_json(file, [dataclasses.asdict(row) for row in result])
        else:
            names = sorted({row.op for row in result})
            require(len(names) == 1, "--out", str(file), expected="one --op for one picture")
            write_atomic(file, draw(result, names[0]))


def _numbers(text: str, where: str) -> list[int]:
    from shoal.core.errors import require

    words = [word.strip() for word in text.split(",")]
    require(
        all(word.isdigit() for word in words),
        where,
        text,
        expected="whole numbers with commas, such as 1024,2048",
    )
    return [int(word) for word in words]


def _show_attention(report: AttentionReport) -> None:
    from shoal.app.show import table
    from shoal.claims.bench.attention.report import best_kernels, best_methods

    broken = [
        (row.kernel, row.mask, row.length, "", row.status, row.reason)
        for row in report.kernels
        if row.status in ("wrong", "failed")
    ] + [
        (row.method, row.mask, row.length, str(row.ranks), row.status, row.reason)
        for row in report.context
        if row.status in ("wrong", "failed")
    ]
    if broken:
        table("", ("what", "mask", "tokens", "ranks", "", "why"), broken, numeric="  rr")
    if report.kernels:
        table(
            "fastest kernel",
            ("tokens", "mask", "kernel", "TFLOP/s", "of"),
            [
                (
                    row.length,
                    row.mask,
                    row.kernel,
                    "" if row.forward is None else f"{row.forward.tflops:.3g}",
                    count,
                )
                for row, count in best_kernels(report)
            ],
            numeric="r  rr",
        )
    if report.context:
        table(
            "fastest context-parallel method, on the links' clock",
            ("tokens", "ranks", "mask", "method", "step", "exposed", "of"),
            [
                (
                    row.length,
                    row.ranks,
                    row.mask,
                    row.method,
                    f"{1e6 * (row.step_s or 0.0):,.4g} µs",
                    f"{1e6 * (row.exposed_s or 0.0):,.4g} µs",
                    count,
                )
                for row, count in best_methods(report)
            ],
            numeric="rr  rrr",
        )


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
