"""After a failure: which version is left, and the way back to it.

The ladder: (a) the snapshot processes live, and the trainers read what they hold; (b) some are
lost with their nodes, and their replacements rebuild it from the group; (c) more are lost than
the code survives, and the run goes back to the disk.

Source: Wang et al., Reliable and Efficient In-Memory Fault Tolerance of Large Language Model
Pretraining, 2023, section 4.3.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from shoal.checkpoint.inmemory import MEMORY_CODES
from shoal.checkpoint.inmemory.layout import BoxSegment
from shoal.checkpoint.inmemory.stripes import Stripes
from shoal.checkpoint.inmemory.wire import Members, SnapshotClient
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError

if TYPE_CHECKING:
    import torch


class RecoveryResult(NamedTuple):
    """What a recovery has found.

    Args:
        step: that all processes hold now; None if the run must go back to the disk.
        rung: of the ladder: trainers, rebuilt or disk.
        rebuilt: ranks whose part was rebuilt from others.
        reason: why there is no step, or what was done, in a sentence.
    """

    step: int | None
    rung: str
    rebuilt: tuple[int, ...]
    reason: str


class _View(NamedTuple):
    """What one process says."""

    spec: dict[str, Any]
    blocks: dict[int, list[int]]
    meta: dict[int, dict[str, Any]]


class SnapshotReader(Protocol):
    """Interface of a snapshot process."""

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Ask and wait for the answer."""


def recover(found: Members, asked: Sequence[SnapshotReader]) -> RecoveryResult:
    """Bring every snapshot process to the newest step that all can hold.

    Args:
        found: the processes that live now; replaced ones are empty.
        asked: the same, by rank.

    Raises:
        RankError: a process was lost meanwhile.
        CheckpointError: a process refuses.
    """
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(lambda one: one.call("abort"), asked))
        result = list(pool.map(lambda one: one.call("status", verify=True), asked))
        views = {rank: _view(one) for rank, one in enumerate(result) if one["spec"] is not None}
        step, reason = _newest(views, len(asked))
        rebuilt = [] if step is None else _restore(found, asked, pool, views, step)
        list(pool.map(lambda one: one.call("keep", step=step), asked))
    if step is None:
        return RecoveryResult(None, "disk", (), reason)
    return RecoveryResult(step, "rebuilt" if rebuilt else "trainers", tuple(rebuilt), reason)


def _view(index: Mapping[str, Any]) -> _View:
    return _View(
        index["spec"],
        {slot["step"]: slot["blocks"] for slot in index["slots"]},
        {slot["step"]: slot["meta"] for slot in index["slots"]},
    )


def _groups(views: Mapping[int, _View]) -> list[tuple[int, ...]]:
    return sorted({tuple(view.spec["group"]) for view in views.values()})


def _stripes(view: _View) -> Stripes:
    return Stripes.of(
        MEMORY_CODES.build(view.spec["code"]), len(view.spec["group"]), view.spec["piece"]
    )


def _newest(views: Mapping[int, _View], world: int) -> tuple[int | None, str]:
    """The newest step that is left, and why there is none newer."""
    groups = _groups(views)
    unknown = sorted(set(range(world)) - {rank for group in groups for rank in group})
    if not views:
        return None, "no snapshot was taken yet"
    if unknown:
        return None, f"all members of the groups of ranks {unknown} are lost"
    steps = {step for view in views.values() for step in view.blocks}
    reason = "no version is complete"
    for step in sorted(steps, reverse=True):
        lost: list[int] = []
        for group in groups:
            view = next(views[rank] for rank in group if rank in views)

            there = [views[rank].blocks.get(step, []) if rank in views else [] for rank in group]
            lost += [group[member] for member in _stripes(view).unrecoverable(there)]
        if not lost:
            return step, f"step {step} is whole in memory"
        if step == max(steps):
            reason = (
                f"step {step} cannot be rebuilt: the parts of ranks {sorted(lost)} are lost, more "
                "than the code survives"
            )
    return None, reason


