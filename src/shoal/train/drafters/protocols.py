"""What a drafter's training promises.

A part says what it costs and begins a learner for a target. The learner is a net, a loss of a
few sequences of features, and guesses that can be held against what the target said. Features of
a token are the target's final hidden state at its place, of which its head makes the next token.

Shapes: B sequences, T tokens, D hidden, V vocabulary, K levels, P judged places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shoal.ir.drafting import DrafterJob, DrafterWork
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.model.transformer import Transformer


class TargetRows(NamedTuple):
    """Sequences and what the target made of them.

    Args:
        tokens: int64 [B, T].
        hidden: features [B, T, D], in the dtype of the computation.
    """

    tokens: Tensor
    hidden: Tensor


class DrafterLearner(Protocol):
    """A drafter that is being trained for one target."""

    net: nn.Module

    def groups(self) -> Sequence[tuple[Sequence[nn.Parameter], float]]:
        """Parameters to train, and the learning rate of each group."""

    def loss(self, rows: TargetRows, *, step: int, total: int) -> Tensor:
        """What to make small, a scalar; draws depend on the step alone.

        Args:
            rows: sequences of features.
            step: which step, from 0.
            total: steps of the run.
        """

    def guesses(self, rows: TargetRows, places: Sequence[int]) -> Tensor:
        """Logits [K, B P, V] of the levels at some places, row by row.

        Level 0 is the first token that is guessed: the one behind the token that the target's
        own head says. Logits of level k at place t are judged by token t + 2 + k, and given
        features up to t and the tokens before the judged one.
        """

    def state(self) -> Mapping[str, Tensor]:
        """The tensors of the drafter's file."""

    def finish(self, directory: Path) -> Path | None:
        """Write what is left beside the drafter; the directory of its target if that is new."""


class DrafterPart(Protocol):
    """A part of kind ``drafter``: what is trained, and by which loss."""

    def parameters(self, shape: ModelShape) -> int:
        """Parameters of the drafter for a target of this shape."""

    def estimate(self, work: DrafterWork, machine: Machine) -> Estimate:
        """Time and memory of a step; allocates no tensors."""

    def levels(self) -> int:
        """K, the tokens that it guesses one after the other."""

    def check(self, job: DrafterJob, shape: ModelShape) -> None:
        """Refuse what cannot be trained.

        Raises:
            PlanError: names the key and what is possible.
        """

    def begin(self, target: Transformer, job: DrafterJob) -> DrafterLearner:
        """A fresh learner for a target, whose weights stand still."""
