"""Collectives over ranks; every byte passes through here and is counted.

A :class:`Comm` names its ranks, counts what each collective puts on the wire by the
stated algorithm (ring), and keeps the rank's heartbeat, so that a rank that hangs can
be named. NCCL on GPUs; on CPUs the memory that the ranks of a host share, or Gloo.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from shoal.core.errors import RankError
from shoal.parallel.heartbeat import Heartbeat, blame
from shoal.parallel.shared_memory import SharedMemory

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.core.meter import Meter

__all__ = ["Comm", "Pending", "TorchComm", "ring_all_reduce_bytes", "ring_gather_bytes"]

_T = TypeVar("_T")


def ring_all_reduce_bytes(nbytes: float, world: int) -> float:
    """Bytes one rank sends to all-reduce ``nbytes`` over ``world`` ranks in a ring."""
    return 2.0 * nbytes * (world - 1) / world


def ring_gather_bytes(nbytes: float, world: int) -> float:
    """Bytes one rank sends to all-gather, or reduce-scatter, ``nbytes`` of full size."""
    return nbytes * (world - 1) / world


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result is there."""
        ...


class Comm(Protocol):
    """Collectives among the data-parallel ranks.

    All calls are made by all ranks in the same order. ``all_reduce`` works in place
    and sums; nothing here ever divides.
    """

    rank: int
    world: int

    def all_reduce(self, x: Tensor, *, tag: str) -> Pending:
        """Start summing ``x`` over all ranks, in place."""
        ...

    def broadcast(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Start copying ``x`` from rank ``root``, in place."""
        ...

    def barrier(self) -> None:
        """Return when every rank has come here."""
        ...


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


class _Guarded:
    """A torch work handle whose failure names the rank to blame."""

    def __init__(self, comm: TorchComm, work: Any) -> None:
        self._comm = comm
        self._work = work

    def wait(self) -> None:
        self._comm.guard(self._work.wait)


class TorchComm:
    """torch.distributed behind :class:`Comm`; with one rank nothing is sent.

    Args:
        meter: where the bytes are counted (``wire_bytes``, by op, tag and scope).
        rank: this rank.
        world: number of ranks.
        timeout_s: a collective that takes longer fails.
        beats: directory of heartbeat files, shared by the ranks of a host.
        device: cpu or cuda.
        rendezvous: where the ranks meet: ``env://`` under torchrun, or ``file://``.
        shared_memory: CPU ranks of one host sum and copy through shared memory, not Gloo.
    """

    def __init__(
        self,
        meter: Meter,
        *,
        rank: int = 0,
        world: int = 1,
        timeout_s: float = 120.0,
        beats: Path | None = None,
        device: str = "cpu",
        rendezvous: str = "env://",
        shared_memory: bool = True,
    ) -> None:
        self.rank = rank
        self.world = world
        self.meter = meter
        self.beats = beats
        self.beat = Heartbeat(beats / f"rank-{rank}.beat", rank) if beats else None
        self.scope = "device" if device == "cuda" else "loopback"
        self.shared: SharedMemory | None = None
        if world > 1:
            import torch.distributed as dist

            if not dist.is_initialized():
                dist.init_process_group(
                    "nccl" if device == "cuda" else "gloo",
                    init_method=rendezvous,
                    rank=rank,
                    world_size=world,
                    # The supervisor speaks first: it knows every rank's stack.
                    timeout=timedelta(seconds=timeout_s + 30),
                )
            if shared_memory and device == "cpu":
                self.shared = SharedMemory.join(rank, world, timeout_s + 30)

    @classmethod
    def from_environment(cls, meter: Meter, **options: Any) -> TorchComm:
        """Join the ranks that torchrun, or Shoal's own supervisor, has started."""
        return cls(
            meter,
            rank=int(os.environ.get("RANK", "0")),
            world=int(os.environ.get("WORLD_SIZE", "1")),
            **options,
        )

    def all_reduce(self, x: Tensor, *, tag: str) -> Pending:
        """Start summing ``x`` over all ranks, in place."""
        if self.world == 1:
            return _Done()
        import torch.distributed as dist

        self.count("all_reduce", ring_all_reduce_bytes(x.nbytes, self.world), tag)
        shared = self.shared
        if shared is not None and x.is_contiguous():
            self.guard(lambda: shared.all_reduce(x))
            return _Done()
        return _Guarded(self, self._start(lambda: dist.all_reduce(x, async_op=True)))

    def broadcast(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Start copying ``x`` from rank ``root``, in place."""
        if self.world == 1:
            return _Done()
        import torch.distributed as dist

        # A ring passes the tensor on; the last rank sends nothing.
        self.count("broadcast", x.nbytes * (self.world - 1) / self.world, tag)
        shared = self.shared
        if shared is not None and x.is_contiguous():
            self.guard(lambda: shared.broadcast(x, root))
            return _Done()
        return _Guarded(self, self._start(lambda: dist.broadcast(x, root, async_op=True)))

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.world == 1:
            return
        import torch.distributed as dist

        # Over the network's own road even where memory is shared: a rank that goes on to
        # close its connections must know that nobody uses them any more.
        self.guard(dist.barrier)

    def count(self, op: str, nbytes: float, tag: str) -> None:
        """Add bytes this rank sends to the meter."""
        self.meter.add("wire_bytes", nbytes, op=op, tag=tag, scope=self.scope)

    def guard(self, call: Callable[[], _T]) -> _T:
        """Run a blocking collective call, heartbeat around it, and name who failed it.

        Raises:
            RankError: a peer is gone or did not come in time.
        """
        if self.beat is not None:
            self.beat.enter()
        result = self._start(call)
        if self.beat is not None:
            self.beat.leave()
        return result

    def close(self) -> None:
        """Leave the group."""
        if self.world > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def _start(self, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as cause:
            raise RankError(
                f"rank {self.rank}: a collective failed{self._suspect()}: "
                f"{str(cause).splitlines()[0]}; the run can be resumed from its last checkpoint"
            ) from cause

    def _suspect(self) -> str:
        if self.beats is None:
            return ""
        found = [
            Heartbeat.read(self.beats / f"rank-{rank}.beat", rank)
            for rank in range(self.world)
            if rank != self.rank
        ]
        present = [beat for beat in found if beat is not None]
        if not present:
            return ""
        worst = blame(present)
        return f" waiting for rank {worst.rank} (step {worst.step}, silent {worst.age_s:.0f} s)"
