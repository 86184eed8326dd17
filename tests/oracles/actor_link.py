"""Edges of an actor graph between processes: the same req and ack, as messages of a Comm.

An :class:`Inlet` acts only when it has a free register, so its call for an item is the
``ack`` that the sender waits for: nothing travels that the other side has no room for.
A side that fails tells the other one, whose graph then ends with an error that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from shoal.core.errors import PlanError, RankError, require

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.parallel.protocols import Comm

_GO, _FAILED = 1, -1


class _Link:
    """One side of a link; a context manager around the graph's run.

    Args:
        comm: ranks of both sides.
        peer: the other side.
        like: a tensor of the shape and type of every item.
        items: how many travel; both sides say the same.
        tag: told apart by it from other links of the pair.
    """

    def __init__(
        self, comm: Comm, peer: int, like: Tensor, *, items: int, tag: str = "actor"
    ) -> None:
        require(items >= 0, "items", items, expected="at least 0", error=PlanError)
        self._comm = comm
        self._peer = peer
        self._like = like
        self._left = items
        self._item, self._call = tag, f"{tag} call"

    def __enter__(self) -> Self:
        return self

    def _word(self, value: int = 0) -> Tensor:
        import torch

        return torch.tensor([value], dtype=torch.int64, device=self._comm.device)

    def _hear(self, tag: str) -> bool:
        word = self._word()
        self._comm.receive(word, self._peer, tag=tag).wait()
        return int(word) == _GO

    def _tell(self, value: int, tag: str) -> None:
        self._comm.send(self._word(value), self._peer, tag=tag).wait()

    def _lost(self) -> RankError:
        self._left = 0
        other = self._comm.ranks[self._peer]
        return RankError(f"the actors of rank {other} failed; see its own error")


class Outlet(_Link):
    """The sending side: an actor's ``act`` that takes one tensor."""

    def __call__(self, x: Tensor) -> None:
        """Send an item once the other side has room for it.

        Raises:
            RankError: the other side failed, or is gone.
        """
        if not self._hear(self._call):
            raise self._lost()
        self._tell(_GO, self._item)
        self._comm.send(x.contiguous(), self._peer, tag=self._item).wait()
        self._left -= 1

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._left and self._hear(self._call):
            self._tell(_FAILED, self._item)


class Inlet(_Link):
    """The receiving side: an ``act`` without inputs that returns the next tensor."""

    def __call__(self, _: int) -> Tensor:
        """Call for an item and wait for it.

        Raises:
            RankError: the other side failed, or is gone.
        """
        import torch

        self._tell(_GO, self._call)
        if not self._hear(self._item):
            raise self._lost()
        out = torch.empty_like(self._like)
        self._comm.receive(out, self._peer, tag=self._item).wait()
        self._left -= 1
        return out

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and self._left:
            self._tell(_FAILED, self._call)
