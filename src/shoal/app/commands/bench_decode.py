"""``shoal bench decode``: speed-up of every speculative method for one target on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Anyway, Format, Output, Quiet

if TYPE_CHECKING:
    from shoal.claims.bench.decode import DecodeRow

# What is compared on the mini-model if nothing is named.
_TRAINED = ("medusa", "falcon", "ppd")


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

    from shoal.api.loading import model_directory
    from shoal.app.show import as_json, wait_until_quiet
    from shoal.claims.bench.decode import PLAIN, Bench, compared, held_out_prompts, lively
    from shoal.claims.bench.decode_methods import check_own, drawn, keep_rows
    from shoal.core.errors import StoreError, require
    from shoal.core.files import write_atomic
    from shoal.core.measure import num_cores
    from shoal.train import zoo
    from shoal.train.zoo.drafters import method_of

    if picture is not None:
        require(picture.suffix == ".svg", "--picture", picture, expected="a name that ends in .svg")
    sizes = _sizes(batch)

    def say(line: str) -> None:
        if not quiet:
            typer.echo(line, err=output is Format.json)

    given = dict(_pair(one, "--drafter") for one in drafter or [])
    others = dict(_pair(one, "--also") for one in also or [])
    for name, directory in others.items():
        check_own(name, directory)
    target = model_directory(model) if model else zoo.trained("shoal-27m", say)
    wanted = [one.strip() for one in methods.split(",") if one.strip()]
    wanted = wanted or ["ngram", *(_TRAINED if not model else ()), *given]
    every = dict.fromkeys([*wanted, *given])
    parts = {name: method_of(name, target, given, say) for name in every}
    data = None if model else zoo.corpus("shoal-27m")
    # A fifth may go: answers that repeat themselves.
    count = max(prompts, max(sizes) * 5 // 4)
    request = held_out_prompts(target, data, count, prompt_tokens)
    own = {
        name: (directory, held_out_prompts(directory, data, count, prompt_tokens))
        for name, directory in others.items()
    }
    wait_until_quiet(anyway=anyway, quiet=quiet)
    bench = Bench(
        target,
        {PLAIN: None, **parts},
        precision=precision,
        threads=threads or num_cores(),
        max_running=max(sizes),
        kv_tokens=max(8192, max(sizes) * (prompt_tokens + new_tokens + 64)),
        own=own,
    )
    kept = lively(bench, request, new_tokens)
    loops = len(request) - len(kept)
    rows = [
        row
        for size in sizes
        for row in compared(bench, kept, new_tokens, rounds=rounds, batch=size, loops=loops)
    ]
    if keep:
        place = keep_rows(rows, target, model or "shoal-27m", precision)
        typer.echo(f"saved in {place}, where shoal explain decode and plan serve find it", err=True)
    if picture is not None:
        write_atomic(picture, drawn(rows).render().encode(), error=StoreError)
    if output is Format.json:
        as_json([dataclasses.asdict(row) for row in rows])
        return
    _show(rows, f"decode: {target.name}, answers of {new_tokens} tokens, {precision}", others)


def _show(rows: Sequence[DecodeRow], title: str, others: dict[str, Path]) -> None:
    from shoal.app.show import table
    from shoal.claims.bench.decode import OWN, advice
    from shoal.core.sizes import human_bytes

    table(
        title,
        (
            "",
            "requests",
            "tokens/s",
            "over plain",
            "tokens a step",
            "guesses",
            "drafter",
            "agrees",
            "distinct",
        ),
        [
            (
                row.method,
                f"{row.batch}",
                f"{row.tokens_per_s:.0f}",
                f"{row.speedup:.2f} ({row.low:.2f} to {row.high:.2f})",
                f"{row.tokens_per_step:.2f}",
                f"{row.nodes_per_step:.1f}",
                human_bytes(row.memory_bytes) if row.memory_bytes else "",
                "own model" if row.agreement is None else f"{100 * row.agreement:.1f} %",
                f"{row.distinct_4_grams:.2f}",
            )
            for row in rows
        ],
        numeric=" rrrrrrrr",
    )
    if rows[0].loops:
        typer.echo(f"{rows[0].loops} answers were left out because they repeat themselves")
    missing = [name for name in OWN if name not in others]
    if missing:
        typer.echo(
            f"not measured: {', '.join(missing)}, which need a model of their own (--also "
            f"{missing[0]}=DIR), and hogwild, whose workers share a task (shoal claims run hogwild)"
        )
    typer.echo(advice(rows))


def _sizes(text: str) -> list[int]:
    from shoal.core.errors import require

    words = [one.strip() for one in text.split(",")]
    require(
        all(one.isdecimal() and 1 <= int(one) <= 1024 for one in words),
        "--batch",
        text,
        expected="numbers from 1 to 1024, such as 1,4,16",
    )
    return sorted({int(one) for one in words})


def _pair(text: str, option: str) -> tuple[str, Path]:
    from shoal.core.errors import require

    name, mark, directory = text.partition("=")
    require(bool(mark and name and directory), option, text, expected="NAME=DIRECTORY")
    return name, Path(directory)
