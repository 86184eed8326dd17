"""Gradients of finished layers are summed in slices while experts' tokens travel.

The backward pass of a layer of experts has two holes, in which the network between nodes would
idle: after its tokens' gradients are sent out in chunks, until they come back; and the rest of the
block, which sends nothing. In each a slice of what later blocks have left to sum begins to travel,
the last block's gradients first. What no slice took travels after the last backward pass; the
engine's ``finish`` waits for all of it before the gradients' norm is taken. ::

    tokens    out 1 2 3 |           back 1 2 3
    gradients           | slice                | slice while attention goes back

Gradients of experts travel in buckets of their own, over the ranks that hold the same experts.

Source: Pan et al., FSMoE, 2025, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.ir.hooks import StepHook
from shoal.parallel.expert.dispatch import DispatchedExperts

if TYPE_CHECKING:
    from torch import nn

    from shoal.parallel.shard.folded import FoldedModel
    from shoal.parallel.shard.replicated import ReplicatedModel

# What is done before the last block's backward pass begins.
_HEAD = ("norm", "output")


class GradientSlices(StepHook):
    """Sends slices of the gradients during the backward passes of expert layers.

    Args:
        local: the model of this rank, all of whose blocks are here.
        sharded: sums its gradients.
        slices: bytes beside the experts and beside the rest of a block, of each block from first
            to last, or of all alike.
        layers: blocks.
    """

    kind = "slices"

    def __init__(
        self,
        local: nn.Module,
        sharded: FoldedModel,
        slices: Sequence[tuple[int, int]],
        layers: int,
    ) -> None:
        def done(name: str) -> int:
            """The place of a parameter in the order in which gradients are done."""
            first, *rest = name.split(".")
            if first == "blocks":
                return layers - int(rest[0])
            return 0 if first in _HEAD else layers + 1

        self._sharded, sums = sharded, sharded.sliced()
        sums.slice_in(done)
        for number, block in local.blocks.items():  # type: ignore[operator, union-attr]
            if isinstance(block.mlp, DispatchedExperts):
                pair = slices[int(number) if len(slices) > 1 else 0]
                block.mlp.holes = partial(_fill, sums, layers - int(number), pair)

    def events(self) -> Mapping[str, Mapping[str, Any]]:
        """Bytes of all gradients that were sent in the backward passes, and after them."""
        hidden, after = self._sharded.sent
        return {"step": {"gradients_hidden_bytes": hidden, "gradients_after_bytes": after}}


def _fill(sums: ReplicatedModel, before: int, pair: tuple[int, int], hole: int) -> None:
    """Send what is for a hole, 0 beside the experts and 1 beside the rest, of later blocks."""
    if pair[hole]:
        sums.send(pair[hole], before)
