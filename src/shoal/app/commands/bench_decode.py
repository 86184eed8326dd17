"""``shoal bench decode``: every way to guess, on one target: does it pay on this machine?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.claims.bench.decode import Row

__all__ = ["decode"]

# Kinds that the zoo trains a drafter of, and others that need none or a second model.
_TRAINED = ("medusa", "falcon", "ppd")
_DRAFTS = ("draft_model", "easyspec")


def decode(
    model: Annotated[
        str, typer.Option(help="Directory of the target; the zoo's mini-model if not given.")
    ] = "",
    methods: Annotated[
        str, typer.Option(help="Comma-separated parts of kind speculative; all if not given.")
    ] = "",
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=DIRECTORY of a drafter that is there; repeat for several."),
    ] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts.", min=1)] = 24,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each.", min=1)] = 64,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=8)] = 96,
    rounds: Annotated[int, typer.Option(help="Times that all are answered.", min=1)] = 3,
    precision: Annotated[str, typer.Option(help="bf16 or fp32.")] = "bf16",
    threads: Annotated[int, typer.Option(help="Threads; 0 for all cores.", min=0)] = 0,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Measure on a busy machine too.")
    ] = False,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
    picture: Annotated[
        Path | None, typer.Option(help="Draw speed by tokens a step to this .svg file.")
    ] = None,
) -> None:
    """Compare ways to decode several tokens a step with plain decoding.

    All answer the same held-out prompts with the same weights, in turn. Drafters that are not
    there are trained first, which takes minutes each and is not timed.

    **Examples**

        shoal bench decode

        shoal bench decode --methods ngram,medusa --rounds 5

        shoal bench decode --model DIR --drafter medusa=DRAFTER --picture decode.svg
    """
    import dataclasses

    from shoal.app.show import as_json, table
    from shoal.claims.bench.decode import PLAIN, Bench, advice, compared, held_out_prompts
    from shoal.core.measure import check_quiet, num_cores
    from shoal.core.sizes import human_bytes
    from shoal.train import zoo

    target = Path(model) if model else zoo.trained("shoal-27m", typer.echo)
    given = dict(_pair(one) for one in drafter or [])
    wanted = [one.strip() for one in methods.split(",") if one.strip()]
    wanted = wanted or ["ngram", *(_TRAINED if not model else ()), *given]
    parts = {name: _part(name, target, given) for name in dict.fromkeys([*wanted, *given])}
    data = None if model else zoo.corpus("shoal-27m")
    asked = held_out_prompts(target, data, prompts, prompt_tokens)
    if not anyway:
        check_quiet(wait_s=60.0)
    bench = Bench(
        target,
        {PLAIN: None, **parts},
        precision=precision,
        threads=threads or num_cores(),
    )
    rows = compared(bench, asked, new_tokens, rounds=rounds)
    if picture is not None:
        _draw(rows, picture)
    if output is Format.json:
        as_json([dataclasses.asdict(row) for row in rows])
        return
    table(
        f"decode: {target.name}, {rows[0].answers} answers of {new_tokens} tokens, {precision}",
        ("", "tokens/s", "over plain", "tokens a step", "guesses", "drafter", "agrees", "distinct"),
        [
            (
                row.method,
                f"{row.tokens_per_s:.0f}",
                f"{row.speedup:.2f} ({row.low:.2f} to {row.high:.2f})",
                f"{row.tokens_per_step:.2f}",
                f"{row.nodes_per_step:.1f}",
                human_bytes(row.memory_bytes) if row.memory_bytes else "",
                f"{100 * row.agreement:.1f} %",
                f"{row.distinct_4_grams:.2f}",
            )
            for row in rows
        ],
        numeric=" rrrrrrr",
    )
    if rows[0].loops:
        typer.echo(f"{rows[0].loops} answers were left out: they repeat themselves")
    typer.echo(advice(rows))


def _pair(text: str) -> tuple[str, Path]:
    from shoal.core.errors import require

    name, mark, directory = text.partition("=")
    require(bool(mark and name and directory), "--drafter", text, expected="NAME=DIRECTORY")
    return name, Path(directory)


def _part(name: str, target: Path, given: dict[str, Path]) -> dict[str, Any]:
    """The part of kind speculative, its drafter trained if it is not there."""
    from shoal.core.parts import table as parts_of
    from shoal.train import zoo
    from shoal.train.zoo.drafters import drafter, drafters

    parts_of("speculative").load(name, where="--methods")
    if name in given:
        return {"name": name, "path": str(given[name])}
    if name in drafters():
        return {"name": name, "path": str(drafter(name, target, say=typer.echo))}
    if name in _DRAFTS:
        small = "shoal-draft-1m" if name == "draft_model" else "shoal-draft-8l"
        return {"name": name, "path": str(zoo.trained(small, typer.echo))}
    return {"name": name}


def _draw(rows: list[Row], path: Path) -> None:
    """Speed over plain decoding by tokens a step; on the line no step costs more than plain's."""
    from shoal.core.errors import StoreError, require
    from shoal.core.files import write_atomic
    from shoal.core.svg import Chart, Series

    require(path.suffix == ".svg", "--picture", path, expected="a name that ends in .svg")
    most = max(row.tokens_per_step for row in rows)
    chart = Chart(
        title="Does guessing pay here?",
        description="Speed over plain decoding by the tokens of a step. The line is what it would "
        "be if guesses and the rows that verify them took no time.",
        x_label="tokens a step",
        y_label="tokens/s over plain decoding",
        series=[
            Series("free guesses", (1.0, most), (1.0, most)),
            *(
                Series(row.method, (row.tokens_per_step,), (row.speedup,), line=False, points=True)
                for row in rows
            ),
        ],
        cover_y=(0.0,),
    )
    write_atomic(path, chart.render().encode(), error=StoreError)
