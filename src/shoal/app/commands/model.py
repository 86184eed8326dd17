"""``shoal model``: model and checkpoint directories."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format

__all__ = ["app"]


class Target(StrEnum):
    """What ``convert`` can make."""

    huggingface = "huggingface"
    checkpoint = "checkpoint"


app = typer.Typer(
    help="List, verify, convert and try model and checkpoint directories.", no_args_is_help=True
)


@app.command("ls")
def ls(
    directory: Annotated[Path, typer.Argument(help="A run, a checkpoint or a Hugging Face model.")],
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """List the tensors of a directory.

    **Examples**

        shoal model ls runs/run

        shoal model ls runs/run/export -o json
    """
    from shoal.app.show import as_json, human_bytes, table
    from shoal.checkpoint.inspect import listing

    rows = listing(directory)
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
    directory: Annotated[Path, typer.Argument(help="A run, a checkpoint or a Hugging Face model.")],
) -> None:
    """Check every byte that has a checksum, and every header; exit 2 when one is wrong.

    **Examples**

        shoal model verify runs/run
    """
    from shoal.app.show import human_bytes
    from shoal.checkpoint.inspect import verify as check
    from shoal.core.errors import CorruptError

    found = check(directory)
    if not found.ok:
        raise CorruptError("\n".join(found.problems))
    typer.echo(
        f"{directory}: a good {found.kind}: {found.tensors} tensors, "
        f"{human_bytes(found.bytes)}; {found.checked}"
    )


@app.command("convert")
def convert(
    source: Annotated[Path, typer.Argument(help="A run, a checkpoint or a Hugging Face model.")],
    out: Annotated[Path, typer.Argument(help="Directory to make.")],
    to: Annotated[Target, typer.Option(help="Kind of directory to make.")] = Target.huggingface,
    dtype: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
) -> None:
    """Turn one kind of directory into another, or change the dtype.

    **Examples**

        shoal model convert runs/run model

        shoal model convert model small --dtype bf16
    """
    from shoal.checkpoint.inspect import convert as change

    change(source, out, to=to.value, dtype=dtype)
    typer.echo(f"wrote {out}")


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
