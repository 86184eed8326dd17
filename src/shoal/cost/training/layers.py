"""The layers of a model, the ways in which one may run, and what it then costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.cost.price.passes import PassSeconds
from shoal.ir import ModelShape


@dataclass(frozen=True, order=True)
class Strategy:
    """How a layer runs on the ranks of its stage.

    Args:
        dp: ranks that share the sequences of a micro-batch.
        tp: ranks that share its heads and widths.
        cp: ranks that share every sequence.
        shard: replicated, zero1, zero2 or zero3, over dp * cp ranks.
        recompute: only its input is kept.
    """

    dp: int = 1
    tp: int = 1
    cp: int = 1
    shard: str = "replicated"
    recompute: bool = False

    @property
    def layout(self) -> tuple[int, int, int]:
        """dp, tp and cp: where its input and output lie."""
        return self.dp, self.tp, self.cp

    def __str__(self) -> str:
        words = [f"dp{self.dp}", f"tp{self.tp}"] + [f"cp{self.cp}"] * (self.cp > 1)
        return " ".join([*words, self.shard] + ["recompute"] * self.recompute)


@dataclass(frozen=True)
class ModelLayer:
    """A layer of a model: a block.

    Args:
        name: of its kind; layers of one name cost the same.
        shape: a model of this one block, with an empty vocabulary.
        span: tokens back that a token attends to; all if not given.
    """

    name: str
    shape: ModelShape
    span: int | None = None


@dataclass(frozen=True)
class LayerCost:
    """What a layer costs a rank under a strategy.

    Args:
        forward: a micro-batch's forward pass, communication aside.
        backward: its backward pass, recomputation included.
        overhead_s: seconds of launching both that nothing hides.
        wire_s: seconds of communication of both passes that nothing hides.
        extra_s: what the last micro-batch takes longer, since gradients are summed.
        update_s: per step: update, and communication of updated parameters.
        forward_share: of overhead and wire that belong to the forward pass.
        states_bytes: weights, gradients and optimizer state, by cause.
        held_bytes: kept of one micro-batch from forward to backward.
        transient_bytes: beside them, while it is at work.
        sent_bytes: bytes that a rank sends in a step of one micro-batch.
    """

    forward: PassSeconds
    backward: PassSeconds
    overhead_s: float
    wire_s: float
    extra_s: float
    update_s: float
    forward_share: float
    states_bytes: dict[str, float] = field(default_factory=dict)
    held_bytes: float = 0.0
    transient_bytes: float = 0.0
    sent_bytes: float = 0.0

    @property
    def forward_s(self) -> float:
        """Seconds of a forward pass."""
        return self.forward.device + self.forward_share * (self.overhead_s + self.wire_s)

    @property
    def backward_s(self) -> float:
        """Seconds of a backward pass."""
        return self.backward.device + (1 - self.forward_share) * (self.overhead_s + self.wire_s)

    @property
    def micro_s(self) -> float:
        """Seconds of a micro-batch, both passes."""
        return self.forward_s + self.backward_s

    @property
    def once_s(self) -> float:
        """Seconds per step, independent of the number of micro-batches."""
        return self.extra_s + self.update_s

    @property
    def resident_bytes(self) -> float:
        """Weights, gradients and optimizer state."""
        return sum(self.states_bytes.values())


def layers_of(shape: ModelShape) -> tuple[ModelLayer, ...]:
    """The blocks of a model, first to last: dense ones, then, in a mixture, sparse ones."""
    dense = shape.num_dense_layers if shape.num_experts else shape.num_layers
    one = {"num_layers": 1, "vocab_size": 1}
    plain = ModelLayer(
        "block", shape.model_copy(update={**one, "num_experts": 0, "num_dense_layers": 0})
    )
    sparse = ModelLayer("experts", shape.model_copy(update={**one, "num_dense_layers": 0}))
    return (plain,) * dense + (sparse,) * (shape.num_layers - dense)
