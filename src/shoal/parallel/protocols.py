"""What a sharding part promises to the training loop.

A part's ``apply`` wraps a model and returns a :class:`Sharded`. The loop then calls,
each step and on every rank in the same order: ``accumulate`` around each micro-batch's
backward pass, ``finish`` once, ``grad_norm``, the optimizer on ``owned``, ``publish``.

Gradients are sums, never means: the loop divides the loss by the global token count
before it goes backward, so ragged micro-batches need no special case.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from shoal.ir import Estimate, Machine, Work

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.parallel.comm import TorchComm

__all__ = ["Held", "Shard", "Sharded"]


class Held(NamedTuple):
    """A parameter's local part and where it lies."""

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Sharded(Protocol):
    """A model in training whose gradients are summed over the ranks."""

    model: nn.Module

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch; gradients travel with the ``last``."""
        ...

    def finish(self) -> None:
        """Return when every gradient is the sum over all ranks."""
        ...

    def owned(self) -> dict[str, Tensor]:
        """Parameter name -> the tensor that this rank's optimizer updates, local part."""
        ...

    def held(self) -> dict[str, Held]:
        """Parameter name -> the part of it that this rank holds, owned or not."""
        ...

    def grad_norm(self) -> Tensor:
        """Global L2 norm of all gradients, a scalar, equal on all ranks."""
        ...

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar."""
        ...

    def publish(self) -> None:
        """After the update: make every rank see every new parameter."""
        ...

    def writes(self, name: str) -> bool:
        """Whether this rank saves its part of the parameter ``name``."""
        ...


class Shard(Protocol):
    """A part of kind ``shard``."""

    divides: ClassVar[frozenset[str]]
    """What a rank holds only its share of: weights, gradients, optimizer."""

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Bytes a rank sends in one step, and the seconds they take."""
        ...

    def apply(self, model: nn.Module, comm: TorchComm, *, whole_matrices: bool) -> Sharded:
        """Wrap ``model``; ``whole_matrices`` says that the optimizer needs them unsplit.

        Raises:
            ConfigError: this sharding splits matrices and the optimizer needs them whole.
        """
        ...
