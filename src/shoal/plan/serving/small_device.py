"""What a small device beside a host bears: bytes and seconds of a drafter and of target layers.

Bytes are those that :mod:`shoal.serve.decode.dovetail.small_device` counts where the drafter is
computed without the kernels of inference. Seconds are the cost model's: nothing is measured here.

Source: Zhang et al., Dovetail, 2025, sections 3.2 and 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shoal.core.errors import require
from shoal.core.parts import Choice, table
from shoal.cost.arithmetic import block_parameters, embedding_parameters
from shoal.cost.kernels.serving_engines import ENGINES
from shoal.cost.step_cost.predicted import PredictedStepCost, predicted_step_cost
from shoal.cost.step_cost.roofline import BYTES, cache_bytes_per_token
from shoal.ir import Machine, ModelShape
from shoal.plan.serving.heterogeneous import DraftOption
from shoal.plan.trees.drafting import RowCosts

# Tokens before the rows of a typical step, as of the host's predicted steps.
_BEFORE = 256
_ROWS = (1, 2, 4, 8, 16, 32, 64)


def tree_room(depth: int, breadth: int) -> int:
    """Places that trees take behind the last token, twice with what is drafted ahead."""
    return 2 * (breadth + 1) * (depth + 2)


def layers_share(shape: ModelShape) -> float:
    """Share of a step that is of the model's layers and not of its head, by their weights."""
    blocks = block_parameters(shape)
    return blocks / (blocks + shape.vocab_size * shape.hidden)


@dataclass(frozen=True, kw_only=True)
class SmallDevice:
    """A device, and a target of which it may have a drafter and the first layers.

    Args:
        machine: one device of it.
        shape: of the target.
        precision: fp32 or bf16, of weights, cache and states.
        places: tokens of the longest request, for which the caches have room; whole blocks.
        depth: levels of a tree.
        breadth: nodes of each level that are expanded.
    """

    machine: Machine
    shape: ModelShape
    precision: str
    places: int
    depth: int
    breadth: int

    def __post_init__(self) -> None:
        require(self.precision in BYTES, "precision", self.precision, expected=" or ".join(BYTES))
        require(self.places >= 1, "places", self.places, expected="1 or more")

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return int(BYTES[self.precision])

    @property
    def layer_bytes(self) -> int:
        """Of one layer of the target with its cache."""
        weights = self.itemsize * block_parameters(self.shape) // self.shape.num_layers
        one = self.shape.model_copy(update={"num_layers": 1})
        return weights + int(self.places * cache_bytes_per_token(one, self.precision))

    @cached_property
    def layer(self) -> RowCosts:
        """Predicted s of a step of one layer of the target, by its rows."""
        share = layers_share(self.shape) / self.shape.num_layers
        cost = predicted_step_cost(self.machine, self.shape, self.precision)
        return RowCosts(rows=_ROWS, seconds_of=tuple(share * self._pass_s(cost, n) for n in _ROWS))

    def option(self, name: str, layers: int, right: tuple[tuple[float, ...], ...]) -> DraftOption:
        """A drafter with predicted times.

        Raises:
            MachineError: the machine has no value for a required rate.
        """
        part = table("drafter").build(Choice(name="dovetail", options={"layers": layers}))
        dense = min(layers, self.shape.num_dense_layers)
        net = self.shape.model_copy(update={"num_layers": layers, "num_dense_layers": dense})
        numbers = part.parameters(self.shape) + embedding_parameters(self.shape)
        longest = self.places + tree_room(self.depth, self.breadth)
        cache = int(longest * cache_bytes_per_token(net, self.precision))
        # The gate's matrices pass beside those of layers and head.
        read = block_parameters(net) + net.vocab_size * net.hidden
        gate = 1 + 4 * net.hidden**2 / read
        level_s = gate * self._pass_s(
            predicted_step_cost(self.machine, net, self.precision), self.breadth
        )
        return DraftOption(
            layers=layers,
            nbytes=self.itemsize * numbers + cache,
            level_s=level_s,
            right=tuple(row[: self.breadth] for row in right[: self.depth]),
            name=name,
        )

    def _pass_s(self, cost: PredictedStepCost, rows: int) -> float:
        """A step without what an engine does for it on its host."""
        before = min(_BEFORE, self.places)
        engine = ENGINES["shoal"]
        return cost.seconds([(before, 1)] * rows) - engine.step_s - engine.sequence_s * rows
