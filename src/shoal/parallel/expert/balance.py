"""How a step's tokens were shared out among experts, over all ranks, and what gates learn from it.

Shapes: L layers, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shoal.ir.hooks import StepHook, TrainStep
from shoal.model.feedforward import Experts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.ir.comm import Comm

_TAG = "balance"


class Balance(NamedTuple):
    """Load balance of a step.

    Args:
        imbalance: tokens that chose an expert, the most over the mean, of the worst layer: 1 where
            all have as many, E where one has all.
        dropped: share of the choices that found no room.
        loss: mean balance loss of layers and sequences, without its coefficient; 1 where all is
            even, None where none is computed.
    """

    imbalance: float
    dropped: float
    loss: float | None


class Routers(StepHook):
    """The routers of a model on one rank: what they did is summed, and their gates learn from it.

    Args:
        model: as this rank has it; what gates keep without a gradient loses its own.
        layers: blocks L of the whole model.
        experts: E; 0 for a dense model, in which nothing happens.
        sequences: of a step.
        comm: ranks of a step; None for a single process.

    Attributes:
        kept: parameters that gates change themselves, by name.
        balance: of the step that was gathered last.
    """

    kind = "routers"

    def __init__(
        self, model: nn.Module, layers: int, experts: int, sequences: int, comm: Comm | None
    ) -> None:
        self._layers, self._sequences = layers, sequences
        self._count, self._comm = experts, comm
        # A rank may know a layer as part of a stage and of the model: it is one.
        self._experts = {
            module.layer: module for module in model.modules() if isinstance(module, Experts)
        }
        leaves = frozenset(name for one in self._experts.values() for name in one.gate.kept)
        self.kept = {
            name: parameter.requires_grad_(False)
            for name, parameter in model.named_parameters()
            if name.rpartition(".")[2] in leaves
        }
        self.balance: Balance | None = None
        self._load_LE: Tensor | None = None

    @torch.no_grad()
    def finish(self) -> None:
        """Sum what the routers of all ranks did since the last time."""
        comm, experts = self._comm, self._count
        if not experts:
            return
        device = None if comm is None else comm.device
        table_LC = torch.zeros(self._layers, experts + 3, dtype=torch.float64, device=device)
        for layer, one in self._experts.items():
            for result in one.tallies.values():
                table_LC[layer] += result / one.copies
            one.tallies.clear()
        if comm is not None:
            comm.all_reduce(table_LC, tag=_TAG).wait()
        load_LE, dropped_L = table_LC[:, :experts].round(), table_LC[:, experts].round()
        total_L = load_LE.sum(1)
        if not bool((total_L > 0).all()):  # no pass was made in training
            return
        self._load_LE = load_LE
        balanced = any(one.moe.aux_loss for one in self._experts.values())
        self.balance = Balance(
            float((load_LE.amax(1) * experts / total_L).max()),
            float(dropped_L.sum() / total_L.sum()),
            float(table_LC[:, experts + 1].mean() / self._sequences) if balanced else None,
        )

    @torch.no_grad()
    def published(self, step: TrainStep) -> None:
        """The step that was gathered has updated the model: gates update what they keep."""
        if self._load_LE is None:
            return
        for layer, one in self._experts.items():
            one.settle(self._load_LE[layer])
        self._load_LE = None

    def events(self) -> Mapping[str, Mapping[str, Any]]:
        """How even the last step was."""
        if self.balance is None:
            return {}
        loss = {} if self.balance.loss is None else {"balance": self.balance.loss}
        even = {"imbalance": self.balance.imbalance, "dropped": self.balance.dropped}
        return {"step": even | loss}
