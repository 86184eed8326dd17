"""Collectives between processes; every byte passes through here and is counted.

A communicator names its ranks, counts what each collective puts on the wire by the formulas
of :mod:`~shoal.parallel.comm.wire`, and keeps the rank's heartbeat, so that a rank that hangs can
be named. NCCL on GPUs; on CPUs the memory that the ranks of a host share, or Gloo.
"""

from __future__ import annotations

import functools
import hashlib
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from shoal.core.errors import RankError
from shoal.parallel.comm.calls import (
    check_member,
    check_pairs,
    check_partition,
    check_parts,
    check_peer,
)
from shoal.parallel.comm.heartbeat import Heartbeat, blame
from shoal.parallel.comm.mailboxes import Mailboxes
from shoal.parallel.comm.shared_memory import SharedMemory
from shoal.parallel.comm.wire import TrafficCounter, ring_all_reduce_bytes, ring_gather_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

    from shoal.core.meter import Meter
    from shoal.parallel.protocols import Pending

_T = TypeVar("_T")


class _Done:
    def wait(self) -> None:
        """Nothing is under way."""


class _Guarded:
    """A torch work handle whose failure names the rank to blame.

    Args:
        comm: whose heartbeat is kept.
        op: what is under way, by name.
        work: what is under way.
        then: done once it has ended.
    """

    def __init__(
        self, comm: TorchComm, op: str, work: Any, then: Callable[[], None] | None = None
    ) -> None:
        self._comm, self._op = comm, op
        self._work = work
        self._then = then

    def wait(self) -> None:
        self._comm.guard(self._op, self._work.wait)
        if self._then is not None:
            self._then()
            self._then = None


class _Beside:
    """What is under way in memory of the communicator's own; see :meth:`TorchComm._beside`."""

    def __init__(self, comm: TorchComm, op: str, call: Callable[[], None]) -> None:
        self._comm, self._op, self._call = comm, op, call

    def wait(self) -> None:
        self._comm._beside(self._op, self._call)


def agent_store(purpose: str, timeout: timedelta) -> Store:
    """What ranks that torchrun has started share in the store of its agent, for one purpose.

    The agent keeps its store when it starts lost ranks again, and with it what the ranks before
    have written, such as their addresses; each start has keys of its own here.

    Args:
        purpose: first part of the keys.
        timeout: how long a read waits.
    """
    import torch.distributed as dist

    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=False,
        timeout=timeout,
    )
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"shoal/{purpose}/{start}", store)  # type: ignore[attr-defined]


def _store(rendezvous: str, world: int, timeout: timedelta) -> Store | None:
    """Where ranks meet; None where torch makes it from the environment."""
    import torch.distributed as dist

    path = rendezvous.removeprefix("file://")
    if path != rendezvous:  # as an address a path would lose characters, such as a newline
        return dist.FileStore(path, world)  # type: ignore[attr-defined]
    if rendezvous == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return agent_store("ranks", timeout)
    return None


