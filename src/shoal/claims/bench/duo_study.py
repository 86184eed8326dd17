"""``shoal explain duo``: where does a token need its big layers, and do the routers know?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from shoal.core.errors import ModelError
from shoal.core.parts import part
from shoal.core.svg import Chart, Series, stacked
from shoal.core.tables import Table
from shoal.ir import Explanation, Machine, Progress

if TYPE_CHECKING:
    from shoal.claims.bench.duo import DuoResult


@part
class DuoStudy:
    """Analyze where tokens need the big layers of a Duo-LLM model, and compare its routers.

    Shows the loss over computation for random routes, one pattern for all tokens, trained routers,
    and an oracle; which layers each of them makes big; and which tokens benefit from more
    computation.

    **Examples**

        shoal explain duo routed

        shoal explain duo routed --budget 2 --picture duo.svg

        shoal explain duo deep --search beam --width 8 --tokens 512 -o json

    Args:
        directory: directory of a model of ffn: duo.
        routers: take the routers of this directory instead.
        budget: largest number of big layers of the oracle.
        search: search of the oracle: exhaustive (all patterns), beam or descent.
        width: patterns that a beam keeps.
        tokens: held-out tokens to judge.
        length: tokens of a sequence.
        text: text, a file or a directory; Python's standard library otherwise.
        seed: seed of the random routes.
    """

    subject: ClassVar = "directory"
    machine: ClassVar = None

    directory: Path
    routers: Path | None = None
    budget: NonNegativeInt = 1
    search: Literal["exhaustive", "beam", "descent"] = "exhaustive"
    width: PositiveInt = 4
    tokens: Annotated[int, Field(ge=64)] = 2048
    length: Annotated[int, Field(ge=8)] = 64
    text: Path | None = None
    seed: int = 0

    def explain(self, machine: Machine | None, progress: Progress) -> Explanation:
        """Run the model over held-out text with routes of every kind."""
        import torch

        from shoal.claims.bench.duo import study
        from shoal.corpora.tokens import prepare
        from shoal.model import huggingface
        from shoal.train.routers import samples, take_routers

        tokenizer = self.directory / "tokenizer.json"
        model = huggingface.read(self.directory, torch.float32).eval()
        if self.routers is not None:
            take_routers(model, self.routers)
        if not tokenizer.is_file():
            raise ModelError(f"{tokenizer}: not found; copy the model's tokenizer there")
        data = "stdlib" if self.text is None else {"name": "text", "path": str(self.text)}
        split = prepare(data, str(tokenizer), model.config.vocab_size)
        length = min(self.length, model.config.max_position - 1)
        inputs, targets = samples(split.heldout, max(1, self.tokens // length), length)
        result = study(
            model,
            inputs,
            targets,
            samples(split.train, 8, length)[0],
            budget=self.budget,
            search_by=self.search,
            width=self.width,
            seed=self.seed,
            progress=lambda what, done: progress(done, 1.0, what),
        )
        return Explanation(
            blocks=(
                _losses(result, self.directory.name),
                _routes(result),
                f"the oracle evaluated {result.evaluations} patterns per token; difficulty (loss "
                f"of all-small minus oracle) and loss correlate by {result.correlation:.2f}",
            ),
            data=dataclasses.asdict(result),
            picture=lambda: _drawn(result),
        )


def _losses(found: DuoResult, name: str) -> Table:
    return Table(
        title=f"{name}: loss as a function of computation, {found.tokens} held-out tokens",
        columns=("routes by", "chosen", "share of the all-big computation", "loss"),
        rows=tuple(
            (arm.name, arm.chosen, f"{arm.share:.3f}", f"{arm.loss:.4f}") for arm in found.arms
        ),
        right="  rr",
    )


def _routes(found: DuoResult) -> Table:
    who = list(next(iter(found.layers.values())))
    pairs = [(name, route) for name in who for route in found.layers]
    return Table(
        title=f"tokens per layer and route; the oracle uses at most {found.budget} big layers",
        columns=("layer", *(f"{name}: {route}" for name, route in pairs)),
        rows=tuple(
            (
                f"{layer}",
                *(f"{100 * found.layers[route][name][layer]:.0f} %" for name, route in pairs),
            )
            for layer in range(len(found.layers["big"][who[0]]))
        ),
        right="r" * (1 + len(pairs)),
    )


def _drawn(found: DuoResult) -> str:
    """Curves, routes by layer, and difficulty by loss, below each other."""
    names = list(dict.fromkeys(arm.name for arm in found.arms))
    layers = found.layers["big"]
    return stacked(
        [
            Chart(
                title="Loss and computation",
                description="Mean loss of held-out tokens against the share of the all-big "
                "model's feed-forward operations, for each routing.",
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
                title="Difficulty and loss",
                description="For each token, the gain of the oracle over all-small against the "
                "loss with all layers big.",
                x_label="loss, all big (nats)",
                y_label="difficulty (nats)",
                series=[Series("tokens", found.losses, found.difficulty, line=False, points=True)],
            ),
        ]
    )
