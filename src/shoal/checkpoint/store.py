"""A store of checkpoints that is never without a loadable one.

Layout::

    root/step-00000100/rank-00000.safetensors rank-00000.json ... index.json

All ranks write into one draft: a file of tensors, and when it is durable the shard of the index
that says what lies in it. Rank 0 makes one index of the shards' layouts and checksums, and one act
of the storage commits it: a rename of the directory, or the index that is written last. Whatever is
left of an interrupted save is removed by the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.image import image_of, write_image
from shoal.checkpoint.index import Merger
from shoal.checkpoint.pieces import Given, Piece, ReadyPiece, as_pieces, payload_bytes
from shoal.checkpoint.protocols import RankShare, SaveTicket
from shoal.checkpoint.remote import RemoteStorage, is_address
from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
from shoal.checkpoint.shards import shard_name
from shoal.checkpoint.source import ByteSource, straight
from shoal.checkpoint.storage import LocalFolder, LocalStorage
from shoal.core.errors import CheckpointError, CorruptError, ShoalError, require

if TYPE_CHECKING:
    from shoal.checkpoint.shards import FileIndex
    from shoal.checkpoint.storage import Draft, Folder, Storage

__all__ = ["MODEL", "OPTIMIZER", "Piece", "SavedCheckpoint", "Store"]

# Names of tensors begin with what they belong to: weights, state of the optimizer.
MODEL = "model."
OPTIMIZER = "optimizer."


class Store:
    """The checkpoints of one run.

    Args:
        root: their directory, created by the first save; or an address such as
            ``s3://bucket/run`` or ``memory://run``.
        keep: how many of the newest are kept, at least 1.

    Attributes:
        storage: the place itself.
        followers: called with every step that is committed here, before older ones are deleted.
        pinned: step -> how many still read it; it is not deleted meanwhile.
    """

    def __init__(self, root: Path | str, keep: int = 3) -> None:
        require(keep >= 1, "checkpoint.keep", keep, expected="a number of at least 1")
        self.storage: Storage = storage_of(root)
        self.followers: list[Callable[[int], None]] = []
        self.pinned: Counter[int] = Counter()
        self.root = Path(root)
        self.keep = keep
        self._held = False
        self._merger = Merger()

    def steps(self) -> tuple[int, ...]:
        """Saved steps, oldest first: those with an index; their tensors may be damaged."""
        return self.storage.steps()

    def unfinished(self) -> tuple[int, ...]:
        """Steps without an index, such as those of a copy that was interrupted."""
        return self.storage.unfinished()

    def folder(self, step: int) -> Path:
        """The directory of a saved step, of a store that lies on this host.

        Raises:
            CheckpointError: no such step; lists those that there are.
        """
        return Path(self._folder(step).where())

    def _folder(self, step: int) -> Folder:
        try:
            return self.storage.folder(step)
        except KeyError:
            there = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(
                f"{self.where}: no checkpoint of step {step}; there are: {there}"
            ) from None

    @property
    def where(self) -> str:
        """What messages call it."""
        return self.storage.where()

    def save(
        self,
        step: int,
        pieces: Given,
        meta: Mapping[str, Any],
        *,
        rank: int = 0,
        world: int = 1,
        barrier: Callable[[], None] | None = None,
    ) -> None:
        """Save one step; every rank calls this with its own pieces.

        Each element of each tensor is given by at least one rank; of replicated
        tensors it is enough that one rank gives them. When the call returns, the
        checkpoint is on the disk, on every rank. A step that was saved before is replaced.

        Args:
            step: steps done, at least 0.
            pieces: name -> piece, or several; a plain tensor is whole. Names of weights begin with
                :data:`MODEL`, so that they can be exported.
            meta: plain data to keep beside (rank 0's is kept): ``model`` (its configuration),
                ``job``, ``data`` (position), ``seed``, ``optimizer``, ``versions``; ``step`` is
                added.
            rank: number of the caller.
            world: number of callers.
            barrier: waits for all ranks; called exactly three times, failures included.

        Raises:
            CheckpointError: a piece that cannot be stored, ranks that disagree, a full disk,
                or another process that saves here; checkpoints saved before stay valid.
            CorruptError: the disk does not return what was written; nothing is deleted then.
        """
        self.save_chosen(
            step, lambda: as_pieces(pieces), meta, rank=rank, world=world, barrier=barrier
        )

    def save_chosen(
        self,
        step: int,
        pieces: Mapping[str, ReadyPiece] | Callable[[], Mapping[str, ReadyPiece]],
        meta: Mapping[str, Any],
        *,
        rank: int = 0,
        world: int = 1,
        barrier: Callable[[], None] | None = None,
        attempt: str = "",
        ticket: SaveTicket | None = None,
    ) -> None:
        """The same with pieces that are already checked, or checked on request.

        ``attempt`` distinguishes this save from others of the step, on all ranks alike; ``ticket``
        receives how long what took.
        """
        ticket = ticket or SaveTicket(step)
        require(step >= 0, "step", step, expected="at least 0", error=CheckpointError)
        require(
            0 <= rank < world, "rank", rank, expected=f"0 to {world - 1}", error=CheckpointError
        )
        require(
            world == 1 or barrier is not None,
            "barrier",
            barrier,
            expected=f"a function that waits for all {world} ranks",
            error=CheckpointError,
        )
        wait = barrier or (lambda: None)
        draft = self.storage.draft(step, attempt)
        failures: list[ShoalError] = []
        needed = 0
        prepared = False

        # A rank that fails still meets the others at the barriers, or they would hang there.
        with contextlib.ExitStack() as held:
            with self.noting(failures, step):
                plain = plain_meta(meta, step)
                chosen = pieces() if callable(pieces) else pieces
                needed = payload_bytes(chosen) + len(json.dumps(plain))
                if rank == 0:
                    if not self._held:
                        held.enter_context(self.hold())
                    draft.replace()
                    draft.prepare()
                    prepared = True
            wait()
            token = ""
            if not failures:
                with self.noting(failures, step, needed):
                    token = self._write(draft, rank, chosen, needed, ticket)
            if failures and rank and draft.ready():
                refuse(draft, rank, failures[0])
            wait()
            if rank == 0:
                if not failures:
                    with self.noting(failures, step, needed):
                        ticket.ranks = ticket.timed(
                            lambda: self.commit(draft, world, plain), phase="commit"
                        )
                        ticket.timed(lambda: self.retain(step), phase="retain")
                if failures and prepared:
                    # What cannot be removed now is removed by the next save.
                    draft.discard()
            wait()
        if failures:
            raise failures[0]
        if rank and self.storage.token(step) != token:
            raise CheckpointError(
                f"{self.where}: step {step} is not saved, because another rank failed; see its "
                f"own error"
            )

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep other runs from saving here; what interrupted saves left is removed first.

        Raises:
            CheckpointError: another run is saving here, or the place refuses.
        """
        failures: list[ShoalError] = []
        with contextlib.ExitStack() as held:
            with self.noting(failures, 0):
                held.enter_context(self.storage.writing())
                self.storage.clean()
            if failures:
                raise failures[0]
            self._held = True
            try:
                yield
            finally:
                self._held = False

    def open(
        self, step: int, *, expect_model: Mapping[str, Any] | None = None, verify: bool = True
    ) -> SavedCheckpoint:
        """Open one step.

        Args:
            step: which one.
            expect_model: the configuration that ``meta["model"]`` must equal.
            verify: hash every piece now; otherwise each is hashed on its first use, which
                suits ranks that need a part each.

        Raises:
            CheckpointError: no such step, or it is of another model; names what differs.
            CorruptError: it is damaged; names tensor and file and the step to use instead.
        """
        folder = self._folder(step)
        place = Path(folder.where()) if isinstance(folder, LocalFolder) else folder
        saved = SavedCheckpoint(place, advise=lambda: self._advice(step))
        if expect_model is not None:
            saved.require_model(expect_model)
        if verify:
            saved.verify()
        return saved

    def latest(
        self,
        *,
        on_corrupt: Callable[[CorruptError], None] | None = None,
        expect_model: Mapping[str, Any] | None = None,
        verify: bool = True,
    ) -> SavedCheckpoint | None:
        """The newest checkpoint, every byte verified; None if nothing was saved yet.

        Args:
            on_corrupt: called with each damaged checkpoint that is passed over for an older
                one. Without it a damaged newest checkpoint is an error.
            expect_model: the configuration that ``meta["model"]`` must equal.
            verify: hash every piece now; otherwise when it is used, see :meth:`open`.

        Raises:
            CorruptError: the newest is damaged; the message offers the newest intact one.
                With ``on_corrupt``: all are damaged.
            CheckpointError: it is of another model.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.open(step, expect_model=expect_model, verify=verify)
            except CorruptError as cause:
                if on_corrupt is None or step == steps[0]:
                    raise
                on_corrupt(cause)
        return None

    def _advice(self, step: int) -> str:
        for older in reversed([one for one in self.steps() if one < step]):
            try:
                SavedCheckpoint(self.storage.folder(older)).verify()
            except CheckpointError:
                continue  # damaged as well: it is not offered
            return f"step {older} in {self.where} is intact; resume from it"
        return "no earlier step is intact; restore the file from a copy"

    def _write(
        self,
        draft: Draft,
        rank: int,
        pieces: Mapping[str, ReadyPiece],
        needed: int,
        ticket: SaveTicket,
    ) -> str:
        if not draft.ready():
            raise CheckpointError(
                f"{self.where}: step {draft.step} is not prepared, because rank 0 failed or the "
                "ranks do not share this directory; see its own error"
            )
        self.require_room(draft.step, needed)
        image = image_of(pieces)
        source = ByteSource(image, pieces)
        written = ticket.timed(
            lambda: write_image(draft, rank, image, straight(source), source.checksums),
            phase="write",
        )
        self.vote(draft, rank, written, ticket)
        return draft.token()

    def vote(self, draft: Draft, rank: int, written: FileIndex, ticket: SaveTicket) -> None:
        """Report what a rank has written, and how long that took.

        Raises:
            OSError: the place refuses.
        """
        _, phases, spans = ticket.share()
        head = written.head.model_copy(update={"phases_s": phases, "spans_s": spans})
        draft.put(shard_name(rank), dataclasses.replace(written, head=head).encode())

    def require_room(self, step: int, needed: int) -> None:
        """Refuse to write more than there is room for.

        Raises:
            CheckpointError: says how much is missing.
        """
        free = self.storage.free_bytes()
        if free is not None and needed > free:
            raise self._full(step, needed, free)

    def commit(self, draft: Draft, world: int, meta: dict[str, Any]) -> tuple[RankShare, ...]:
        """Make a checkpoint of what every rank has written and reported.

        Returns:
            Every rank's share as it has reported it.

        Raises:
            CheckpointError: a rank has reported nothing, or ranks disagree.
            OSError: the place refuses.
        """
        votes: list[bytes] = []
        for rank in range(world):
            vote = draft.get(shard_name(rank))
            if vote is None:
                raise CheckpointError(
                    f"{self.where}: step {draft.step} is not saved, because rank {rank} wrote "
                    f"nothing: {refusal_of(draft, rank) or 'see its log'}"
                )
            votes.append(vote)
        index, heads = self._merger.merge(draft.step, meta, votes)
        self.storage.commit(draft, index.encode())
        for follow in self.followers:
            follow(draft.step)
        return tuple(RankShare(one.file.bytes, one.phases_s, one.spans_s) for one in heads)

    def retain(self, newest: int) -> None:
        """Delete what is beyond ``keep``, after the new one was read back from the disk."""
        others = [step for step in self.steps() if step != newest]
        victims = others[: max(0, len(others) + 1 - self.keep)]
        victims = [step for step in victims if not self.pinned[step]]
        if not victims:
            return
        self.storage.forget(newest)
        saved = self.open(newest, verify=False)
        if self.storage.reads_back:
            saved.read_back()
        for step in victims:
            self.storage.remove(step)

    def _full(self, step: int, needed: int, free: int) -> CheckpointError:
        kept = ", ".join(map(str, self.steps())) or "none yet"
        return CheckpointError(
            f"{self.where}: disk full while saving step {step}: {needed} bytes are needed and "
            f"{free} are free; free some space or choose another place; "
            f"checkpoints saved before stay valid: {kept}"
        )

    @contextlib.contextmanager
    def noting(self, failures: list[ShoalError], step: int, needed: int = 0) -> Iterator[None]:
        """Turn what the file system says into the house's words, and keep it for later."""
        try:
            yield
        except (OSError, ShoalError) as cause:
            refusal = cause if isinstance(cause, OSError) else cause.__cause__
            failure: ShoalError
            if isinstance(refusal, OSError) and refusal.errno in (errno.ENOSPC, errno.EDQUOT):
                failure = self._full(step, needed, self.storage.free_bytes() or 0)
            elif isinstance(cause, OSError):
                failure = CheckpointError(
                    f"{cause.filename or self.where}: step {step} cannot be saved "
                    f"({cause.strerror or cause}); choose another place or correct its permissions"
                )
            else:
                failures.append(cause)
                return
            failure.__cause__ = cause
            failures.append(failure)


def storage_of(root: Path | str) -> Storage:
    """The place that a path or an address names."""
    if is_address(root):
        return RemoteStorage(str(root))
    return LocalStorage(Path(root))


def refusal_names(rank: int) -> tuple[str, str]:
    """The files in which a rank leaves word that it failed: with the reason, and without one."""
    return f"rank-{rank:05d}.failed", f"rank-{rank:05d}.full"


def refuse(draft: Draft, rank: int, failure: ShoalError) -> None:
    """Leave word for rank 0 of why a rank's part is missing.

    A full disk may have no room for the words; a name without content it still takes.
    """
    failed, full = refusal_names(rank)
    with contextlib.suppress(OSError, ShoalError):
        try:
            draft.put(failed, str(failure).encode())
        except (OSError, ShoalError):
            draft.put(full, b"")


def refusal_of(draft: Draft, rank: int) -> str | None:
    """Why a rank's part is missing, where it has left word."""
    failed, full = refusal_names(rank)
    words = draft.get(failed)
    if words:
        return words.decode()
    if draft.get(full) is None and words is None:
        return None
    return "its disk is full while saving; free some space or lower checkpoint.keep"


def plain_meta(meta: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The meta of a step as JSON keeps it.

    Raises:
        CheckpointError: it is not plain data.
    """
    try:
        plain = json.loads(json.dumps({**meta, "step": step}, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as cause:
        raise CheckpointError(
            f"meta of step {step}: not plain data ({cause}); give text, finite numbers, lists "
            "and mappings"
        ) from cause
    return dict(plain)
