"""What an engine is given: where a model's values come from, and the sequences of a step.

Shapes: b sequences of one replica, T tokens of a sequence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer
    from shoal.plan.balance.sequences.assignment import Assignment


class WeightSource(Protocol):
    """Where the values of a model come from."""

    config: ModelConfig

    def model(self) -> Transformer:
        """The whole model."""

    def whole(self, name: str) -> Tensor:
        """One whole parameter, by its name in :class:`Transformer`."""


class ReplicaSequences(NamedTuple):
    """The sequences of one data-parallel replica in one step.

    Args:
        inputs: token ids int64 [b, T].
        targets: next tokens int64 [b, T]; -100 counts nothing.
        documents: document ids int32 [b, T] of the inputs, or None.
        first: number of the first sequence in the global batch.
        step: global step.
        weights: how much the tokens of each sequence count fp32 [b]; 1 if not given.
        counted: tokens that the loss is a mean over; the counted targets, if not given.
        plan: which rank computes which sequences, where that was asked ahead.
    """

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None
    first: int
    step: int
    weights: Tensor | None = None
    counted: int | None = None
    plan: Assignment | None = None
