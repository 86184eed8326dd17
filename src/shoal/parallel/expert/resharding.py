"""Experts get other owners now and then, and take their optimizer's state along.

Every so many steps each layer's owners are chosen anew from the loads that its router has had. The
rows of weights and of whatever the optimizer keeps of them then travel in one exchange, right
after the update; what is sent follows from two tables of owners that all ranks compute alike.
Every rank owns as many experts before as after, so all tensors stay where they are and what they
are: rows in them change.

Shapes: E experts, X experts that this rank owns.

Source: Hecate, 2025, section 4.2 (heterogeneous sharding).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import PlanError, require
from shoal.ir.hooks import StepHook, TrainStep
from shoal.parallel.expert.fssdp import CopiedExperts
from shoal.parallel.tensor.slices import Slices, is_expert

if TYPE_CHECKING:
    from torch import nn

    from shoal.parallel.protocols import Comm
    from shoal.plan.placement.protocols import Ints

# Under this tag the meter counts weights and optimizer state that go to new owners.
TAG = "expert_owners"


class ReshardedLayer(NamedTuple):
    """Experts of one layer that get other owners.

    Args:
        old: the rank that keeps each expert [E].
        new: the rank that is to keep it [E].
        tensors: [X, ...] of this rank, by rising number of the expert; the same on all ranks but
            for their values.
    """

    old: Ints
    new: Ints
    tensors: Sequence[Tensor]


class ReshardResult(NamedTuple):
    """What changed owners.

    Args:
        experts: that did, of all layers of this rank's stages.
        sent_bytes: that this rank sent.
    """

    experts: int
    sent_bytes: int


@torch.no_grad()
def move(layers: Sequence[ReshardedLayer], comm: Comm) -> int:
    """Bring every expert to its new owner; the tensors are changed in place.

    Args:
        layers: all that change, in the same order on all ranks.
        comm: the ranks that share out the experts.

    Returns:
        Bytes that this rank sent.
    """
    rank, peers = comm.rank, range(comm.world)
    sends: list[list[Tensor]] = [[] for _ in peers]
    sizes = [0] * comm.world
    for old_E, new_E, tensors in layers:
        mine = np.flatnonzero(old_E == rank)
        for other in peers:
            leaves = np.flatnonzero(new_E[mine] == other).tolist()
            comes = int(((old_E == other) & (new_E == rank)).sum())
            for tensor in tensors if other != rank else ():
                if leaves:
                    sends[other].append(_bytes(tensor[leaves]))
                sizes[other] += comes * tensor[0].nbytes
    like = layers[0].tensors[0].new_empty(0, dtype=torch.uint8)
    xs = [torch.cat(one) if one else like for one in sends]
    outs = [like.new_empty(size) for size in sizes]
    comm.all_to_all(outs, xs, tag=TAG).wait()
    read = [0] * comm.world
    for old_E, new_E, tensors in layers:
        had, has = np.flatnonzero(old_E == rank), np.flatnonzero(new_E == rank)
        source_X = old_E[has]
        for tensor in tensors:
            fresh = torch.empty_like(tensor)
            for other in peers:
                at = np.flatnonzero(source_X == other)
                if other == rank:
                    fresh[at.tolist()] = tensor[np.searchsorted(had, has[at]).tolist()]
                elif len(at):
                    end = read[other] + len(at) * tensor[0].nbytes
                    rows = outs[other][read[other] : end].clone().view(tensor.dtype)
                    fresh[at.tolist()] = rows.view(len(at), *tensor.shape[1:])
                    read[other] = end
            tensor.copy_(fresh)
    return sum(x.nbytes for x in xs)


def _bytes(rows: Tensor) -> Tensor:
    return rows.detach().contiguous().reshape(-1).view(torch.uint8)


class Resharding(StepHook):
    """Chooses and changes the owners of a model's experts, after some updates.

    Args:
        model: as this rank has it.
        slices: what this rank holds of each parameter; changes with the owners.
        owned: parameters that this rank's optimizer updates, by name.

    Attributes:
        last: what the last step moved; None where no owners were chosen.
    """

    kind = "owners"

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        slices: dict[str, Slices],
        owned: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        self._comm, self._slices, self._owned = comm, slices, owned
        self.last: ReshardResult | None = None
        self._layers = {
            f"{name}.": module
            for name, module in model.named_modules()
            if isinstance(module, CopiedExperts) and module.placer.every
        }

    def after_update(self, step: TrainStep) -> None:
        """Choose owners where that is due, and bring experts and their state to them.

        Raises:
            PlanError: an optimizer keeps of experts what is not of their shape, or a placer gave
                a rank more or fewer experts than it has.
        """
        self.last = None
        if not any((step.number + 1) % one.placer.every == 0 for one in self._layers.values()):
            return
        owned, state = self._owned(), step.state()
        moves, owners = [], {}
        for prefix, one in self._layers.items():
            new_E = one.placer.owners(one.expected.loads_E, one.devices, one.owner_E)
            if (new_E == one.owner_E).all():
                continue
            count_N = np.bincount(new_E, minlength=one.devices.count)
            require(
                bool((count_N == one.num_experts // one.devices.count).all()),
                f"owners of {prefix}experts",
                count_N.tolist(),
                expected=f"{one.num_experts // one.devices.count} experts of every rank",
                error=PlanError,
            )
            owners[prefix] = new_E
            tensors = _of(prefix, owned, state)
            if tensors:
                moves.append(ReshardedLayer(one.owner_E, new_E, tensors))
        sent = move(moves, self._comm) if moves else 0
        count = 0
        for prefix, new_E in owners.items():
            one = self._layers[prefix]
            count += int((one.owner_E != new_E).sum())
            one.moved(new_E)
            mine = np.flatnonzero(new_E == self._comm.rank).tolist()
            for name, whole in self._slices.items():
                if name.startswith(prefix) and is_expert(name):
                    self._slices[name] = whole.of_rows(mine)
        self.last = ReshardResult(count, sent)

    def events(self) -> Mapping[str, Mapping[str, Any]]:
        """What has moved in the last step."""
        if self.last is None:
            return {}
        return {"step": {"moved_experts": self.last.experts, "moved_bytes": self.last.sent_bytes}}


def _of(
    prefix: str, owned: Mapping[str, Tensor], state: Mapping[str, Mapping[str, Tensor]]
) -> list[Tensor]:
    """Weights of a layer's experts that this rank updates, and what the optimizer keeps of them."""
    results = []
    for leaf in ("gate_up_proj", "down_proj"):
        name = f"{prefix}{leaf}"
        if name not in owned:
            continue
        results.append(owned[name].detach())
        for key, value in sorted(state.get(name, {}).items()):
            if not value.dim():
                continue
            require(
                value.shape == owned[name].shape,
                f"optimizer state {name}.{key}",
                list(value.shape),
                expected=f"{list(owned[name].shape)}, as of the weights, or owners that stay",
                hint="use optimizer adamw, or placer: {name: fssdp, resharding_every: null}",
                error=PlanError,
            )
            results.append(value)
    return results
