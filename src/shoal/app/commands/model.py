"""``shoal model``: model and checkpoint directories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shoal.app.commands.model_kv import kv
from shoal.app.commands.model_mini import mini
from shoal.app.commands.model_routers import routers
from shoal.app.commands.model_saves import inspect, stalls, timeline
from shoal.app.show import Format, Output

__all__ = ["app"]


app = typer.Typer(
    help="List, inspect, verify, convert, compare, quantize and try models and checkpoints.",
    no_args_is_help=True,
)


@app.command("ls")
def ls(
    directory: Annotated[
        str,
        typer.Argument(help="A run, a checkpoint or a Hugging Face model; or a store's address."),
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

    rows = listing(_place(directory))
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
        typer.Argument(help="A run, a checkpoint or a Hugging Face model; or a store's address."),
    ],
) -> None:
    """Check every byte that has a checksum, and every header; exit 2 when one is wrong.

    **Examples**

        shoal model verify runs/run

        shoal model verify s3://bucket/run
    """
    from shoal.checkpoint.inspect import verify as check
    from shoal.core.errors import CorruptError
    from shoal.core.sizes import human_bytes

    result = check(_place(directory))
    if not result.ok:
        raise CorruptError("\n".join(result.problems))
    typer.echo(
        f"{directory}: a good {result.kind}: {result.tensors} tensors, "
        f"{human_bytes(result.bytes)}; {result.checked}"
    )


@app.command("convert")
def convert(
    source: Annotated[
        str,
        typer.Argument(help="A run, a checkpoint or a model, of any format; or a store's address."),
    ],
    out: Annotated[
        str, typer.Argument(help="Directory to make; for checkpoints it may be an address.")
    ],
    to: Annotated[
        str,
        typer.Option(
            help="Format to write: huggingface, checkpoint, universal, dcp, deepspeed or megatron."
        ),
    ] = "huggingface",
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    mesh: Annotated[
        str | None,
        typer.Option(help="Ranks to write for, such as dp=2,tp=2,pp=1; deepspeed and megatron."),
    ] = None,
    spec: Annotated[
        Path | None,
        typer.Option(help="Patterns in YAML, for rank files that do not say how they combine."),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="option=value of the format, such as zero=3.")
    ] = None,
    architecture: Annotated[
        list[str] | None,
        typer.Option(
            help="What the model becomes, such as residual=ladder or residual.layers=upper_half; "
            "train it on afterwards."
        ),
    ] = None,
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
    from shoal.checkpoint.formats.transfer import convert_any

    note = convert_any(
        _place(source),
        _place(out),
        to=to,
        dtype=dtype,
        mesh=mesh,
        spec=spec,
        options=set_ or [],
        architecture=architecture or [],
    )
    if note:
        typer.echo(f"note: left out: {note}", err=True)
    typer.echo(f"wrote {out}")


@app.command("diff")
def diff(
    a: Annotated[
        str, typer.Argument(help="A checkpoint or a model of any format; or a store's address.")
    ],
    b: Annotated[str, typer.Argument(help="Another one.")],
    weights: Annotated[
        bool, typer.Option("--weights", help="Leave out the optimizer's state.")
    ] = False,
    all_: Annotated[bool, typer.Option("--all", help="List equal tensors, too.")] = False,
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

    result = list(differences(a, b, weights_only=True if weights else None))
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
    directory: Annotated[Path, typer.Argument(help="A Hugging Face directory or a .gguf file.")],
    out: Annotated[Path, typer.Option(help="Directory to make.")],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="Weight format: int4-g128, int4-channel, int4-2:4, uint3-g64, float3_e1m1-g128, "
            "bipolar2-g128, bfp8-g32, nf4-g64 and the like.",
        ),
    ] = "int4-g128",
    method: Annotated[str, typer.Option(help="rtn, gptq or awq.")] = "gptq",
    act_order: Annotated[
        bool, typer.Option("--act-order", help="gptq: columns with the largest inputs first.")
    ] = False,
    clip: Annotated[
        bool | None,
        typer.Option(
            "--clip/--no-clip", help="Seek how far large weights are cut; rtn does not by itself."
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text to calibrate and to compare on, a file or a directory; Python's standard "
            "library, if not given."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Sequences of calibration text.", min=1)] = 64,
    length: Annotated[int, typer.Option(help="Tokens of each.", min=2, max=512)] = 256,
    eval_tokens: Annotated[
        int, typer.Option(help="Held-out tokens to compare on; 0 for none.", min=0)
    ] = 16384,
    finetune: Annotated[
        float,
        typer.Option(
            help="Seconds of training with the matrices rounded, before codes are chosen.", min=0
        ),
    ] = 0.0,
    timing: Annotated[bool, typer.Option(help="Decode with both models in turn.")] = True,
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
    with WorkBar("quantizing", quiet=output is Format.json) as bar:
        result = quantize_directory(
            directory,
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


def _place(words: str) -> Path | str:
    """A path, or an address as it is."""
    from shoal.checkpoint.remote import is_address

    return words if is_address(words) else Path(words)


app.command("inspect")(inspect)
app.command("stalls")(stalls)
app.command("timeline")(timeline)
app.command("kv")(kv)
app.command("mini")(mini)
app.command("routers")(routers)


@app.command("generate")
def generate(
    directory: Annotated[Path, typer.Argument(help="A Hugging Face directory.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def main():\n",
    tokens: Annotated[int, typer.Option(help="Tokens to write.", min=1, max=100_000)] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 for no limit.", min=0)] = 0,
    top_p: Annotated[float, typer.Option(help="1 for no limit.", min=0, max=1)] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.", min=0)] = 0,
) -> None:
    """Continue a text.

    **Examples**

        shoal model generate runs/run/export --prompt "import os"
    """
    from shoal.train.sampling import continue_text

    text = continue_text(
        directory, prompt, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
    )
    typer.echo(prompt + text)
