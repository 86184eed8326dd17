"""A share of what the blocks save for the backward pass goes to the host during the forward pass.

The plan says which share of a pass, so that few ranks hold a long sequence. What is saved goes as
soon as less than this share of the bytes so far has gone: every layer sends about the share of its
own, behind its own computing, and in all at most one tensor more goes than was planned. The
backward pass has a layer's bytes fetched ahead of it. Weights stay, and so does what all blocks
are given alike, such as the tables of positions.

On a CPU device and host are the same memory: the copies are made and counted, and save nothing.

Source: Ge et al., ByteScale, 2025, section 5 (selective offloading).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.memory.activations.offloaded import TensorPlaceholder
from shoal.memory.activations.protocol import ResidentTensor, weight_of_cast
from shoal.memory.activations.waiting import Waiting
from shoal.memory.tiers.places import Tiers
from shoal.parallel.shard.units import units

if TYPE_CHECKING:
    from shoal.cost.training.sequences import SequenceCost
    from shoal.plan.balance.sequences.assignment import SequenceAssigner

    _Storages = weakref.WeakValueDictionary[int, torch.UntypedStorage]

# Bytes of the host that may be taken, whatever is expected.
_LEAST_ROOM = 2**26
# Use of the device is not limited here: the plan did that before.
_ANY_BYTES = 2**62


class _Share(Waiting):
    """See :class:`~shoal.memory.activations.waiting.Waiting`; sends the planned share of the bytes.

    Args:
        tiers: places and ways.
        layers: blocks of the model.
    """

    def __init__(self, tiers: Tiers, layers: int) -> None:
        # What one layer has sent may be back ahead of its use.
        super().__init__(tiers, lambda: self.sent_bytes // layers)
        self.ratio = 0.0
        self.saved_bytes = self.sent_bytes = 0
        self._staying: _Storages = weakref.WeakValueDictionary()

    def begin(self) -> None:
        """A pass begins."""
        super().begin()
        self.saved_bytes = self.sent_bytes = 0
        self._staying.clear()

    def stays(self, tensor: Tensor) -> bool:
        """Whether a tensor is left where it is; counts its storage when it is first seen."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if self._staying.get(number) is storage:
            return True
        known = self._known.get(number)
        if known is not None and known.source() is storage:
            return False
        self.saved_bytes += storage.nbytes()
        if super().stays(tensor) or self.sent_bytes >= self.ratio * self.saved_bytes:
            self._staying[number] = storage
            return True
        self.sent_bytes += storage.nbytes()
        return False


class HostShare:
    """Sends a share of what a rank's forward passes save to the host.

    Args:
        model: its parameters stay.
        blocks: blocks whose saved activations may be offloaded.
        device: where the rank computes.
        host_bytes: most bytes on the host at one time.

    Attributes:
        kept_bytes: most bytes that the blocks of a pass have left on the device, since
            :meth:`begin`.
        sent_bytes: that went to the host since then.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        *,
        device: torch.device | str,
        host_bytes: int,
    ) -> None:
        self._model, self._blocks = model, blocks
        self._device, self._host_bytes = device, host_bytes
        self._tiers: Tiers | None = None
        self._share: _Share | None = None
        self._given: list[torch.UntypedStorage] = []
        self._inside = False
        self.kept_bytes = self.sent_bytes = 0

    def begin(self) -> None:
        """A step begins."""
        self.kept_bytes = self.sent_bytes = 0

    @contextmanager
    def during(self, ratio: float) -> Iterator[None]:
        """Around the forward pass of a micro-step, of which ``ratio`` goes to the host.

        Raises:
            TierFullError: the host has less room than was planned.
        """
        share = self._opened()
        share.begin()
        share.ratio = ratio
        weights = {p.untyped_storage()._cdata for p in self._model.parameters()}

        def enter(_block: nn.Module, args: tuple[Any, ...]) -> None:
            # All but the first are given to all blocks alike; held, so that none is taken for them.
            given = [x.untyped_storage() for x in args[1:] if isinstance(x, Tensor)]
            self._given, self._inside = given, True

        def leave(*_: Any) -> None:
            self._given, self._inside = [], False

        def pack(tensor: Tensor) -> TensorPlaceholder | ResidentTensor:
            number = tensor.untyped_storage()._cdata
            alike = number in weights or any(number == one._cdata for one in self._given)
            if not self._inside or alike or weight_of_cast(tensor) is not None:
                return ResidentTensor(tensor)
            result = share.pack(tensor)
            return result if isinstance(result, TensorPlaceholder) else ResidentTensor(result)

        def unpack(found: TensorPlaceholder | ResidentTensor) -> Tensor:
            return found.get() if isinstance(found, ResidentTensor) else share.unpack(found)

        hooks = [block.register_forward_pre_hook(enter) for block in self._blocks]
        hooks += [block.register_forward_hook(leave, always_call=True) for block in self._blocks]
        try:
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                yield
        finally:
            for hook in hooks:
                hook.remove()
        share.make_room()
        self.kept_bytes = max(self.kept_bytes, share.saved_bytes - share.sent_bytes)
        self.sent_bytes += share.sent_bytes

    def close(self) -> None:
        """End the threads that copy."""
        if self._tiers is not None:
            self._tiers.close()
            self._tiers = self._share = None

    def _opened(self) -> _Share:
        if self._share is None:
            self._tiers = Tiers(
                device=self._device,
                device_bytes=_ANY_BYTES,
                host_bytes=self._host_bytes,
                strict=False,
            )
            self._share = _Share(self._tiers, len(self._blocks))
        return self._share


def host_share(
    assigner: SequenceAssigner,
    cost: SequenceCost,
    model: nn.Module,
    longest: int,
    ranks: int,
    device: torch.device | str,
) -> HostShare | None:
    """What takes activations to the host, if an assigner plans that; else None.

    Args:
        assigner: of the job.
        cost: that it goes by.
        model: of this rank.
        longest: tokens of the longest sequence.
        ranks: of the pool.
        device: where the rank computes.

    Raises:
        PlanError: the pool does not hold the longest sequence, for all that the host takes.
    """
    if getattr(assigner, "offload", "none") == "none":
        return None
    # How much the host takes is a matter of the machine's rates, which are known here.
    assigner.assign([longest], ranks, cost)
    # Twice: of fp64, or of blocks that are rounded up to sectors.
    room = _LEAST_ROOM + 2 * int(longest * cost.kept_bytes)
    return HostShare(model, units(model)[0], device=device, host_bytes=room)