def _restore(
    found: Members,
    asked: Sequence[SnapshotReader],
    pool: ThreadPoolExecutor,
    views: Mapping[int, _View],
    step: int,
) -> list[int]:
    """Have lost parts rebuilt and unfinished parities coded; returns the ranks rebuilt."""
    places = [place.model_dump() for place in found.places]
    rebuilt: list[int] = []
    for group in _groups(views):
        known = [rank for rank in group if rank in views]
        view = views[known[0]]
        stripes = _stripes(view)
        there = [views[rank].blocks.get(step, []) if rank in views else [] for rank in group]
        meta = next(views[rank].meta[step] for rank in known if step in views[rank].meta)
        torn = False
        for member, rank in enumerate(group):
            pieces = [block for block in there[member] if block < stripes.data]
            if len(pieces) < stripes.data:
                asked[rank].call(
                    "rebuild",
                    spec=view.spec,
                    step=step,
                    generation=found.generation,
                    places=places,
                    there=there,
                    meta=meta,
                )
                there[member] = list(range(stripes.blocks))
                rebuilt.append(rank)
            elif len(there[member]) < stripes.blocks:
                torn = True
        if torn:  # the members of a ring code together

            def encode(rank: int) -> None:
                asked[rank].call("encode", step=step, generation=found.generation, places=places)

            list(pool.map(encode, group))
    return rebuilt


class InMemory:
    """A version in the memory of the snapshot processes, read box by box.

    Args:
        found: the processes.
        secret: of the run.
        step: which version; it was recovered.

    Raises:
        RankError: a process is gone.
        CheckpointError: they do not hold this version.
    """

    def __init__(self, found: Members, secret: bytes, step: int) -> None:
        self.step = step
        self.meta: dict[str, Any] = {}
        self._clients: dict[int, SnapshotClient] = {}
        self._parts: dict[str, list[tuple[int, BoxSegment]]] = {}
        self._block: dict[int, int] = {}
        for rank, place in enumerate(found.places):
            client = self._clients[rank] = SnapshotClient(place, found.run, secret, rank=rank)
            view = _view(client.call("status"))
            if step not in view.blocks:
                raise CheckpointError(
                    f"snapshot process of rank {rank}: it has steps {sorted(view.blocks)} and the "
                    f"others step {step}; a version is of one step"
                )
            self.meta = view.meta[step]
            self._block[rank] = _stripes(view).block
            for raw in view.spec["manifests"][str(rank)]:
                segment = BoxSegment.model_validate(raw)
                self._parts.setdefault(segment.name, []).append((rank, segment))

    def names(self) -> Collection[str]:
        return self._parts.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._of(name)[0][1].whole

    def tensor(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A box of a tensor; all of it if no box is given.

        Raises:
            CheckpointError: a part of it is held by no process.
            RankError: a process is gone.
        """
        import torch

        parts = self._of(name)
        start = offset if offset is not None else (0,) * len(self.shape(name))
        size = shape if shape is not None else self.shape(name)
        target = Box(start, size)
        out = torch.empty(size, dtype=getattr(torch, parts[0][1].dtype))
        left = [target] if target.volume else []
        for box, several in _boxes(parts):
            common = target.intersect(box)
            if common is None or not any(rest.intersect(box) for rest in left):
                continue
            whole = self._whole(box, several, out.dtype)
            out[common.slices(target)] = whole[common.slices(box)]
            left = [rest for part in left for rest in part.subtract(box)]
        if left:
            raise CheckpointError(f"tensor {name!r}: nobody holds {left[0]} of it in memory")
        return out

    def close(self) -> None:
        """End the connections."""
        for client in self._clients.values():
            client.close()

    def _of(self, name: str) -> list[tuple[int, BoxSegment]]:
        if name not in self._parts:
            raise CheckpointError(f"no tensor {name!r} in memory; there are {len(self._parts)}")
        return self._parts[name]

    def _whole(
        self, box: Box, parts: Sequence[tuple[int, BoxSegment]], dtype: torch.dtype
    ) -> torch.Tensor:
        """A stored box, put together from the processes that keep bytes of it."""
        import torch

        flat = torch.empty(max(segment.last for _, segment in parts), dtype=torch.uint8)
        view = flat.numpy().data
        for rank, segment in parts:
            into = view[segment.first : segment.last]
            at, block = segment.at, self._block[rank]
            while len(into):
                number, offset = divmod(at, block)
                length = min(len(into), block - offset)
                self._clients[rank].call(
                    "read",
                    into=into[:length],
                    step=self.step,
                    block=number,
                    offset=offset,
                    length=length,
                )
                into, at = into[length:], at + length
        return flat.view(dtype).view(box.shape)


def _boxes(
    parts: Sequence[tuple[int, BoxSegment]],
) -> Iterator[tuple[Box, list[tuple[int, BoxSegment]]]]:
    """Stored boxes with all processes that keep bytes of them."""
    result: dict[Box, list[tuple[int, BoxSegment]]] = {}
    for rank, segment in parts:
        result.setdefault(Box(segment.offset, segment.shape), []).append((rank, segment))
    yield from result.items()
