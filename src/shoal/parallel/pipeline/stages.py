"""Other stages of a pipeline than :class:`~shoal.parallel.pipeline.stage.Stage`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from shoal.memory.activations.cache import TensorCache
    from shoal.model.dropout import Dropout
    from shoal.model.routing import StepRouting
    from shoal.model.transformer import Transformer
    from shoal.parallel.protocols import MicroBatch


class WholeStage:
    """The whole model as the only stage."""

    def __init__(
        self,
        model: Transformer,
        compiled: bool,
        dropout: Dropout | None,
        recomputed: frozenset[int],
        routing: StepRouting | None,
    ) -> None:
        self._routing = routing
        self._loss = torch.compile(model.loss_sum) if compiled else model.loss_sum
        self._dropout = dropout
        self._recomputed = recomputed

    def __call__(self, x: Tensor | None, mb: MicroBatch, *, recompute: bool) -> Tensor:
        """The sum of the token losses of a micro-batch."""
        extra: dict[str, Any] = {}
        if self._dropout is not None:
            extra = {"dropout": self._dropout.at(mb.step, mb.row)}
        if self._routing is not None:
            extra["routing"] = replace(self._routing, step=mb.step, row=mb.row)
        if mb.weights is not None:
            extra["weights_B"] = mb.weights
        again = recompute or self._recomputed
        return self._loss(
            mb.tokens, mb.targets, documents_BT=mb.documents, recompute=again, **extra
        )


class HintedStage:
    """A stage that reports whose passes it runs."""

    def __init__(self, stage: Any, saved: TensorCache) -> None:
        self._stage, self._saved = stage, saved

    def __call__(self, x: Tensor | None, mb: MicroBatch, *, recompute: bool) -> Tensor:
        """What the stage gives, of the micro-batch that is named to who keeps what it saves."""
        if torch.is_grad_enabled():
            self._saved.microbatch(mb.row)
        tensor: Tensor = self._stage(x, mb, recompute=recompute)
        return tensor
