"""A communicator that writes every operation into the rank's flight recorder.

It wraps any :class:`~shoal.parallel.protocols.Comm`: what it does not know it hands on. An
operation costs some microseconds more, whatever its size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from shoal.train.watch.recorder import Recorder

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.core.meter import Meter
    from shoal.parallel.protocols import Comm, Pending


def phase(comm: object, what: str) -> AbstractContextManager[None]:
    """Around a phase of a step: recorded where ``comm`` is watched."""
    recorder: Recorder | None = getattr(comm, "recorder", None)
    return nullcontext() if recorder is None else recorder.span(what)


class _Recorded:
    """An operation under way."""

    def __init__(self, recorder: Recorder, number: int, pending: Pending) -> None:
        self._recorder = recorder
        self._number = number
        self._pending = pending
        self._done = False

    def wait(self) -> None:
        if self._done:
            self._pending.wait()
            return
        self._recorder.waited(self._number)
        self._pending.wait()
        self._recorder.left(self._number)
        self._done = True


class WatchedComm:
    """See :class:`~shoal.parallel.protocols.Comm`; the rest is the inner communicator's.

    Args:
        inner: who really communicates.
        name: of the communicator, the same on all of its ranks and of no other.
    """

    def __init__(self, inner: Comm, recorder: Recorder, name: str = "") -> None:
        self.inner = inner
        self.recorder = recorder
        self.rank: int = inner.rank
        self.world: int = inner.world
        self.ranks: tuple[int, ...] = inner.ranks
        self.ranks_per_node: int | None = inner.ranks_per_node
        self.device: str = inner.device
        self.meter: Meter = inner.meter
        self._path = name
        self._splits = 0
        spelled = ",".join(map(str, self.ranks)) if self.world <= 48 else f"{self.world} ranks"
        self._comm = recorder.name(f"comm:{name}:{spelled}")
        self._seq = 0
        self._messages: defaultdict[tuple[int, int, int], int] = defaultdict(int)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def split(self, groups: Sequence[Sequence[int]]) -> WatchedComm:
        """The watched communicator of this rank's group."""
        self._splits += 1
        inner = self.inner.split(groups)
        if inner is self.inner:
            return self
        if inner.ranks == self.ranks:
            return WatchedComm(inner, self.recorder, f"{self._path}/{self._splits}")
        first = inner.ranks[0]
        return WatchedComm(inner, self.recorder, f"{self._path}/{self._splits}.{first}")

    def all_reduce(self, x: Tensor, *, tag: str, op: Literal["sum", "max"] = "sum") -> Pending:
        """Start reducing ``x`` over all ranks, in place."""
        return self._collective(
            "all_reduce", tag, x.nbytes, lambda: self.inner.all_reduce(x, tag=tag, op=op)
        )

    def broadcast(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Start copying ``x`` from rank ``root``, in place."""
        return self._collective(
            "broadcast", tag, x.nbytes, lambda: self.inner.broadcast(x, root, tag=tag)
        )

    def reduce(self, x: Tensor, root: int, *, tag: str) -> Pending:
        """Start summing ``x`` over all ranks into rank ``root``."""
        return self._collective(
            "reduce", tag, x.nbytes, lambda: self.inner.reduce(x, root, tag=tag)
        )

    def all_gather(self, out: Tensor, x: Tensor, *, tag: str) -> Pending:
        """``out`` becomes every rank's ``x``, in rank order."""
        return self._collective(
            "all_gather", tag, out.nbytes, lambda: self.inner.all_gather(out, x, tag=tag)
        )

    def reduce_scatter(self, out: Tensor, x: Tensor, *, tag: str) -> Pending:
        """``out`` becomes this rank's part of the sum of ``x``."""
        return self._collective(
            "reduce_scatter", tag, x.nbytes, lambda: self.inner.reduce_scatter(out, x, tag=tag)
        )

    def all_to_all(self, outs: Sequence[Tensor], xs: Sequence[Tensor], *, tag: str) -> Pending:
        """``outs[i]`` becomes what rank i has as its ``xs[rank]``."""
        nbytes = sum(x.nbytes for x in xs)
        return self._collective(
            "all_to_all", tag, nbytes, lambda: self.inner.all_to_all(outs, xs, tag=tag)
        )

    def barrier(self) -> None:
        """Return when every rank has come here."""
        if self.world == 1:
            self.inner.barrier()
            return
        number = self._enter("barrier", "", 0)
        self.inner.barrier()
        self.recorder.issued(number)
        self.recorder.left(number)

    def send(self, x: Tensor, target: int, *, tag: str) -> Pending:
        """Send ``x`` to rank ``target``."""
        return self._message(
            "send", tag, x.nbytes, target, lambda: self.inner.send(x, target, tag=tag)
        )

    def receive(self, out: Tensor, source: int, *, tag: str) -> Pending:
        """Receive into ``out`` what rank ``source`` sends with this tag."""
        return self._message(
            "receive", tag, out.nbytes, source, lambda: self.inner.receive(out, source, tag=tag)
        )

    def _enter(self, op: str, tag: str, nbytes: int) -> int:
        recorder = self.recorder
        self._seq += 1
        return recorder.enter(
            self._comm, recorder.name(op), recorder.name(tag), seq=self._seq, nbytes=nbytes
        )

    def _collective(self, op: str, tag: str, nbytes: int, call: Callable[[], Pending]) -> Pending:
        if self.world == 1:
            return call()
        number = self._enter(op, tag, nbytes)
        pending = call()
        self.recorder.issued(number)
        return _Recorded(self.recorder, number, pending)

    def _message(
        self, op: str, tag: str, nbytes: int, peer: int, call: Callable[[], Pending]
    ) -> Pending:
        recorder = self.recorder
        kind, word = recorder.name(op), recorder.name(tag)
        key = (kind, word, peer)
        self._messages[key] += 1
        number = recorder.enter(
            self._comm,
            kind,
            word,
            seq=self._messages[key],
            nbytes=nbytes,
            peer=self.ranks[peer] if 0 <= peer < self.world else -1,
        )
        pending = call()
        recorder.issued(number)
        return _Recorded(recorder, number, pending)
