"""What ranks exchange before they load together: what they want, and who reads it when.

No rank gathers what all want, box by box. Each tensor has a rank that receives which ranks want
which boxes of it and makes runs of them (:mod:`~shoal.checkpoint.runs`); the runs are small, and
all receive them.
A plan is kept: ranks that load another checkpoint of the same layout exchange two digests.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.checkpoint.reads import BoxRequest, FileRead, ReadPlan, Wants, plan_reads
from shoal.checkpoint.runs import BoxRuns, OwnedBox
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError, CorruptError

if TYPE_CHECKING:
    from shoal.checkpoint.peers import Peers
    from shoal.checkpoint.saved_checkpoint import SavedCheckpoint

_KEPT = 4
"""Plans that are kept: those of a run's checkpoints and of what it was started from."""


@dataclass(frozen=True)
class ReadTurns:
    """One rank's plan and when its reads come.

    Args:
        plan: the rank's own.
        count: rounds until the last rank has read all.
        exchanged: rounds in which any rank passes something on.
        inbox: round -> the ranks that pass something on to this one, and the reads.
        fresh: planned now, and not kept from an earlier load.
    """

    plan: ReadPlan
    count: int
    exchanged: frozenset[int]
    inbox: dict[int, list[tuple[int, FileRead]]]
    fresh: bool = True


@dataclass
class KeptPlans:
    """Plans of ranks that load in this process.

    Attributes:
        kept: key of layouts and requests -> digest of all ranks' requests, plan.
    """

    kept: OrderedDict[tuple[Any, ...], tuple[str, ReadTurns]] = field(default_factory=OrderedDict)

    def keep(self, key: tuple[Any, ...], joint: str, turns: ReadTurns) -> None:
        """Keep a plan, for the newest few."""
        self.kept[key] = joint, turns
        self.kept.move_to_end(key)
        while len(self.kept) > _KEPT * max(1, len({rank for rank, *_ in self.kept})):
            self.kept.popitem(last=False)


class _Told(NamedTuple):
    """What a rank says first.

    Args:
        flaw: why its wishes cannot be fulfilled.
        wishes: digest of them.
        kept: digest of what all asked for when it last planned these wishes of this layout.
    """

    flaw: str
    wishes: str
    kept: str


def agreed(
    saved: SavedCheckpoint,
    wishes: Sequence[BoxRequest],
    peers: Peers,
    plans: KeptPlans,
    *,
    flaw: str = "",
    whole: bool,
    read_bytes: int,
) -> ReadTurns:
    """The plan of this rank, and when its reads come; called by all ranks.

    Raises:
        CheckpointError: some rank's wishes cannot be fulfilled, or a file cannot be read; on every
            rank.
        CorruptError: a file, or its shard of the index, has changed since it was written; on every
            rank.
    """
    own = _digest(list(wishes))
    key = (peers.rank, peers.world, saved.index.layout, own, whole, read_bytes)
    known = plans.kept.get(key) if saved.index.layout else None
    result = _Told(flaw, own, "" if known is None else known[0])
    heard = [_Told(*json.loads(one)) for one in peers.gather(json.dumps(result).encode())]
    if flaw:
        raise CheckpointError(flaw)
    for rank, other in enumerate(heard):
        if other.flaw:
            raise CheckpointError(f"rank {rank}: {other.flaw}")
    joint = _digest([one.wishes for one in heard])
    turns: ReadTurns | None = None
    failure: CheckpointError | None = None
    if known is not None and all(one.kept == joint for one in heard):
        turns = known[1]
        try:
            for file in turns.plan.files:
                saved.index.check_file(file)
        except CheckpointError as cause:
            failure = cause
        _settled(saved, peers, failure, [])
        return ReadTurns(turns.plan, turns.count, turns.exchanged, turns.inbox, fresh=False)
    wants = shared(wishes, peers)
    plan: ReadPlan | None = None
    try:
        plan = plan_reads(
            saved.index, wants, wishes, peers.rank, whole=whole, read_bytes=read_bytes
        )
    except CheckpointError as cause:
        failure = cause
    passes = [] if plan is None else [set(r.ranks) - {peers.rank} != set() for r in plan.reads]
    rounds = _settled(saved, peers, failure, passes)
    assert plan is not None
    turns = ReadTurns(
        plan,
        max(map(len, rounds)),
        frozenset(at for one in rounds for at, passed in enumerate(one) if passed),
        _inbox(plan, peers),
    )
    if saved.index.layout:
        plans.keep(key, joint, turns)
    return turns


