"""``shoal model kv``: what formats of the cache would lose in a model."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.app.show import Format, Output, Quiet, check_endings


class ChannelMeasure(StrEnum):
    """What determines the size of a channel."""

    weight = "weight"
    calibration = "calibration"


def kv(
    directory: Annotated[
        str,
        typer.Argument(help="A Hugging Face directory, ORG/NAME of the hub, or a .gguf file."),
    ],
    by: Annotated[
        ChannelMeasure,
        typer.Option(
            help="How the size of a key channel is measured: from its weights, or from "
            "its keys on text."
        ),
    ] = ChannelMeasure.weight,
    block: Annotated[
        list[int] | None,
        typer.Option(help="Numbers that share an exponent; repeatable.", min=2),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Text for keys and prediction, a file or a directory. [default: Python's "
            "standard library]"
        ),
    ] = None,
    eval_tokens: Annotated[
        int, typer.Option(help="Held-out tokens to predict with each format; 0 for none.", min=0)
    ] = 8192,
    picture: Annotated[
        Path | None, typer.Option(help="Plot the sizes of all key channels to this SVG file.")
    ] = None,
    quiet: Quiet = False,
    output: Output = Format.text,
) -> None:
    """Say what each format of the key/value cache takes and loses, channels sorted or not.

    **Examples**

        shoal model kv model

        shoal model kv model --block 64 --picture keys.svg -o json
    """
    from shoal.app.show import WorkBar, as_json, table
    from shoal.core.files import write_atomic
    from shoal.core.hub import local_model
    from shoal.core.sizes import human_bytes
    from shoal.train.kv import report_directory

    check_endings("--picture", [picture], ".svg")
    data = "stdlib" if text is None else {"name": "text", "path": str(text)}
    with WorkBar("measuring keys", quiet=quiet or output is Format.json) as bar:
        result = report_directory(
            Path(local_model(directory)),
            data=data,
            by=by.value,
            blocks=tuple(block or (32, 64, 128)),
            eval_tokens=eval_tokens,
            progress=bar,
        )
    if picture is not None:
        write_atomic(picture, result.picture())
    if output is Format.json:
        as_json(result.model_dump(mode="json"))
        return
    table(
        f"{result.model}, heads of {result.head_dim}, errors of {result.keys}",
        ("format", "channels sorted", "a token", "smaller", "score error", "perplexity"),
        [
            (
                row.format,
                row.order,
                human_bytes(row.token_bytes),
                f"{row.shrinks:.2f}x",
                f"{row.mean_error:.3%}",
                "" if row.perplexity is None else f"{row.perplexity:.3f}",
            )
            for row in result.rows
        ],
        numeric="  rrrr",
    )
    if result.note:
        typer.echo(result.note)
    if picture is not None:
        typer.echo(f"wrote {picture}")
