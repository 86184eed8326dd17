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
from typing import TYPE_CHECKING, ClassVar

from shoal.core.errors import RankError, require
from shoal.core.parts import part
from shoal.ir import Estimate, Machine, Work
from shoal.parallel.protocols import Held
from shoal.parallel.shard.cost import sharding_estimate
from shoal.parallel.shard.squares import sum_of_squares

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.parallel.protocols import Comm, Pending, Sharded

__all__ = ["Replicated", "ReplicatedModel", "bucket_bytes", "check_bucket"]


@part
class Replicated:
    """Every rank holds everything; choose it when the model fits.

    Args:
        bucket_mb: gradient bytes that travel together, in MiB; 64 on CPU ranks and 25 on
            GPUs if not given.
    """

    bucket_mb: float | None = None
    divides: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        check_bucket(self.bucket_mb, "shard.replicated.bucket_mb")

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """One all-reduce of the gradients: each byte is sent twice."""
        from shoal.cost.arithmetic import parameters

        size = bucket_bytes(self.bucket_mb, machine.device.kind)
        buckets = int(4 * parameters(work.shape) / size) + 1
        return sharding_estimate(work, machine, sent_per_parameter_byte=2.0, messages=buckets)

    def apply(self, model: nn.Module, comm: Comm, *, whole_matrices: bool) -> Sharded:
        """Hook the model's gradients."""
        device = next(model.parameters()).device.type
        return ReplicatedModel(model, comm, bucket_bytes=bucket_bytes(self.bucket_mb, device))


def check_bucket(bucket_mb: float | None, where: str) -> None:
    """Refuse a bucket without room.

    Raises:
        ConfigError: the size is not above 0, or beyond 4 GiB.
    """
    require(
        bucket_mb is None or 0 < bucket_mb <= 4096,
        where,
        bucket_mb,
        expected="MiB above 0 and up to 4096",
    )


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
        self.pending: Pending | None = None

    def attach(self) -> None:
        """Zero the gradients and point the parameters at them."""
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            parameter.grad = view
        self.missing = len(self.parameters)
        self.pending = None


class ReplicatedModel:
    """See :class:`~shoal.parallel.protocols.Sharded`.

    Attributes:
        overlap: a bucket travels as soon as the last backward pass has filled it. Off, all
            travel in :meth:`finish`: for passes that write gradients outside of autograd,
            and for parameters that several last passes add to.
    """

    overlap = True

    def __init__(self, model: nn.Module, comm: Comm, *, bucket_bytes: int) -> None:
        self.model = model
        self.comm = comm
        self._names = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._sync = False
        self._fresh = True
        self._buckets: list[_Bucket] = []
        # Backward reaches the last parameters first, so buckets fill from the end.
        waiting: list[nn.Parameter] = []
        size = 0
        for parameter in reversed(list(self._names.values())):
            if waiting and (
                size + parameter.nbytes > bucket_bytes or parameter.dtype != waiting[0].dtype
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
        if comm.world > 1:
            for parameter in self._names.values():
                parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def _ready(self, parameter: Tensor) -> None:
        if not self._sync or not self.overlap:
            return
        bucket = self._home[parameter]  # type: ignore[index]
        if bucket.pending is not None:
            raise RankError(
                "a gradient came after its bucket was sent: a parameter gets gradients from "
                "several last passes; set overlap = False"
            )
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.pending = self.comm.all_reduce(bucket.flat, tag="gradients")

    @contextmanager
    def accumulate(self, *, last: bool) -> Iterator[None]:
        """Around one micro-batch."""
        if self._fresh:
            for bucket in self._buckets:
                bucket.attach()
            self._fresh = False
        self._sync = last
        yield

    def finish(self) -> None:
        """Wait for all buckets; send those that were not sent, in the order of all ranks."""
        self._sync = False
        self._fresh = True
        for bucket in self._buckets:
            if bucket.pending is None:
                bucket.pending = self.comm.all_reduce(bucket.flat, tag="gradients")
        for bucket in self._buckets:
            if bucket.pending is not None:
                bucket.pending.wait()

    def owned(self) -> dict[str, Tensor]:
        """All parameters."""
        return dict(self._names)

    def held(self) -> dict[str, Held]:
        """Every parameter, whole."""
        return {
            name: Held(p.detach(), (0,) * p.dim(), tuple(p.shape))
            for name, p in self._names.items()
        }

    def squared_norm(self, counts: Callable[[str], bool]) -> Tensor:
        """Sum of the squares of the gradients of chosen parameters: they are whole here."""
        names = {parameter: name for name, parameter in self._names.items()}
        if not self._buckets:  # of a model whose weights change without gradients
            return next(self.model.parameters()).new_zeros(())
        total = sum_of_squares(self._buckets[0].flat[:0])
        for bucket in self._buckets:
            chosen = [counts(names[parameter]) for parameter in bucket.parameters]
            if all(chosen):
                total += sum_of_squares(bucket.flat)
            else:
                views = zip(bucket.views, chosen, strict=True)
                for view, counted in views:
                    if counted:
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
