"""A directory of checkpoints that is never without a loadable one.

Layout::

    root/step-00000100/rank-00000.safetensors ... index.json

All ranks write into one hidden directory beside, whose name follows from the step.
Rank 0 merges what they wrote into one index, flushes files and directory, and
renames the directory: the rename is the commit. Whatever is left of an interrupted
save is removed by the next one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.checkpoint.index import INDEX_NAME, RankIndex, merge
from shoal.checkpoint.pieces import Chosen, Given, Piece, as_pieces, payload_bytes, write_pieces
from shoal.checkpoint.saved import Saved, drop_from_cache
from shoal.core.config import parse
from shoal.core.errors import CheckpointError, CorruptError, ShoalError, require
from shoal.core.files import fsync_dir, write_atomic

__all__ = ["MODEL", "OPTIMIZER", "Piece", "Saved", "Store"]

# Names of tensors begin with what they belong to: weights, state of the optimizer.
MODEL = "model."
OPTIMIZER = "optimizer."

_STEP = re.compile(r"^step-(\d{8,})$")
# .tmp: being written or deleted. .old: replaced by a newer save of the same step.
_HIDDEN = re.compile(r"^\.step-(\d{8,})\.(tmp|old)$")


class Store:
    """The checkpoints of one run.

    Args:
        root: their directory; created by the first save.
        keep: how many of the newest are kept, at least 1.
    """

    def __init__(self, root: Path, keep: int = 3) -> None:
        require(keep >= 1, "checkpoint.keep", keep, expected="a number of at least 1")
        self.root = Path(root)
        self.keep = keep

    def steps(self) -> tuple[int, ...]:
        """Saved steps, oldest first; none of them needs to be intact."""
        return tuple(sorted(self._folders()))

    def folder(self, step: int) -> Path:
        """The directory of a saved step.

        Raises:
            CheckpointError: no such step; lists those that there are.
        """
        found = self._folders()
        if step not in found:
            there = ", ".join(map(str, sorted(found))) or "none"
            raise CheckpointError(f"{self.root}: no checkpoint of step {step}; there are: {there}")
        return found[step]

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
        temporary, final = self._hidden(step, "tmp"), self._final(step)
        failures: list[ShoalError] = []
        needed = 0
        prepared = False

        # A rank that fails still meets the others at the barriers, or they would hang there.
        with contextlib.ExitStack() as held:
            with self._noting(failures, step):
                plain = _plain_meta(meta, step)
                chosen = as_pieces(pieces)
                needed = payload_bytes(chosen) + len(json.dumps(plain))
                if rank == 0:
                    self.root.mkdir(parents=True, exist_ok=True)
                    held.enter_context(self._lock())
                    self._clean()
                    temporary.mkdir()
                    prepared = True
            wait()
            inode = 0
            if not failures:
                with self._noting(failures, step, needed):
                    inode = self._write(step, temporary, rank, chosen, needed)
            wait()
            if rank == 0:
                if not failures:
                    with self._noting(failures, step, needed):
                        self._commit(step, temporary, world, plain)
                        self._retain(step)
                if failures and prepared:
                    # What cannot be removed now is removed by the next save.
                    shutil.rmtree(temporary, ignore_errors=True)
            wait()
        if failures:
            raise failures[0]
        if rank and not (final.is_dir() and final.stat().st_ino == inode):
            raise CheckpointError(
                f"{final}: not saved, because another rank failed; its own error says why"
            )

    def open(
        self, step: int, *, expect_model: Mapping[str, Any] | None = None, verify: bool = True
    ) -> Saved:
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
        saved = Saved(self.folder(step), advise=lambda: self._advice(step))
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
    ) -> Saved | None:
        """The newest checkpoint, every byte verified; None if nothing was saved yet.

        Args:
            on_corrupt: told about each damaged checkpoint that is passed over for an older
                one. Without it a damaged newest checkpoint is an error.
            expect_model: the configuration that ``meta["model"]`` must equal.

        Raises:
            CorruptError: the newest is damaged; the message offers the newest intact one.
                With ``on_corrupt``: all are damaged.
            CheckpointError: it is of another model.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self.open(step, expect_model=expect_model)
            except CorruptError as cause:
                if on_corrupt is None or step == steps[0]:
                    raise
                on_corrupt(cause)
        return None

    def _final(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def _hidden(self, step: int, suffix: str) -> Path:
        return self.root / f".step-{step:08d}.{suffix}"

    def _folders(self) -> dict[int, Path]:
        """Step -> directory. A replaced one counts while its successor is not in place."""
        found: dict[int, Path] = {}
        if not self.root.is_dir():
            return found
        for path in self.root.iterdir():
            final, hidden = _STEP.match(path.name), _HIDDEN.match(path.name)
            if final:
                found[int(final.group(1))] = path
            elif hidden and hidden.group(2) == "old":
                found.setdefault(int(hidden.group(1)), path)
        return found

    def _advice(self, step: int) -> str:
        for older in reversed([one for one in self.steps() if one < step]):
            try:
                Saved(self.folder(older)).verify()
            except CheckpointError:
                continue  # damaged as well: it is not offered
            return f"step {older} in {self.root} is intact; resume from it"
        return "no earlier step is intact; restore the file from a copy"

    def _clean(self) -> None:
        """Remove what interrupted saves left behind, and put back what they had set aside."""
        for path in list(self.root.iterdir()):
            hidden = _HIDDEN.match(path.name)
            if hidden is None:
                continue
            final = self._final(int(hidden.group(1)))
            if hidden.group(2) == "old" and not final.exists():
                os.rename(path, final)
            else:
                shutil.rmtree(path)

    def _write(
        self,
        step: int,
        temporary: Path,
        rank: int,
        pieces: Mapping[str, Chosen],
        needed: int,
    ) -> int:
        if not temporary.is_dir():
            raise CheckpointError(
                f"{temporary}: not prepared, because rank 0 failed or the ranks do not share "
                "this directory; its own error says why"
            )
        free = shutil.disk_usage(self.root).free
        if needed > free:
            raise self._full(step, needed, free)
        written = write_pieces(temporary, rank, pieces)
        write_atomic(temporary / f"rank-{rank:05d}.json", written.model_dump_json())
        return temporary.stat().st_ino

    def _commit(self, step: int, temporary: Path, world: int, meta: dict[str, Any]) -> None:
        ranks: list[RankIndex] = []
        for rank in range(world):
            path = temporary / f"rank-{rank:05d}.json"
            if not path.exists():
                raise CheckpointError(
                    f"{self._final(step)}: not saved, because rank {rank} wrote nothing; "
                    "its own error says why"
                )
            ranks.append(parse(RankIndex, json.loads(path.read_bytes()), where=str(path)))
            path.unlink()
        index = merge(step, meta, ranks)
        write_atomic(temporary / INDEX_NAME, index.encode())
        fsync_dir(temporary)
        final, aside = self._final(step), self._hidden(step, "old")
        if final.exists():
            os.rename(final, aside)
        os.rename(temporary, final)
        fsync_dir(self.root)
        if aside.exists():
            shutil.rmtree(aside)

    def _retain(self, newest: int) -> None:
        """Delete what is beyond ``keep``, after the new one was read back from the disk."""
        others = [step for step in self.steps() if step != newest]
        victims = others[: max(0, len(others) + 1 - self.keep)]
        if not victims:
            return
        drop_from_cache(self._final(newest))
        self.open(newest)
        for step in victims:
            # Renamed first, so that an interruption leaves no half of a checkpoint in sight.
            dying = self._hidden(step, "tmp")
            os.rename(self._final(step), dying)
            shutil.rmtree(dying)

    def _full(self, step: int, needed: int, free: int) -> CheckpointError:
        kept = ", ".join(map(str, self.steps())) or "none yet"
        return CheckpointError(
            f"{self.root}: disk full while saving step {step}: {needed} bytes are needed and "
            f"{free} are free; free some space or choose another place; "
            f"checkpoints saved before stay valid: {kept}"
        )

    @contextlib.contextmanager
    def _noting(self, failures: list[ShoalError], step: int, needed: int = 0) -> Iterator[None]:
        """Turn what the file system says into the house's words, and keep it for later."""
        try:
            yield
        except (OSError, ShoalError) as cause:
            refusal = cause if isinstance(cause, OSError) else cause.__cause__
            failure: ShoalError
            if isinstance(refusal, OSError) and refusal.errno in (errno.ENOSPC, errno.EDQUOT):
                failure = self._full(step, needed, shutil.disk_usage(self.root).free)
            elif isinstance(cause, OSError):
                failure = CheckpointError(
                    f"{cause.filename or self._final(step)}: step {step} cannot be saved "
                    f"({cause.strerror or cause}); choose another place or correct its permissions"
                )
            else:
                failures.append(cause)
                return
            failure.__cause__ = cause
            failures.append(failure)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep other processes from saving here; the system lets go when this one dies."""
        fd = os.open(self.root, os.O_RDONLY)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as cause:
                raise CheckpointError(
                    f"{self.root}: another process is saving here; give each run its own directory"
                ) from cause
            except OSError as cause:
                # Some network file systems have no locks; saving there works unguarded.
                if cause.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
            yield
        finally:
            os.close(fd)


def _plain_meta(meta: Mapping[str, Any], step: int) -> dict[str, Any]:
    try:
        plain = json.loads(json.dumps({**meta, "step": step}, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as cause:
        raise CheckpointError(
            f"meta of step {step}: not plain data ({cause}); give text, finite numbers, lists "
            "and mappings"
        ) from cause
    return dict(plain)