class TorchComm:
    """torch.distributed behind :class:`~shoal.parallel.protocols.Comm`.

    With one rank nothing is sent, and data only moves from input to output.

    Messages carry their tag on Gloo. NCCL has no tags: there the messages of a pair of ranks arrive
    in the order of sending, independent of tags, so both ends must issue them in the same order.

    Args:
        meter: where the bytes are counted (``wire_bytes``, by op, tag and scope).
        timeout_s: a collective that takes longer fails.
        beats: directory of heartbeat files, shared by the ranks of a host.
        device: cpu or cuda.
        rendezvous: address of the rendezvous: ``env://`` under torchrun, or ``file://``.
        shared_memory: CPU ranks of one host sum, copy and send through shared memory, not Gloo.
        ranks_per_node: ranks of one node, neighbours by number; all on one if not given.
            Bytes between nodes count with scope ``node``, also where nodes are emulated.
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
        ranks_per_node: int | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.ranks = tuple(range(world))
        self.meter = meter
        self.beats = beats
        self.beat = Heartbeat(beats / f"rank-{rank}.beat", rank) if beats else None
        self.device = device
        self.ranks_per_node = ranks_per_node
        self.timeout_s = timeout_s
        self.wire = TrafficCounter(
            meter,
            rank,
            self.ranks,
            scope="device" if device == "cuda" else "loopback",
            ranks_per_node=ranks_per_node,
        )
        self.group: ProcessGroup | None = None
        """The process group behind this; None for all ranks."""
        self.shared: SharedMemory | None = None
        self.mailboxes: Mailboxes | None = None
        """Rings between all ranks of the job, in the numbers of the job."""
        self._path = ""
        self._splits = 0
        self._parent: TorchComm | None = None
        self._joins = False
        if world > 1:
            import torch.distributed as dist

            if not dist.is_initialized():
                # The supervisor speaks first: it knows every rank's stack.
                limit = timedelta(seconds=timeout_s + 30)
                store = _store(rendezvous, world, limit)
                dist.init_process_group(
                    "nccl" if device == "cuda" else "gloo",
                    init_method=rendezvous if store is None else None,
                    store=store,
                    rank=rank,
                    world_size=world,
                    timeout=limit,
                )
            if shared_memory and device == "cpu":
                self.shared = SharedMemory.join(rank, world, timeout_s + 30)
                self.mailboxes = Mailboxes.join(rank, world, timeout_s + 30)

    @classmethod
    def from_environment(cls, meter: Meter, **options: Any) -> TorchComm:
        """Join the ranks that torchrun, or Shoal's own supervisor, has started."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        if 1 <= here < world:
            options.setdefault("ranks_per_node", here)
        return cls(meter, rank=int(os.environ.get("RANK", "0")), world=world, **options)

    def split(self, groups: Sequence[Sequence[int]]) -> TorchComm:
        """The communicator of this rank's group; called by all ranks with the same partition.

        A part of the ranks is split by all ranks of the job too, each in its own part: torch
        makes process groups only with the help of all. The groups share heartbeat and meter
        with this one. A group of all ranks is this one, and a group of one rank costs nothing.

        Raises:
            RankError: some rank is in none of the groups, or in two.
        """
        named = check_partition(groups, self.world)
        group = next(group for group in named if self.rank in group)
        self._splits += 1
        if group == tuple(range(self.world)):
            return self
        own = TorchComm.__new__(TorchComm)
        own.rank = group.index(self.rank)
        own.world = len(group)
        own.ranks = tuple(self.ranks[member] for member in group)
        own.meter, own.beats, own.beat = self.meter, self.beats, self.beat
        own.device, own.timeout_s = self.device, self.timeout_s
        own.ranks_per_node = self.ranks_per_node
        own.wire = self.wire.of(own.rank, own.ranks)
        own.group, own.shared, own._parent = None, None, self
        own.mailboxes = self.mailboxes
        own._path, own._splits = f"{self._path}/{self._splits}:{own.ranks}", 0
        # Memory is shared when the first sum asks for it: most groups never do.
        own._joins = self.shared is not None or self._joins
        if len(named) < self.world:
            own.group = self._new_groups(
                [tuple(self.ranks[member] for member in group) for group in named], own.ranks
            )
        return own

    def all_reduce(self, x: Tensor, *, tag: str, op: Literal["sum", "max"] = "sum") -> Pending:
        """Start reducing ``x`` over all ranks, in place."""
        if self.world == 1:
            return _Done()
        import torch.distributed as dist

        x = x.detach()
        self.wire.ring("all_reduce", ring_all_reduce_bytes(x.nbytes, self.world), tag)
        shared = self._shared() if op == "sum" and x.is_contiguous() else None
        if shared is not None:
            with _undisturbed():
                posted = self._start("all_reduce", lambda: shared.post(x))
            if posted is not None:
                return _Beside(self, "all_reduce", posted.wait)
            self._beside("all_reduce", lambda: shared.all_reduce(x))
            return _Done()
        how = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return self._issue(
            "all_reduce", lambda: dist.all_reduce(x, how, group=self.group, async_op=True)
        )

    def broadcast(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Start copying ``x`` from rank ``root``, in place."""
        check_member(root, self.world)
        if self.world == 1:
            return _Done()
        import torch.distributed as dist

        x = x.detach()
        self.wire.ring("broadcast", ring_gather_bytes(x.nbytes, self.world), tag)
        shared = self._shared() if x.is_contiguous() else None
        if shared is not None:
            self._beside("broadcast", lambda: shared.broadcast(x, root))
            return _Done()
        source = self.ranks[root]
        return self._issue(
            "broadcast", lambda: dist.broadcast(x, source, group=self.group, async_op=True)
        )

    def reduce(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Start summing ``x`` over all ranks into rank ``root``; elsewhere it is spoilt."""
        check_member(root, self.world)
        if self.world == 1:
            return _Done()
        import torch.distributed as dist

        x = x.detach()
        self.wire.ring("reduce", ring_gather_bytes(x.nbytes, self.world), tag)
        target = self.ranks[root]
        return self._issue(
            "reduce", lambda: dist.reduce(x, target, group=self.group, async_op=True)
        )

    def all_gather(self, out: Tensor, x: Tensor, *, tag: str) -> Pending:
        """``out`` [world * n, ...] becomes every rank's ``x`` [n, ...], in rank order."""
        check_parts("all_gather", out, x, self.world)
        out, x = out.detach().view(-1), x.detach().view(-1)
        if self.world == 1:
            out.copy_(x)
            return _Done()
        import torch.distributed as dist

        self.wire.ring("all_gather", ring_gather_bytes(out.nbytes, self.world), tag)
        shared = self._shared()
        if shared is not None:
            self._beside("all_gather", lambda: shared.all_gather(out, x))
            return _Done()
        return self._issue(
            "all_gather",
            lambda: dist.all_gather_into_tensor(out, x, group=self.group, async_op=True),
        )

    def reduce_scatter(self, out: Tensor, x: Tensor, *, tag: str) -> Pending:
        """``out`` [n, ...] becomes this rank's part of the sum of ``x`` [world * n, ...]."""
        check_parts("reduce_scatter", x, out, self.world)
        out, x = out.detach().view(-1), x.detach().view(-1)
        if self.world == 1:
            out.copy_(x)
            return _Done()
        import torch.distributed as dist

        self.wire.ring("reduce_scatter", ring_gather_bytes(x.nbytes, self.world), tag)
        shared = self._shared()
        if shared is not None:
            self._beside("reduce_scatter", lambda: shared.reduce_scatter(out, x))
            return _Done()
        return self._issue(
            "reduce_scatter",
            lambda: dist.reduce_scatter_tensor(out, x, group=self.group, async_op=True),
        )

    def all_to_all(self, outs: Sequence[Tensor], xs: Sequence[Tensor], *, tag: str) -> Pending:
        """``outs[i]`` becomes what rank i has as its ``xs[rank]``; sizes may differ."""
        check_pairs(outs, xs, self.world)
        import torch
        import torch.distributed as dist

        outs = [out.detach() for out in outs]
        if self.world == 1:
            outs[0].copy_(xs[0].detach().view(outs[0].shape))
            return _Done()
        for peer, x in enumerate(xs):
            self.wire.pair("all_to_all", x.nbytes, tag, peer)
        # Gloo has no all-to-all of lists in every version; of one tensor in parts it has.
        packed = torch.cat([x.detach().reshape(-1) for x in xs])
        received = packed.new_empty(sum(out.numel() for out in outs))

        def unpack() -> None:
            start = 0
            for out in outs:
                out.copy_(received[start : start + out.numel()].view(out.shape))
                start += out.numel()

        work = self._start(
            "all_to_all",
            lambda: dist.all_to_all_single(
                received,
                packed,
                [out.numel() for out in outs],
                [x.numel() for x in xs],
                group=self.group,
                async_op=True,
            ),
        )
        return _Guarded(self, "all_to_all", work, unpack)

    def send(self, x: Tensor, target: int, *, tag: str) -> Pending:
        """Send ``x`` to rank ``target``."""
        check_peer(target, self.rank, self.world)
        import torch.distributed as dist

        self.wire.pair("send", x.nbytes, tag, target)
        x, peer, number = x.detach(), self.ranks[target], self._number(tag)
        if (boxes := self.mailboxes) is not None:
            start = functools.partial(dist.isend, x, peer, group=self.group, tag=number)
            return self._issue("send", lambda: boxes.send(x, peer, _stream(self._path, tag), start))
        return self._issue("send", lambda: dist.isend(x, peer, group=self.group, tag=number))

    def receive(self, out: Tensor, source: int, *, tag: str) -> Pending:
        """Receive into ``out`` what rank ``source`` sends with this tag."""
        check_peer(source, self.rank, self.world)
        import torch.distributed as dist

        out, peer, number = out.detach(), self.ranks[source], self._number(tag)
        if (boxes := self.mailboxes) is not None:
            start = functools.partial(dist.irecv, out, peer, group=self.group, tag=number)
            return self._issue(
                "receive", lambda: boxes.receive(out, peer, _stream(self._path, tag), start)
            )
        return self._issue("receive", lambda: dist.irecv(out, peer, group=self.group, tag=number))

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.world == 1:
            return
        import torch.distributed as dist

        # Over the network's own road even where memory is shared: a rank that goes on to
        # close its connections must know that they are no longer in use.
        self.guard("barrier", lambda: dist.barrier(group=self.group))

    def guard(self, op: str, call: Callable[[], _T]) -> _T:
        """Run a blocking collective call, heartbeat around it, and name who failed it.

        Raises:
            RankError: a peer is gone or did not come in time.
        """
        if self.beat is not None:
            # Ranks of different stages make different numbers of calls in their groups;
            # only those that all ranks make show who is behind.
            self.beat.enter(op, counted=self._parent is None)
        result = self._start(op, call)
        if self.beat is not None:
            self.beat.leave()
        return result

    def _beside(self, op: str, call: Callable[[], None]) -> None:
        """The same, in memory of the communicator's own.

        It belongs to no device, so a count of what operators use of one leaves it out.
        """
        with _undisturbed():
            self.guard(op, call)

    def close(self) -> None:
        """Leave the group of all ranks, and with it every other one."""
        if self.world > 1 and self._parent is None:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def _new_groups(self, here: list[tuple[int, ...]], own: tuple[int, ...]) -> ProcessGroup | None:
        """The process group of the ranks ``own``, while all ranks of the job make all groups."""
        import torch
        import torch.distributed as dist

        groups = sorted(here)
        if self._parent is not None:  # others split other parts
            row = torch.full((dist.get_world_size(),), -1, device=self.device)
            row[: len(own)] = torch.tensor(own)
            rows = row.new_empty(len(row) ** 2)
            self.guard("all_gather", lambda: dist.all_gather_into_tensor(rows, row))
            listed = rows.view(len(row), -1).tolist()
            groups = sorted({tuple(rank for rank in one if rank >= 0) for one in listed})
        new_groups: ProcessGroup | None = None
        limit = timedelta(seconds=self.timeout_s + 30)
        for group in groups:
            if len(group) > 1:
                ranks = list(group)
                made = self.guard(
                    "new_group", functools.partial(dist.new_group, ranks, timeout=limit)
                )
                new_groups = made if group == own else new_groups
        return new_groups

    def _shared(self) -> SharedMemory | None:
        """The memory that these ranks share; the first call of all of them makes it."""
        if self._joins and self.shared is None:
            self._joins = False
            wait_s = self.timeout_s + 30
            self.shared = self._start(
                "join", lambda: SharedMemory.join(self.rank, self.world, wait_s, self.group)
            )
        return self.shared

    def _issue(self, op: str, call: Callable[[], Any]) -> Pending:
        return _Guarded(self, op, self._start(op, call))

    def _number(self, tag: str) -> int:
        return zlib.crc32(tag.encode()) & 0x7FFFFFFF if self.device == "cpu" else 0

    def _start(self, op: str, call: Callable[[], _T]) -> _T:
        try:
            return call()
        except RuntimeError as cause:
            raise RankError(
                f"rank {self.ranks[self.rank]}: {op} failed{self._suspect()}: "
                f"{str(cause).splitlines()[0]}; the run can be resumed from its last checkpoint"
            ) from cause

    def _suspect(self) -> str:
        if self.beats is None:
            return ""
        results = [
            Heartbeat.read(self.beats / f"rank-{rank}.beat", rank)
            for rank in self.ranks
            if rank != self.ranks[self.rank]
        ]
        present = [beat for beat in results if beat is not None]
        if not present:
            # Ranks of another host keep their hearts there.
            return f" waiting for rank {self.ranks[1 - self.rank]}" if self.world == 2 else ""
        worst = blame(present)
        return f" waiting for rank {worst.rank} (step {worst.step}, silent {worst.age_s:.0f} s)"


def _undisturbed() -> AbstractContextManager[object]:
    """A context without torch's dispatch modes; leaving none costs nothing."""
    from torch._C import _len_torch_dispatch_stack
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes() if _len_torch_dispatch_stack() else nullcontext()


@functools.lru_cache(maxsize=4096)
def _stream(path: str, tag: str) -> int:
    """Number of a stream of messages inside one communicator, the same on both ends."""
    digest = hashlib.blake2b(f"{path}#{tag}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
