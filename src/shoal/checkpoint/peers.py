"""The ranks that save together, as saving needs them: what one sends, all receive."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shoal.core.errors import CheckpointError, ShoalError

if TYPE_CHECKING:
    from shoal.ir.comm import Comm

_TAG = "checkpoint"


class Peers(Protocol):
    """Some ranks; all of them make the same calls in the same order.

    Attributes:
        rank: number of this one, from 0.
        world: how many there are.
    """

    rank: int
    world: int

    def barrier(self) -> None:
        """Wait for all."""

    def gather(self, data: bytes) -> list[bytes]:
        """What every rank gave, in rank order."""

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """What every rank gave for this one, in rank order.

        Args:
            messages: what this one gives, by rank.
        """


class SinglePeer:
    """One rank."""

    rank = 0
    world = 1

    def barrier(self) -> None:
        """See :class:`Peers`."""

    def gather(self, data: bytes) -> list[bytes]:
        return [data]

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        return list(messages)


class CommPeers:
    """Ranks that have a communicator."""

    def __init__(self, comm: Comm) -> None:
        self.rank = comm.rank
        self.world = comm.world
        self._comm = comm

    def barrier(self) -> None:
        self._comm.barrier()

    def gather(self, data: bytes) -> list[bytes]:
        import torch

        device = self._comm.device
        own = torch.tensor([len(data)], dtype=torch.int64, device=device)
        sizes = own.new_empty(self.world)
        self._comm.all_gather(sizes, own, tag=_TAG).wait()
        longest = max(1, int(sizes.max()))
        x = torch.zeros(longest, dtype=torch.uint8)
        x[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        out = torch.empty(self.world * longest, dtype=torch.uint8, device=device)
        self._comm.all_gather(out, x.to(device), tag=_TAG).wait()
        rows = out.cpu().view(self.world, longest).numpy()
        return [row[:size].tobytes() for row, size in zip(rows, sizes.tolist(), strict=True)]

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        import torch

        device = self._comm.device
        own = torch.tensor([len(one) for one in messages], dtype=torch.int64, device=device)
        sizes = torch.empty_like(own)
        self._comm.all_to_all(
            list(torch.split(sizes, 1)), list(torch.split(own, 1)), tag=_TAG
        ).wait()
        outs = [torch.empty(n, dtype=torch.uint8, device=device) for n in sizes.tolist()]
        xs = [torch.frombuffer(bytearray(one or b"\0"), dtype=torch.uint8) for one in messages]
        sent = [x[: len(one)].to(device) for x, one in zip(xs, messages, strict=True)]
        self._comm.all_to_all(outs, sent, tag=_TAG).wait()
        return [out.cpu().numpy().tobytes() for out in outs]


def call_on_first(peers: Peers, call: Callable[[], Any]) -> Any:
    """Call something on rank 0; all ranks receive what it returned, which is plain data.

    Raises:
        ShoalError: it was refused; on rank 0 as it was, on the others with the same words.
    """
    refusal: ShoalError | None = None
    said: list[Any] = [None, ""]
    if peers.rank == 0:
        try:
            said[0] = call()
        except ShoalError as cause:
            refusal, said[1] = cause, str(cause)
    result, words = json.loads(peers.gather(json.dumps(said).encode())[0])
    if words:
        raise refusal or CheckpointError(words)
    return result
