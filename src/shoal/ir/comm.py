"""What ranks exchange, and what a model that ranks share promises to the loop.

Communicators (:class:`Comm`) name some ranks and count every byte between them. A
:class:`ShardedModel` is a model in training: the loop calls, each step and on every rank in the
same order, ``accumulate`` around each micro-batch's backward pass, ``finish`` once,
``squared_norm``, the optimizer on ``owned``, ``publish``.

Gradients are sums, never means: the loop divides the loss by the global token count
before it goes backward, so ragged micro-batches need no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.core.meter import Meter


class Pending(Protocol):
    """A collective or a message under way."""

    def wait(self) -> None:
        """Return when the result is there.

        Raises:
            RankError: a peer is gone or did not come in time.
        """


class Comm(Protocol):
    """Some ranks that talk; every byte is counted by the ring's formulas and by link class.

    All members make the same collective calls in the same order. Sums are taken in rank
    order and nothing here ever divides. Results are written into tensors that the caller
    gives, which are contiguous; a tensor may be touched again after ``wait``.

    Attributes:
        rank: number of this rank in here, from 0.
        world: number of ranks in here.
        ranks: their numbers in the whole job.
        ranks_per_node: ranks of one node, neighbours by number; None if there is one node.
        device: where tensors lie: cpu or cuda.
        meter: where bytes are counted: ``wire_bytes`` by op, tag and scope.
    """

    rank: int
    world: int
    ranks: tuple[int, ...]
    ranks_per_node: int | None
    device: str
    meter: Meter

    def split(self, groups: Sequence[Sequence[int]]) -> Comm:
        """The communicator of this rank's group; called by all ranks with the same partition.

        All ranks of the job: a part of them is split while the other parts are.

        Args:
            groups: numbers in here; every rank in exactly one, each in rank order.
        """

    def all_reduce(self, x: Tensor, *, tag: str, op: Literal["sum", "max"] = "sum") -> Pending:
        """Reduce ``x`` over all ranks, in place."""

    def broadcast(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Copy ``x`` from rank ``root``, in place."""

    def reduce(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Sum ``x`` over all ranks into rank ``root``, in place; elsewhere it is spoilt."""

    def all_gather(self, out: Tensor, x: Tensor, *, tag: str) -> Pending:
        """``out`` [world * n, ...] becomes every rank's ``x`` [n, ...], in rank order."""

    def reduce_scatter(self, out: Tensor, x: Tensor, *, tag: str) -> Pending:
        """``out`` [n, ...] becomes this rank's part of the sum of ``x`` [world * n, ...]."""

    def all_to_all(self, outs: Sequence[Tensor], xs: Sequence[Tensor], *, tag: str) -> Pending:
        """``outs[i]`` becomes what rank i has as its ``xs[rank]``; sizes may differ."""

    def send(self, x: Tensor, target: int, *, tag: str) -> Pending:
        """Send ``x`` to rank ``target``; messages of a pair and tag arrive in order."""

    def receive(self, out: Tensor, source: int, *, tag: str) -> Pending:
        """Receive into ``out`` what rank ``source`` sends with this tag."""

    def barrier(self) -> None:
        """Return when every rank has come here."""


class LocalParameter(NamedTuple):
    """A parameter's local part and where it lies."""

    tensor: Tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class ShardedModel(Protocol):
    """A model in training whose gradients are summed over the ranks.

    Attributes:
        model: the model, its parameters under their names.
        overlap: gradients may travel during the ``last`` backward passes; off, they travel in
            ``finish``, as they must where passes write gradients outside of autograd, or where
            several last passes add to one parameter.
    """

    model: nn.Module
    overlap: bool

    def accumulate(self, *, last: bool) -> AbstractContextManager[None]:
        """Around one micro-batch; gradients travel with the ``last``."""

    def finish(self) -> None:
        """Return when every gradient is the sum over all ranks."""

    def owned(self) -> dict[str, Tensor]:
        """Parameter name -> the tensor that this rank's optimizer updates, local part."""

    def held(self) -> dict[str, LocalParameter]:
        """Parameter name -> the part of it that this rank holds, owned or not."""

    def squared_norm(self, counts: Callable[[str], bool]) -> Tensor:
        """Sum of the squares of the gradients of every parameter for which ``counts(name)``.

        A scalar, summed over the data-parallel ranks where these divide the gradients, and
        equal on all of them.
        """

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar."""

    def publish(self) -> None:
        """After the update: make every rank see every new parameter."""

    def writes(self, name: str) -> bool:
        """Whether this rank saves its part of the parameter ``name``."""


@runtime_checkable
class Updater(Protocol):
    """An optimizer at work on one rank's parameters."""

    def step(self, factor: float) -> None:
        """Update every parameter from its gradient; ``factor`` scales the learning rate."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name -> state name -> tensor; a 0-d tensor is not split with the parameter."""

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over a state with the same names and shapes."""
