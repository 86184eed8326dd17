"""Replicated data parallelism: every rank holds the model; gradients are all-reduced.

Gradients are packed into flat buckets in the order in which they become ready; a full
bucket is reduced while backward goes on. That pays where the network has hands of its
own: on CPU ranks the collective takes its time from the very cores that compute, so
buckets are large there.

Source: Li et al., PyTorch Distributed, VLDB 2020, section 3.2 (bucketing, overlap).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from annotated_types import Gt, Le

from shoal.core.errors import RankError
from shoal.core.parts import part
from shoal.ir import Estimate, Machine, Work
from shoal.kernel.squares import sum_of_squares
from shoal.parallel.protocols import LocalParameter
from shoal.parallel.shard.cost import sharding_estimate

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.parallel.protocols import Comm, Pending, ShardedModel


@part
class ReplicatedShard:
    """Replicate parameters, gradients and optimizer state; choose it when the model fits.

    Args:
        bucket_mb: size of a gradient bucket in MiB; 64 on CPU ranks and 25 on GPUs if not given.
    """

    bucket_mb: Annotated[float, Gt(0), Le(4096)] | None = None
    divides: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield cls()

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """One all-reduce of the gradients: each byte is sent twice."""
        from shoal.cost.arithmetic import parameters

        size = bucket_bytes(self.bucket_mb, machine.device.kind)
        buckets = int(4 * parameters(work.shape) / size) + 1
        return sharding_estimate(work, machine, sent_per_parameter_byte=2.0, messages=buckets)

    def apply(self, model: nn.Module, comm: Comm, *, whole_matrices: bool) -> ShardedModel:
        """Hook the model's gradients."""
        device = next(model.parameters()).device.type
        return ReplicatedModel(model, comm, bucket_bytes=bucket_bytes(self.bucket_mb, device))


def bucket_bytes(bucket_mb: float | None, device: str) -> int:
    """The size that was given, or what suits ranks on ``device``."""
    return int((bucket_mb or (64 if device == "cpu" else 25)) * 2**20)


