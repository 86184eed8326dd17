"""Farther places for the checkpoints of a store: sent there behind training, found there again.

A level takes what is complete at the nearest place, usually a disk of this host, and copies it to a
slower and safer one, usually an object store. Rank 0 does so in a thread of its own: one checkpoint
is on its way and one waits; a newer one takes the place of the one that waits. What is being sent
is not deleted here meanwhile. A place that fails is tried again, and reported; the nearer
checkpoint stays as good as it was.

Source: Maurya et al., DataStates-LLM, 2024, section IV (streamlined multi-level flushing).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from shoal.checkpoint.image import Chunk, Image, ImageSlot, write_image
from shoal.checkpoint.peers import call_on_first
from shoal.checkpoint.reader import ByteRange, bytes_in_turn
from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
from shoal.checkpoint.shards import file_name, shard_name
from shoal.checkpoint.source import CHUNK_BYTES
from shoal.core.errors import CheckpointError, ShoalError, require

if TYPE_CHECKING:
    from shoal.checkpoint.peers import Peers
    from shoal.checkpoint.storage import Draft
    from shoal.checkpoint.store import Store

# Files of one checkpoint that are on their way at once; each takes a few chunks of memory.
_FILES = 4
# s before the second try, doubled for each that follows, and the longest.
_PAUSE_S, _LONGEST_S = 1.0, 30.0
# How often a rank that waits for the last checkpoint reports that it lives, s.
_ALIVE_S = 0.5


class LevelReport(NamedTuple):
    """What became of a checkpoint at a level.

    Args:
        step: which one; None where it is about the place itself.
        place: the level.
        state: ``complete``; ``retry`` after a try that failed; ``failed`` after the last;
            ``skipped`` because a newer one took its turn; ``unreachable``; ``passed_over`` while
            loading, because it is damaged or cannot be read.
        seconds: since the first try began.
        bytes: sent.
    """

    step: int | None
    place: str
    state: str
    tries: int = 0
    seconds: float = 0.0
    bytes: int = 0
    message: str = ""


class LevelCopier:
    """Sends checkpoints from one store to another.

    Args:
        near: where they are committed.
        far: where they are sent; keeps as many as it says.
        every: every so many-th one is sent, and the last one.
        tries: how often one is tried before it is given up.

    Raises:
        CheckpointError: another run is saving there.
    """

    def __init__(self, near: Store, far: Store, *, every: int = 1, tries: int = 5) -> None:
        for name, value in (("every", every), ("tries", tries)):
            require(value >= 1, f"checkpoint.levels.{name}", value, expected="at least 1")
        self.near, self.far = near, far
        self._every, self._tries = every, tries
        self._held: contextlib.ExitStack | None = None
        self._reports: list[LevelReport] = []
        self._count = 0
        self._unsent: int | None = None
        self._waiting: int | None = None
        self._over = False
        self._abandoned = threading.Event()
        self._changed = threading.Condition()
        try:
            self._hold()
        except CheckpointError as cause:
            if not isinstance(cause.__cause__, OSError):
                raise
            # It may be back when there is something to send.
            self._report(None, "unreachable", message=str(cause))
        near.followers.append(self._put)
        self._thread = threading.Thread(target=self._run, name="checkpoint-level", daemon=True)
        self._thread.start()

    def reports(self) -> list[LevelReport]:
        """What happened and was not returned before, oldest first."""
        with self._changed:
            reports, self._reports = self._reports, []
        return reports

    def close(self, *, abandon: bool = False, alive: Callable[[], None] = lambda: None) -> None:
        """Send the last checkpoint, wait for it, and let go of the place.

        Args:
            abandon: send nothing more, and do not wait.
            alive: called every now and then.
        """
        with self._changed:
            if abandon:
                self._abandoned.set()
                self._take()
            elif not self._over and self._unsent is not None:
                self._give(self._unsent)
            self._over = True
            self._changed.notify_all()
        while not abandon and self._thread.is_alive():
            self._thread.join(_ALIVE_S)
            alive()

    def _put(self, step: int) -> None:
        """A step was committed."""
        with self._changed:
            self._count += 1
            self._unsent = step
            if self._count % self._every == 0 and not self._over:
                self._give(step)

    def _give(self, step: int) -> None:
        """A step waits from now on; the caller has the lock."""
        older = self._take()
        if older is not None and older != step:
            self._reports.append(LevelReport(older, self.far.where, "skipped"))
        self._unsent = None
        self.near.pinned[step] += 1
        self._waiting = step
        self._changed.notify_all()

    def _take(self) -> int | None:
        """The step that waits, which waits no longer; the caller has the lock."""
        step, self._waiting = self._waiting, None
        if step is not None:
            self.near.pinned[step] -= 1
        return step

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._over)
                step = self._waiting
                if step is None:
                    break
                self._waiting = None  # it stays pinned until it is there
            try:
                self._bring(step)
            finally:
                with self._changed:
                    self.near.pinned[step] -= 1
        if self._held is not None:
            self._held.close()

    def _bring(self, step: int) -> None:
        """Send a step, several times if need be."""
        begin = time.perf_counter()
        for number in range(1, self._tries + 1):
            failures: list[ShoalError] = []
            sent = 0
            try:
                with self.far.noting(failures, step):
                    self._hold()
                    sent = self._send(step, number)
            except Exception as cause:  # a thread has no caller
                failures.append(CheckpointError(f"step {step}: {type(cause).__name__}: {cause}"))
            last = number == self._tries or self._abandoned.is_set()
            state = "complete" if not failures else "failed" if last else "retry"
            self._report(
                step,
                state,
                number,
                time.perf_counter() - begin,
                sent,
                str(failures[0]) if failures else "",
            )
            if not failures or last:
                return
            self._abandoned.wait(min(_LONGEST_S, _PAUSE_S * 2 ** (number - 1)))

    def _hold(self) -> None:
        if self._held is None:
            held = contextlib.ExitStack()
            held.enter_context(self.far.hold())
            self._held = held

    def _send(self, step: int, number: int) -> int:
        """Copy a step, every piece compared with its checksum on the way; returns its bytes."""
        saved = SavedCheckpoint(self.near.storage.folder(step))
        size = sum(file.bytes for file in saved.index.files.values())
        self.far.require_room(step, size)
        # A save of its own: what a try has left must not be taken for a part of the next.
        draft = self.far.storage.draft(step, f"{time.time_ns():x}-{number}")
        try:
            draft.replace()
            draft.prepare()
            saved.check_files()
            ranks = range(saved.index.world)
            with ThreadPoolExecutor(_FILES, thread_name_prefix="checkpoint-send") as pool:
                for done in [pool.submit(self._copy, saved, draft, rank) for rank in ranks]:
                    done.result()
            self.far.storage.commit(draft, saved.index.encode())
        except BaseException:
            draft.discard()
            raise
        self.far.retain(step)
        return size

    def _copy(self, saved: SavedCheckpoint, draft: Draft, rank: int) -> None:
        name = file_name(rank)
        image = _image(saved, name)
        starts = range(0, image.size, CHUNK_BYTES)
        ranges = [ByteRange(name, at, min(at + CHUNK_BYTES, image.size)) for at in starts]
        with bytes_in_turn(saved.folder, ranges) as arriving:

            def chunks() -> Iterator[Chunk]:
                for one, data in zip(ranges, arriving, strict=True):
                    if self._abandoned.is_set():
                        raise CheckpointError(f"step {draft.step}: the run was aborted")
                    if isinstance(data, OSError):
                        raise data
                    yield one.start, data.numpy()

            sent = write_image(draft, rank, image, chunks())
        there = saved.index.shard(name)
        for at, (tensor, piece, _) in enumerate(there.pieces()):
            same = sent.crc32c[at] == piece.crc32c
            if not same and (piece.crc32c is not None or not saved.intact(tensor, piece)):
                raise saved.damage(tensor, piece)
        if saved.index.files[name].shard_sha256 is not None:
            draft.put(shard_name(rank), saved.index.shard_bytes(name))

    def _report(
        self,
        step: int | None,
        state: str,
        tries: int = 0,
        seconds: float = 0.0,
        nbytes: int = 0,
        message: str = "",
    ) -> None:
        with self._changed:
            self._reports.append(
                LevelReport(step, self.far.where, state, tries, seconds, nbytes, message)
            )


class CheckpointLevels:
    """All levels of a run, on one rank; rank 0 sends.

    Args:
        peers: the ranks of the run; all of them open it.
        makers: each makes a level; called on rank 0.

    Raises:
        ShoalError: on every rank, if another run saves at a level or no part can reach it.
    """

    def __init__(self, peers: Peers, makers: Sequence[Callable[[], LevelCopier]]) -> None:
        self._levels: list[LevelCopier] = []

        def begin() -> None:
            try:
                for make in makers:
                    self._levels.append(make())
            except ShoalError:
                self.close(abandon=True)
                raise

        if makers:
            call_on_first(peers, begin)

    def reports(self) -> list[LevelReport]:
        """See :meth:`LevelCopier.reports`; of all of them."""
        return [report for level in self._levels for report in level.reports()]

    def close(self, *, abandon: bool = False, alive: Callable[[], None] = lambda: None) -> None:
        """See :meth:`LevelCopier.close`."""
        for level in self._levels:
            level.close(abandon=abandon, alive=alive)


def nearest(
    stores: Sequence[Store], step: int | None = None
) -> tuple[int | None, list[int], list[LevelReport]]:
    """The newest step of all places, or a given one, and where it is, nearest first.

    Args:
        stores: the places, nearest first.
        step: which one; the newest if not given.

    Returns:
        The step, None if there is none; numbers of the stores that have it; and those places that
        do not say what they have, or hold a newer step without its index.

    Raises:
        CheckpointError: none is found, and a place that does not answer may have one.
    """
    silent: list[LevelReport] = []
    there: list[Collection[int]] = []
    lost: list[LevelReport] = []
    for store in stores:
        try:
            there.append(store.steps())
            lost += [
                LevelReport(one, store.where, "passed_over", message="its index.json is missing")
                for one in store.unfinished()
            ]
        except (OSError, ShoalError) as cause:
            there.append(())
            silent.append(LevelReport(step, store.where, "unreachable", message=str(cause)))
    wanted = max((max(steps) for steps in there if steps), default=None) if step is None else step
    results = [number for number, steps in enumerate(there) if wanted in steps]
    if not results and silent:
        raise CheckpointError(
            f"{silent[0].place}: cannot be asked for its checkpoints ({silent[0].message}), and "
            f"no other place has one to resume from; make it reachable, or start a new run under "
            "another name"
        )
    if step is None:
        silent += [one for one in lost if one.step is not None and one.step > (wanted or 0)]
    return wanted, results, silent


def newest(stores: Sequence[Store]) -> SavedCheckpoint:
    """The newest checkpoint of all places, from the nearest that has it whole, every byte verified.

    Raises:
        CheckpointError: there is none, or no place has the newest whole.
    """
    step, result, _ = nearest(stores)
    if step is None:
        raise CheckpointError(f"{stores[0].where}: holds no checkpoint")
    failures: list[CheckpointError] = []
    for number in result:
        try:
            return stores[number].open(step)
        except CheckpointError as cause:
            failures.append(cause)
    raise failures[0]


def _image(saved: SavedCheckpoint, file: str) -> Image:
    """A file of a checkpoint as it lies."""
    shard, size = saved.index.shard(file), saved.index.files[file].bytes
    slots = tuple(
        ImageSlot(
            piece.key or name,
            name,
            saved.index.tensors[name].dtype,
            saved.index.tensors[name].shape,
            piece.offset,
            piece.shape,
            start,
            start + piece.bytes,
        )
        for name, piece, start in shard.pieces()
    )
    header = saved.folder.read(file, 0, slots[0].start if slots else size).tobytes()
    return Image(header, slots, size)
