"""Decoding by diffusion: blocks of masks that become text, as a part of a serving job."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from shoal.core.errors import ServeError, require
from shoal.core.parts import Choice, part, table
from shoal.core.traits import traits

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig


@part
class Diffusion:
    """Unmask several tokens per forward pass; for masked-diffusion models.

    Args:
        unmask: which tokens are unmasked in an iteration.
        refresh: what an iteration recomputes.
        iteration: input of the model at a masked position.
        block: masks of a block; blocks are decoded from left to right.
        unroll: iterations between two checks whether a block is finished.
        expected: expected tokens per iteration, used by plans; a served model reports its own value
            in ``/metrics``. With ``unmask: fixed`` it is derived from its steps.
    """

    traits: ClassVar[frozenset[str]] = frozenset({"whole_blocks"})
    unmask: Choice = Choice(name="threshold")
    refresh: Choice = Choice(name="dual")
    iteration: Choice = Choice(name="hard")
    block: Annotated[int, Ge(1)] = 32
    unroll: Annotated[int, Ge(1)] = 1
    expected: float = 3.0

    def __post_init__(self) -> None:
        require(
            self.expected >= 1,
            "decode.diffusion.expected",
            self.expected,
            expected="at least 1: every iteration unmasks one token",
        )
        for kind in ("unmask", "refresh", "iteration"):
            table(kind).build(getattr(self, kind), where=f"decode.diffusion.{kind}")

    def factory(self) -> str | None:
        return None

    def passes(self, size: int) -> int:
        """Iterations that a block of so many places is taken to need."""
        if "fixed_iterations" in traits("unmask", self.unmask):
            steps = self.unmask.options.get("steps")
            return size if steps is None else min(steps, size)
        return math.ceil(size / self.expected)

    def check(self, config: ModelConfig) -> None:
        require(
            not config.causal,
            "decode",
            "diffusion",
            expected=f"autoregressive for {config.name}, whose tokens see nothing behind them",
            hint="diffusion decodes models of masked diffusion; train one with a shape of family "
            "mdlm",
            error=ServeError,
        )
