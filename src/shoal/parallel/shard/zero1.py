"""ZeRO stage 1: each rank updates some whole parameters and publishes them.

The optimizer's state and its arithmetic are divided by parameter, largest first, so
matrices stay whole; that also divides the work of optimizers that need whole
matrices, such as Muon.

Source: Rajbhandari et al., ZeRO, 2020, section 5.1; by parameter instead of by flat slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Self

from annotated_types import Gt, Le

from shoal.core.parts import part
from shoal.ir import Estimate, Machine, Work
from shoal.parallel.shard.cost import sharding_estimate
from shoal.parallel.shard.replicated import ReplicatedModel, bucket_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.parallel.protocols import Comm, Pending, ShardedModel


@part
class Zero1:
    """Shard the optimizer state over the ranks; prefer it to zero2 if it saves enough memory.

    Args:
        bucket_mb: size of a gradient bucket in MiB; 64 on CPU ranks and 25 on GPUs if not given.
    """

    bucket_mb: Annotated[float, Gt(0), Le(4096)] | None = None
    divides: ClassVar[frozenset[str]] = frozenset({"optimizer"})
    traits: ClassVar[frozenset[str]] = frozenset(f"shards_{what}" for what in divides)

    @classmethod
    def candidates(cls, work: Work, machine: Machine) -> Iterator[Self]:
        """Always."""
        yield cls()

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """An all-reduce of the gradients (2) and a broadcast of the parameters (1)."""
        return sharding_estimate(
            work, machine, sent_per_parameter_byte=3.0, messages=2 + work.job.parallel.dp
        )

    def apply(self, model: nn.Module, comm: Comm, *, whole_matrices: bool) -> ShardedModel:
        """Hook the model's gradients and divide its parameters."""
        device = next(model.parameters()).device.type
        return Zero1Model(model, comm, bucket_bytes=bucket_bytes(self.bucket_mb, device))


def assign(sizes: dict[str, int], world: int) -> dict[str, int]:
    """Name -> owning rank: largest first to the least loaded rank (Graham, 1969)."""
    load = [0] * world
    owner: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = load.index(min(load))
        owner[name] = rank
        load[rank] += sizes[name]
    return owner


class Zero1Model(ReplicatedModel):
    """See :class:`~shoal.parallel.protocols.ShardedModel`."""

    def __init__(self, model: nn.Module, comm: Comm, *, bucket_bytes: int) -> None:
        super().__init__(model, comm, bucket_bytes=bucket_bytes)
        self._owner = assign({name: p.numel() for name, p in self._names.items()}, comm.world)

    def owned(self) -> dict[str, Tensor]:
        """This rank's parameters."""
        return {n: p for n, p in self._names.items() if self._owner[n] == self.comm.rank}

    def publish(self) -> None:
        """Each owner sends its parameters, packed into one message."""
        import torch

        if self.comm.world == 1:
            return
        flats: list[tuple[list[Tensor], Tensor | None]] = []
        pending: list[Pending] = []
        for root in range(self.comm.world):
            mine = [p.detach() for n, p in self._names.items() if self._owner[n] == root]
            if not mine:
                flats.append((mine, None))
                continue
            flat = torch.cat([p.reshape(-1) for p in mine])
            flats.append((mine, flat))
            pending.append(self.comm.broadcast(flat, root, tag="parameters"))
        for work in pending:
            work.wait()
        for root, (mine, packed) in enumerate(flats):
            if packed is not None and root != self.comm.rank:
                start = 0
                for parameter in mine:
                    parameter.copy_(packed[start : start + parameter.numel()].view_as(parameter))
                    start += parameter.numel()

    def writes(self, name: str) -> bool:
        """The owner writes."""
        return self._owner[name] == self.comm.rank