def shared(wishes: Sequence[BoxRequest], peers: Peers) -> Wants:
    """What all ranks want."""
    return merge_wants(peers.gather(together(peers.exchange(addressed(wishes, peers.world)))))


def addressed(wishes: Sequence[BoxRequest], world: int) -> list[bytes]:
    """What one rank sends to each of the others: its wishes for the tensors of that one."""
    homes: dict[int, dict[str, list[list[int]]]] = {}
    for wish in wishes:
        home = homes.setdefault(zlib.crc32(wish.name.encode()) % world, {})
        home.setdefault(wish.name, []).append([*wish.offset, *wish.shape])
    result = [b""] * world
    for number, boxes in homes.items():
        result[number] = json.dumps(boxes).encode()
    return result


def together(messages: Sequence[bytes]) -> bytes:
    """What a rank makes of the wishes for its tensors, which all ranks have sent to it."""
    owned: dict[str, list[OwnedBox]] = {}
    for rank, one in enumerate(messages):
        for name, boxes in json.loads(one or b"{}").items():
            for box in boxes:
                dims = len(box) // 2
                part = Box(tuple(box[:dims]), tuple(box[dims:]))
                owned.setdefault(name, []).append(OwnedBox(rank, part))
    result = {
        name: BoxRuns.of_boxes(boxes, len(boxes[0].box.shape)).plain()
        for name, boxes in owned.items()
    }
    return json.dumps(result).encode()


def merge_wants(messages: Sequence[bytes]) -> Wants:
    """What all ranks want, out of what all have made of it."""
    return {
        name: BoxRuns.from_plain(rows, len(rows[0]) // 3 - 1)
        for one in messages
        for name, rows in json.loads(one).items()
    }


def _settled(
    saved: SavedCheckpoint, peers: Peers, failure: CheckpointError | None, passes: Sequence[bool]
) -> list[list[bool]]:
    """Of each rank, which of its reads it passes on.

    Raises:
        CheckpointError: planning failed on some rank; on all alike.
    """
    kind = "" if failure is None else "corrupt" if isinstance(failure, CorruptError) else "refused"
    words = json.dumps([kind, str(failure or ""), "".join("01"[one] for one in passes)])
    heard = [json.loads(one) for one in peers.gather(words.encode())]
    for _, text, _ in [one for one in heard if one[0] == "refused"]:
        raise failure or CheckpointError(text)
    for _, text, _ in [one for one in heard if one[0]]:
        raise saved.damaged(text) from failure
    return [[mark == "1" for mark in one[2]] for one in heard]


def _inbox(plan: ReadPlan, peers: Peers) -> dict[int, list[tuple[int, FileRead]]]:
    """Round -> what others pass on to this rank; each notifies those that take its reads."""
    notes: list[list[tuple[int, str, int]]] = [[] for _ in range(peers.world)]
    for number, read in enumerate(plan.reads):
        for rank in read.ranks:
            if rank != peers.rank:
                notes[rank].append((number, read.file, read.start))
    heard = peers.exchange([json.dumps(one).encode() if one else b"" for one in notes])
    known = {(reader, read.file, read.start): read for reader, read in plan.takes}
    result: dict[int, list[tuple[int, FileRead]]] = {}
    for reader, one in enumerate(heard):
        for number, file, start in json.loads(one or b"[]"):
            result.setdefault(number, []).append((reader, known[reader, file, start]))
    return result


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
