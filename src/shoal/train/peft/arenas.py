"""What the memory of a fine-tuning run is for: base, adapter, gradients, optimizer, activations.

What lies there between steps is counted tensor by tensor, each storage once. What passes need is
counted while they run: the most that operators had left alive at one time, beside all that was
there before.

Source: Han et al., Parameter-Efficient Fine-Tuning for Large Models: A Comprehensive Survey, 2024,
section 5.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.memory.tiers.device import DeviceScope
from shoal.memory.tiers.tier import BudgetedTier
from shoal.train.peft.run.mezo import ZerothOrder

if TYPE_CHECKING:
    from shoal.train.peft.run.handle import ModelPeftHandle

# Nothing is held back: the budget of what is counted.
_NO_BUDGET = 2**50


class Arenas:
    """Counts the memory of one rank of a fine-tuning run."""

    def __init__(self, model: nn.Module, handle: ModelPeftHandle) -> None:
        self._model, self._handle = model, handle
        self._activations = 0

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Forward and backward passes run in here; they take longer for it."""
        standing = list(self._standing())
        device = standing[0].device
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            yield
            self._activations = torch.cuda.max_memory_allocated(device) - before
            return
        tier = BudgetedTier("passes", _NO_BUDGET)
        scope = DeviceScope(tier, strict=False)
        for tensor in standing:
            scope.adopt(tensor)
        before = tier.stats.used
        tier.stats.peak = before
        with scope:
            yield
        self._activations = tier.stats.peak - before

    def _standing(self) -> Iterator[Tensor]:
        """What is there before passes begin."""
        for tensor in itertools.chain(self._model.parameters(), self._model.buffers()):
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad

    def bytes(self, state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, int]:
        """Bytes by arena."""
        trained = list(self._handle.trainable().values())
        own = [*self._handle.state().values(), *self._handle.buffers().values()]
        if not isinstance(self._handle, ZerothOrder):  # which moves the base itself
            own += trained
        mine = {_key(tensor) for tensor in own}
        standing = itertools.chain(self._model.parameters(), self._model.buffers())
        return {
            "base": _bytes(tensor for tensor in standing if _key(tensor) not in mine),
            "adapter": _bytes(own),
            "gradients": _bytes(p.grad for p in trained if p.grad is not None),
            "optimizer": _bytes(v for values in state.values() for v in values.values()),
            "activations": self._activations,
        }


def _key(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, what they share once; of a storage that holds more, their own alone."""
    numbers: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        numbers[_key(tensor), int(tensor.storage_offset())] = tensor.nbytes
    return sum(numbers.values())
