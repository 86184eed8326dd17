"""``shoal bench decode``: speed-up of every speculative method for one target on this machine."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated

import typer

from shoal.app.commands.bench_shown import numbers_of
from shoal.app.show import Anyway, Format, Output, Quiet, check_endings


def decode(
    model: Annotated[
        str,
        typer.Option(
            help="Directory of the target, or ORG/NAME of the hub. [default: the mini-model of "
            "the zoo]"
        ),
    ] = "",
    methods: Annotated[
        str, typer.Option(help="Comma-separated parts of kind speculative. [default: all]")
    ] = "",
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=DIRECTORY of an existing drafter; repeatable."),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=DIRECTORY of a diffusion, parscale, duo or ladder model; repeatable."
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, such as 1,4,16.")] = "1",
    prompts: Annotated[int, typer.Option(help="Held-out prompts.", min=1)] = 24,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens per answer.", min=8)] = 96,
    rounds: Annotated[int, typer.Option(help="Number of rounds.", min=1)] = 3,
    precision: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    threads: Annotated[int, typer.Option(help="Threads; 0 for all cores.", min=0)] = 0,
    anyway: Anyway = False,
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Save the table, so that plans can cite it.")
    ] = True,
    quiet: Quiet = False,
    output: Output = Format.text,
    picture: Annotated[
        Path | None,
        typer.Option(help="Plot speed over tokens per step or batch size, to this .svg file."),
    ] = None,
) -> None:
    """Compare ways to decode several tokens a step with plain decoding.

    All answer the same held-out prompts with the same weights, in turn, one by one or so many
    together. Drafters that are not there are trained first, which takes minutes each and is not
    timed. Ways that need a model of their own get a row for each directory that is given.

    **Examples**

        shoal bench decode

        shoal bench decode --methods ngram,medusa --batch 1,4,16 --rounds 5

        shoal bench decode --model DIR --drafter medusa=DRAFTER --picture decode.svg

        shoal bench decode --methods medusa --also diffusion=MDLM --also parscale=FOUR
    """
    import dataclasses

    from shoal import api
    from shoal.app.show import as_json, show_blocks, wait_until_quiet
    from shoal.core.errors import StoreError
    from shoal.core.files import write_atomic

    check_endings("--picture", [picture], ".svg")

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=output is Format.json)

    found = api.bench_decode(
        model,
        methods=[one.strip() for one in methods.split(",") if one.strip()],
        drafters=dict(_pair(one, "--drafter") for one in drafter or []),
        also=dict(_pair(one, "--also") for one in also or []),
        batches=numbers_of(batch, "--batch", most=1024),
        prompts=prompts,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        rounds=rounds,
        precision=precision,
        threads=threads,
        keep=keep,
        say=say,
        on_ready=functools.partial(wait_until_quiet, anyway=anyway, quiet=quiet),
    )
    if found.saved is not None:
        typer.echo(
            f"saved in {found.saved}, where shoal explain decode and plan serve find it", err=True
        )
    if picture is not None:
        write_atomic(picture, found.picture(), error=StoreError)
    if output is Format.json:
        as_json([dataclasses.asdict(row) for row in found.rows])
    else:
        show_blocks(found.tables())


def _pair(text: str, option: str) -> tuple[str, Path]:
    from shoal.core.errors import require

    name, mark, directory = text.partition("=")
    require(bool(mark and name and directory), option, text, expected="NAME=DIRECTORY")
    return name, Path(directory)