class _Bucket:
    """Parameters whose gradients are views of one flat tensor."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        import torch

        total = sum(p.numel() for p in parameters)
        self.flat = torch.zeros(total, dtype=parameters[0].dtype, device=parameters[0].device)
        self.parameters = parameters
        self.views: list[Tensor] = []
        start = 0
        for parameter in parameters:
            view = self.flat[start : start + parameter.numel()].view_as(parameter)
            self.views.append(view)
            start += parameter.numel()
        self.missing = len(parameters)
        # So many elements are on their way, in these messages.
        self.sent = 0
        self.pending: list[Pending] = []

    def send(self, comm: Comm, end: int) -> int:
        """Start summing up to element ``end``; returns the bytes of that."""
        piece = self.flat[self.sent : end]
        if not len(piece) or comm.world == 1:
            return 0
        self.pending.append(comm.all_reduce(piece, tag="gradients"))
        self.sent = end
        return piece.nbytes

    def attach(self) -> None:
        """Zero the gradients and point the parameters at them."""
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        self.missing = len(self.parameters)
        self.sent = 0
        self.pending.clear()


class ReplicatedModel:
    """See :class:`~shoal.parallel.protocols.ShardedModel`.

    Attributes:
        overlap: a bucket is reduced as soon as the last backward pass has filled it. If off, all
            are reduced in :meth:`finish`: for passes that write gradients outside of autograd, and
            for parameters to which several last passes add.
        hidden_bytes: bytes of gradients whose reduction began in the last step's backward passes.
        after_bytes: of those that travelled after them.
    """

    overlap = True
    hidden_bytes = after_bytes = 0

    def __init__(self, model: nn.Module, comm: Comm, *, bucket_bytes: int) -> None:
        self.model = model
        self.comm = comm
        self._names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sync = False
        self._fresh = True
        self._bucket_bytes = bucket_bytes
        # In slices: when each parameter's gradient is done, and those that are.
        self._order: dict[nn.Parameter, int] | None = None
        self._done: set[Tensor] = set()
        # Backward reaches the last parameters first, so buckets fill from the end.
        self._pack(list(reversed(self._names.values())))
        if comm.world > 1:
            for parameter in self._names.values():
                parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _pack(self, parameters: list[nn.Parameter]) -> None:
        """Buckets of parameters in this order."""
        self._buckets: list[_Bucket] = []
        waiting: list[nn.Parameter] = []
        size = 0
        for parameter in parameters:
            if waiting and (
                size + parameter.nbytes > self._bucket_bytes or parameter.dtype != waiting[0].dtype
            ):
                self._buckets.append(_Bucket(waiting))
                waiting, size = [], 0
            waiting.append(parameter)
            size += parameter.nbytes
        if waiting:
            self._buckets.append(_Bucket(waiting))
        self._home = {
            parameter: bucket for bucket in self._buckets for parameter in bucket.parameters
        }

    def slice_in(self, order: Callable[[str], int]) -> None:
        """From now on gradients are reduced by :meth:`send`, and the rest at the end.

        Args:
            order: name of a parameter -> a number that grows with when its gradient is done.
        """
        places = {parameter: order(name) for name, parameter in self._names.items()}
        self._order = places
        self._pack(sorted(self._names.values(), key=lambda one: places[one]))

    def send(self, nbytes: int, before: int) -> None:
        """Start summing a slice of the gradients that are done, in the last backward pass.

        Args:
            nbytes: bytes of the slice; less, if less waits.
            before: gradients whose place in the order is below this are done.

        Raises:
            RankError: one of them is not.
        """
        if not self._sync or not self.overlap or self.comm.world == 1:
            return
        assert self._order is not None
        for bucket in self._buckets:
            end = 0
            for parameter in bucket.parameters:
                if self._order[parameter] >= before:
                    break
                if parameter not in self._done:
                    raise RankError(
                        "a slice would carry a gradient that is not done: a parameter gets "
                        "gradients from several last passes; set parallel.gradient_slices = []"
                    )
                end += parameter.numel()
            most = bucket.sent + nbytes // bucket.flat.itemsize
            size = bucket.send(self.comm, max(bucket.sent, min(end, most)))
            self.hidden_bytes += size
            nbytes -= size

    def _ready(self, parameter: Tensor) -> None:
        if not self._sync or not self.overlap:
            return
        bucket = self._home[parameter]  # type: ignore[index]
        if parameter in self._done or (bucket.sent and self._order is None):
            raise RankError(
                "a gradient came after its bucket was sent: a parameter gets gradients from "
                "several last passes; set overlap = False"
            )
        if self._order is not None:
            self._done.add(parameter)
            return
        bucket.missing -= 1
        if bucket.missing == 0:
            self.hidden_bytes += bucket.send(self.comm, len(bucket.flat))

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch."""
        if self._fresh:
            for bucket in self._buckets:
                bucket.attach()
            self._done.clear()
            self.hidden_bytes = self.after_bytes = 0
            self._fresh = False
        self._sync = last
        yield

    def finish(self) -> None:
        """Wait for all buckets; send those that were not sent, in the order of all ranks."""
        self._sync = False
        self._fresh = True
        for bucket in self._buckets:
            self.after_bytes += bucket.send(self.comm, len(bucket.flat))
        for bucket in self._buckets:
            for piece in bucket.pending:
                piece.wait()
            bucket.pending.clear()

    def owned(self) -> dict[str, Tensor]:
        """All parameters."""
        return dict(self._names)

    def held(self) -> dict[str, LocalParameter]:
        """Every parameter, whole."""
        return {
            name: LocalParameter(p.detach(), (0,) * p.dim(), tuple(p.shape))
            for name, p in self._names.items()
        }

    def squared_norm(self, counts: Callable[[str], bool]) -> Tensor:
        """Sum of the squares of the gradients of chosen parameters: they are whole here."""
        names = {parameter: name for name, parameter in self._names.items()}
        if not self._buckets:  # of a model whose weights change without gradients
            return next(self.model.parameters()).new_zeros(())
        total = sum_of_squares(self._buckets[0].flat[:0])
        for bucket in self._buckets:
            # One by one, so that parameters held elsewhere give the same bits.
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                if counts(names[parameter]):
                    total += sum_of_squares(view)
        return total

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar."""
        for bucket in self._buckets:
            bucket.flat.mul_(factor)

    def publish(self) -> None:
        """Nothing: every rank made the same update."""

    def writes(self, name: str) -> bool:
        """Ranks share the saving: parameter i is written by rank i mod N."""
        return list(self._names).index(name) % self.comm.world == self.comm.rank
