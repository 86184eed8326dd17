"""``shoal study``: what can be learned from a trained model, one question at a time."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.app.show import Format

if TYPE_CHECKING:
    from shoal.claims.bench.duo import Study

__all__ = ["app"]

app = typer.Typer(help="Questions to a trained model.", no_args_is_help=True)


class Search(StrEnum):
    """How the oracle looks for the best pattern of a token."""

    exhaustive = "exhaustive"
    beam = "beam"
    descent = "descent"


@app.callback()
def _group() -> None:
    """Questions to a trained model."""


@app.command("duo")
def duo(
    directory: Annotated[Path, typer.Argument(help="Directory of a model of ffn: duo.")],
    routers: Annotated[
        Path | None, typer.Option(help="Take the routers of this directory instead.")
    ] = None,
    budget: Annotated[int, typer.Option(help="Most big layers of the oracle.", min=0)] = 1,
    search: Annotated[
        Search, typer.Option(help="Of the oracle: all patterns, or few of many layers.")
    ] = Search.exhaustive,
    width: Annotated[int, typer.Option(help="Patterns that a beam keeps.", min=1)] = 4,
    tokens: Annotated[int, typer.Option(help="Held-out tokens to judge.", min=64)] = 2048,
    length: Annotated[int, typer.Option(help="Tokens of a sequence.", min=8)] = 64,
    text: Annotated[
        Path | None,
        typer.Option(help="Text, a file or a directory; Python's standard library otherwise."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of routes by chance.")] = 0,
    picture: Annotated[
        Path | None, typer.Option(help="SVG file: curves, routes by layer, difficulty.")
    ] = None,
    output: Annotated[Format, typer.Option("--output", "-o", help="text or json.")] = Format.text,
) -> None:
    """Where does a token need its big layers, and do the routers know?

    Loss by computation for routes by chance, one pattern for all, trained routers, and an oracle;
    which layers each of them makes big; and which tokens more computation helps.

    **Examples**

        shoal study duo routed

        shoal study duo routed --budget 2 --picture duo.svg

        shoal study duo deep --search beam --width 8 --tokens 512 -o json
    """
    import dataclasses

    import torch

    from shoal.app.show import WorkBar, as_json
    from shoal.claims.bench.duo import study
    from shoal.core.errors import ModelError, StoreError, require
    from shoal.core.files import write_atomic
    from shoal.corpora.tokens import prepare
    from shoal.model import huggingface
    from shoal.train.routers import samples, take_routers

    if picture is not None:
        require(picture.suffix == ".svg", "--picture", picture, expected="a name that ends in .svg")
    tokenizer = directory / "tokenizer.json"
    model = huggingface.read(directory, torch.float32).eval()
    if routers is not None:
        take_routers(model, routers)
    if not tokenizer.is_file():
        raise ModelError(f"{tokenizer}: missing, and text must be read; copy the model's own there")
    data = "stdlib" if text is None else {"name": "text", "path": str(text)}
    split = prepare(data, str(tokenizer), model.config.vocab_size)
    length = min(length, model.config.max_position - 1)
    inputs, targets = samples(split.heldout, max(1, tokens // length), length)
    with WorkBar("studying routes", quiet=output is Format.json) as bar:
        found = study(
            model,
            inputs,
            targets,
            samples(split.train, 8, length)[0],
            budget=budget,
            search_by=search.value,
            width=width,
            seed=seed,
            progress=lambda what, done: bar(done, 1.0, what),
        )
    if picture is not None:
        write_atomic(picture, _drawn(found), error=StoreError)
    if output is Format.json:
        as_json(dataclasses.asdict(found))
        return
    _show(found, directory)
    if picture is not None:
        typer.echo(f"wrote {picture}")


def _show(found: Study, directory: Path) -> None:
    from shoal.app.show import table

    table(
        f"{directory.name}: loss by computation, {found.tokens} held-out tokens",
        ("routes by", "chosen", "of all big's computation", "loss"),
        [(arm.name, arm.chosen, f"{arm.share:.3f}", f"{arm.loss:.4f}") for arm in found.arms],
        numeric="  rr",
    )
    who = list(next(iter(found.layers.values())))
    layers = len(found.layers["big"][who[0]])
    table(
        f"tokens of each layer by route; the oracle has at most {found.budget} big",
        ("layer", *(f"{name}: {route}" for name in who for route in found.layers)),
        [
            (
                f"{layer}",
                *(
                    f"{100 * found.layers[route][name][layer]:.0f} %"
                    for name in who
                    for route in found.layers
                ),
            )
            for layer in range(layers)
        ],
        numeric="r" * (1 + len(who) * len(found.layers)),
    )
    typer.echo(
        f"the oracle was asked for {found.asked} patterns of each token; difficulty (all small "
        f"less the oracle) and loss correlate by {found.correlation:.2f}"
    )


def _drawn(found: Study) -> str:
    """Curves, routes by layer, and difficulty by loss, below each other."""
    from shoal.core.svg import Chart, Series, stacked

    names = list(dict.fromkeys(arm.name for arm in found.arms))
    layers = found.layers["big"]
    return stacked(
        [
            Chart(
                title="Loss by computation",
                description="Mean loss of a held-out token by the share of the all-big model's "
                "feed-forward operations, for each way to choose routes.",
                x_label="share of the all-big computation",
                y_label="loss (nats)",
                series=[
                    Series(
                        name,
                        [arm.share for arm in found.of(name)],
                        [arm.loss for arm in found.of(name)],
                        points=True,
                    )
                    for name in names
                ],
            ),
            Chart(
                title="Big layers",
                description="Share of the tokens that take the big feed-forward layer, by layer.",
                x_label="layer",
                y_label="share of tokens",
                series=[
                    Series(name, list(range(len(shares))), shares, points=True)
                    for name, shares in layers.items()
                ],
                cover_y=(0.0, 1.0),
            ),
            Chart(
                title="Difficulty by loss",
                description="Of each token what the oracle gains over all small, by its loss with "
                "all layers big.",
                x_label="loss, all big (nats)",
                y_label="difficulty (nats)",
                series=[Series("tokens", found.losses, found.difficulty, line=False, points=True)],
            ),
        ]
    )
