"""``shoal model``: model and checkpoint directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.commands.model_kv import kv
from shoal.app.commands.model_mini import mini
from shoal.app.commands.model_routers import routers
from shoal.app.commands.model_saves import inspect, stalls, timeline
from shoal.app.show import Format, Output, Quiet

app = typer.Typer(
    help="List, inspect, verify, convert, compare, quantize and try models and checkpoints."
    "\n\n**Examples**\n\n    shoal model ls runs/run/export\n\n"
    "    shoal model convert runs/run s3://bucket/copy --to checkpoint",
    no_args_is_help=True,
)


@app.command("ls")
def ls(
    directory: Annotated[
        str,
        typer.Argument(
            help="A run, a checkpoint, a Hugging Face model or id, or an object-store address."
        ),
    ],
    output: Output = Format.text,
) -> None:
    """List the tensors of a directory.

    **Examples**

        shoal model ls runs/run

        shoal model ls runs/run/export -o json

        shoal model ls s3://bucket/run
    """
    from shoal.app.show import as_json, table
    from shoal.checkpoint.inspect import listing
    from shoal.core.sizes import human_bytes

    rows = listing(_source(directory))
    if output is Format.json:
        as_json([row.model_dump(mode="json") for row in rows])
        return
    table(
        "",
        ("tensor", "dtype", "shape", "size", "file"),
        [
            (row.name, row.dtype, "x".join(map(str, row.shape)), human_bytes(row.bytes), row.file)
            for row in rows
        ],
        numeric="   r",
    )
    total = sum(row.bytes for row in rows)
    typer.echo(f"{len(rows)} tensors, {human_bytes(total)}")


@app.command("verify")
def verify(
    directory: Annotated[
        str,
        typer.Argument(
            help="A run, a checkpoint, a Hugging Face model or id, or an object-store address."
        ),
    ],
    output: Output = Format.text,
) -> None:
    """Check every byte that has a checksum, and every header; exit 2 when one is wrong.

    **Examples**

        shoal model verify runs/run

        shoal model verify s3://bucket/run
    """
    from shoal.app.show import as_json
    from shoal.checkpoint.inspect import verify as check
    from shoal.core.errors import CorruptError
    from shoal.core.sizes import human_bytes

    result = check(_source(directory))
    if not result.ok:
        raise CorruptError("\n".join(result.problems))
    if output is Format.json:
        as_json(result.model_dump(mode="json"))
        return
    typer.echo(
        f"{directory}: valid {result.kind}: {result.tensors} tensors, "
        f"{human_bytes(result.bytes)}; {result.checked}"
    )


@app.command("convert")
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="A run, a checkpoint, a model of any format, its id, or an object-store address."
        ),
    ],
    out: Annotated[str, typer.Argument(help="Output directory; for checkpoints also an address.")],
    to: Annotated[
        str,
        typer.Option(
            help="Output format: huggingface, checkpoint, universal, dcp, deepspeed or megatron."
        ),
    ] = "huggingface",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="For deepspeed and megatron: target ranks, such as dp=2,tp=2,pp=1."),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(
            help="Patterns in YAML, for rank files without metadata about how they combine."
        ),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="option=value of the format, such as zero=3.")
    ] = None,
    architecture: Annotated[
        list[str] | None,
        typer.Option(
            help="Architecture of the result, such as residual=ladder or "
            "residual.layers=upper_half; continue training afterwards."
        ),
    ] = None,
    output: Output = Format.text,
) -> None:
    """Turn one kind of directory into another, or change the dtype or the architecture.

    **Examples**

        shoal model convert runs/run model

        shoal model convert model small --dtype bf16

        shoal model convert runs/run shared --to universal

        shoal model convert runs/run s3://bucket/copy --to checkpoint

        shoal model convert runs/run ranks --to deepspeed --mesh dp=2,tp=2 --set zero=3

        shoal model convert model ladder --architecture residual=ladder
    """
    from shoal.app.show import as_json
    from shoal.checkpoint.formats.transfer import convert_any
    from shoal.checkpoint.remote import path_or_address

    note = convert_any(
        _source(source),
        path_or_address(out),
        to=to,
        dtype=dtype,
        mesh=mesh,
        spec=spec,
        options=set_ or [],
        architecture=architecture or [],
    )
    if output is Format.json:
        as_json({"out": out, "left_out": note})
        return
    if note:
        typer.echo(f"note: left out: {note}", err=True)
    typer.echo(f"wrote {out}")


@app.command("diff")
def diff(
    a: Annotated[
        str,
        typer.Argument(help="A checkpoint or a model of any format, or an object-store address."),
    ],
    b: Annotated[str, typer.Argument(help="Another one.")],
    weights: Annotated[bool, typer.Option("--weights", help="Ignore optimizer state.")] = False,
    all_: Annotated[bool, typer.Option("--all", help="Also list equal tensors.")] = False,
    output: Output = Format.text,
) -> None:
    """Compare names, shapes, dtypes and values, across formats; exit 1 when they differ.

    Where only one of the two has the optimizer's state, weights are compared.

    **Examples**

        shoal model diff runs/one runs/two

        shoal model diff runs/one/export universal:shared -o json
    """
    from shoal.app.show import as_json, table
    from shoal.checkpoint.formats.transfer import differences

    sources = (str(_source(a)), str(_source(b)))
    result = list(differences(*sources, weights_only=True if weights else None))
    unequal = [one for one in result if one.kind != "equal"]
    if output is Format.json:
        as_json([one.model_dump(mode="json") for one in (result if all_ else unequal)])
    else:
        shown = result if all_ else unequal
        if shown:
            table(
                "",
                ("tensor", "differs in", "A", "B", "largest", "elements"),
                [
                    (
                        one.name,
                        one.kind,
                        one.a,
                        one.b,
                        "" if one.largest is None else f"{one.largest:.3g}",
                        "" if one.share is None else f"{one.share:.1%}",
                    )
                    for one in shown
                ],
                numeric="    rr",
            )
        typer.echo(f"{len(result)} tensors, {len(unequal)} of them differ")
    if unequal:
        raise typer.Exit(1)


@app.command("quantize")
def quantize(
    directory: Annotated[
        str,
        typer.Argument(help="A Hugging Face directory, ORG/NAME of the hub, or a .gguf file."),
    ],
    out: Annotated[Path, typer.Option(help="Output directory.")],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="Weight format, such as int4-g128, int4-channel, int4-2:4, uint3-g64, "
            "float3_e1m1-g128, bipolar2-g128, bfp8-g32 or nf4-g64.",
        ),
    ] = "int4-g128",
    method: Annotated[str, typer.Option(help="rtn, gptq or awq.")] = "gptq",
    act_order: Annotated[
        bool,
        typer.Option(
            "--act-order", help="With gptq: process columns with the largest inputs first."
        ),
    ] = False,
    clip: Annotated[
        bool | None,
        typer.Option(
            "--clip/--no-clip",
            help="Search for the clipping of large weights; rtn does not by default.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text for calibration and comparison, a file or a directory. [default: Python's "
            "standard library]"
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Sequences of calibration text.", min=1)] = 64,
    length: Annotated[int, typer.Option(help="Tokens of each.", min=2, max=512)] = 256,
    eval_tokens: Annotated[
        int, typer.Option(help="Held-out tokens for comparison; 0 for none.", min=0)
    ] = 16384,
    finetune: Annotated[
        float,
        typer.Option(help="Seconds of training with rounded matrices before quantization.", min=0),
    ] = 0.0,
    timing: Annotated[bool, typer.Option(help="Compare the decoding speed of both models.")] = True,
    quiet: Quiet = False,
    output: Output = Format.text,
) -> None:
    """Store the matrices of a model in few bits, and say what that costs.

    The new directory opens wherever a model directory does; its matrices stay packed.

    **Examples**

        shoal model quantize model --format int4-g128 --method gptq --out small

        shoal model quantize model --format float3_e1m1-g128 --method awq --out small -o json
    """
    from shoal.app.show import WorkBar, as_json, table
    from shoal.core.sizes import human_bytes
    from shoal.train.quantize import quantize_directory

    options: dict[str, bool] = {"act_order": True} if act_order else {}
    if clip is not None:
        options["clip_search"] = clip
    data = "stdlib" if text is None else {"name": "text", "path": str(text)}
    with WorkBar("quantizing", quiet=quiet or output is Format.json) as bar:
        result = quantize_directory(
            Path(_source(directory)),
            out,
            format_,
            method={"name": method, **options},
            data=data,
            samples=samples,
            length=length,
            eval_tokens=eval_tokens,
            time_it=timing,
            finetune_s=finetune,
            progress=bar,
        )
    if output is Format.json:
        as_json(result.model_dump(mode="json"))
        return
    rows = [
        ("format", f"{result.format}, {result.matrix_bits:.3f} bits a weight of the matrices"),
        ("method", result.method),
        ("weights", f"{human_bytes(result.bytes_before)} -> {human_bytes(result.bytes_after)}"),
    ]
    if result.quality is not None:
        quality = result.quality
        rows += [
            (
                "perplexity",
                f"{quality.reference:.3f} -> {quality.perplexity:.3f} ({quality.rise:+.2%}) on "
                f"{quality.tokens} held-out tokens",
            ),
            ("same top token", f"{quality.agreement:.2%}"),
        ]
    if result.decode_s is not None and result.speedup is not None:
        before, after = result.decode_s
        ratio, low, high = result.speedup
        rows.append(
            (
                "token of one sequence",
                f"{before * 1e3:.2f} ms -> {after * 1e3:.2f} ms; {ratio:.2f}x faster "
                f"({low:.2f} to {high:.2f})",
            )
        )
    table("", ("", ""), rows)
    typer.echo(f"wrote {out}")


def _source(words: str) -> Path | str:
    """What is read: a path, an address, or a model of the hub, fetched if it is not here."""
    from shoal.checkpoint.remote import path_or_address
    from shoal.core.hub import local_model

    return path_or_address(local_model(words))


app.command("inspect")(inspect)
app.command("stalls")(stalls)
app.command("timeline")(timeline)
app.command("kv")(kv)
app.command("mini")(mini)
app.command("routers")(routers)


@app.command("generate")
def generate(
    directory: Annotated[
        str, typer.Argument(help="A Hugging Face directory, or ORG/NAME of the hub.")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def main():\n",
    tokens: Annotated[int, typer.Option(help="Tokens to generate.", min=1, max=100_000)] = 64,
    temperature: Annotated[
        float, typer.Option(help="Temperature; 0 for greedy decoding.", min=0)
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 for no limit.", min=0)] = 0,
    top_p: Annotated[float, typer.Option(help="1 for no limit.", min=0, max=1)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0)] = 0,
    output: Output = Format.text,
) -> None:
    """Continue a text.

    **Examples**

        shoal model generate runs/run/export --prompt "import os"
    """
    from shoal.api.loading import model_directory
    from shoal.app.show import as_json
    from shoal.core.extras import require_extra

    require_extra("torch", purpose="shoal model generate")
    from shoal.train.sampling import continue_text

    text = continue_text(
        model_directory(directory),
        prompt,
        tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    if output is Format.json:
        as_json({"prompt": prompt, "text": text})
    else:
        typer.echo(prompt + text)
