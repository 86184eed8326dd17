"""Where checkpoints lie: a directory of this host's file system.

The protocols say what a store needs of a place; :mod:`shoal.checkpoint.remote` is the other one.
Nothing that is being written can be taken for a checkpoint: here it lies in a hidden directory
until one rename.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shoal.checkpoint.disk import DiskSink
from shoal.checkpoint.index import INDEX_NAME
from shoal.core.errors import CheckpointError
from shoal.core.files import fsync_dir, write_atomic

if TYPE_CHECKING:
    import numpy as np

_STEP = re.compile(r"^step-(\d{8,})$")
# .tmp: being written or deleted. .old: replaced by a newer save of the same step.
_HIDDEN = re.compile(r"^\.step-(\d{8,})(?:\.[0-9a-z-]+)?\.(tmp|old)$")


class Folder(Protocol):
    """The files of one checkpoint, for reading."""

    def where(self, name: str = "") -> str:
        """What errors call the folder or a file in it."""

    def exists(self) -> bool:
        """Whether it is there at all."""

    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be asked.
        """

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Bytes of a file, uint8 of one dimension; writing to them changes no file.

        Raises:
            OSError: it cannot be read.
        """


class FileSink(Protocol):
    """A file being written, from its first byte to its last."""

    def write(self, at: int, data: np.ndarray) -> None:
        """Write bytes at their place; when it returns they may change.

        Raises:
            OSError: the place refuses.
        """

    def finish(self) -> None:
        """Return when the whole file is durable.

        Raises:
            OSError: the place refuses.
        """

    def abandon(self) -> None:
        """Give up; what was written is of no use."""


class Draft(Protocol):
    """A checkpoint being written: every rank adds to it, one makes it a checkpoint."""

    step: int

    def prepare(self) -> None:
        """Make it; another rank may have done so already."""

    def replace(self) -> None:
        """Make room for it, where a checkpoint of the same name would be in its way."""

    def ready(self) -> bool:
        """Whether it was made and not thrown away."""

    def create(self, name: str, size: int) -> FileSink:
        """Start a large file of known size."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, whole or not at all."""

    def get(self, name: str) -> bytes | None:
        """A small file; None if there is none."""

    def names(self) -> set[str]:
        """All files that are whole."""

    def token(self) -> str:
        """What the committed checkpoint is recognised by."""

    def discard(self) -> None:
        """Remove all of it; what cannot be removed is left."""


class Storage(Protocol):
    """A place that holds the checkpoints of one run.

    Attributes:
        reads_back: every byte is read back before an older step is deleted; otherwise only sizes
            are compared, because reading costs as much as writing.
    """

    reads_back: bool

    def where(self) -> str:
        """What errors call it."""

    def steps(self) -> tuple[int, ...]:
        """Committed steps, oldest first."""

    def unfinished(self) -> tuple[int, ...]:
        """Steps that lie here without an index, so that they cannot be loaded."""

    def folder(self, step: int) -> Folder:
        """The files of a step.

        Raises:
            KeyError: there is none.
        """

    def token(self, step: int) -> str | None:
        """What :meth:`Draft.token` said of a committed step; None if there is no such step."""

    def writing(self) -> AbstractContextManager[None]:
        """Keep others from writing here for as long as the context lasts.

        Raises:
            CheckpointError: another run is writing here.
            OSError: the place refuses.
        """

    def clean(self) -> None:
        """Remove what interrupted saves left behind, and put back what they had set aside."""

    def draft(self, step: int, attempt: str = "") -> Draft:
        """The checkpoint that all ranks write together.

        Args:
            step: which step.
            attempt: distinguishes this save from others of the same step; equal on all ranks.
        """

    def commit(self, draft: Draft, index: bytes) -> None:
        """Make a checkpoint of what was written; a step that was there before is replaced."""

    def remove(self, step: int) -> None:
        """Delete a step; an interruption leaves no half of it in sight."""

    def forget(self, step: int) -> None:
        """Let the next read of a step ask the disk, not a copy in memory."""

    def free_bytes(self) -> int | None:
        """Bytes that can still be written; None where unknown."""


class LocalFolder:
    """A directory of this host, its files memory-mapped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._maps: dict[str, np.ndarray] = {}

    def where(self, name: str = "") -> str:
        return str(self.path / name) if name else str(self.path)

    def exists(self) -> bool:
        return self.path.is_dir()

    def size(self, name: str) -> int:
        return (self.path / name).stat().st_size

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        import numpy as np

        if start == stop:
            return np.empty(0, dtype=np.uint8)
        if name not in self._maps:
            # Copy-on-write: torch wants writable memory, and the file stays untouched.
            self._maps[name] = np.memmap(self.path / name, dtype=np.uint8, mode="c")
        return np.asarray(self._maps[name][start:stop])


class LocalDraft:
    """A hidden directory beside the checkpoints."""

    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def prepare(self) -> None:
        self.path.mkdir(exist_ok=True)

    def replace(self) -> None:
        """See :class:`Draft`; a rename makes room when the time has come."""

    def ready(self) -> bool:
        return self.path.is_dir()

    def create(self, name: str, size: int) -> FileSink:
        return DiskSink(self.path / name, size)

    def put(self, name: str, data: bytes) -> None:
        write_atomic(self.path / name, data, error=CheckpointError)

    def get(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def names(self) -> set[str]:
        try:
            return {path.name for path in self.path.iterdir()}
        except FileNotFoundError:
            return set()

    def token(self) -> str:
        return str(self.path.stat().st_ino)

    def discard(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


class LocalStorage:
    """A directory of checkpoints: ``root/step-00000100/rank-00000.safetensors ... index.json``.

    Args:
        root: the directory; made when it is first written to.
    """

    reads_back = True

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def where(self) -> str:
        return str(self.root)

    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(s for s, path in self._folders().items() if _indexed(path)))

    def unfinished(self) -> tuple[int, ...]:
        return tuple(sorted(s for s, path in self._folders().items() if not _indexed(path)))

    def folder(self, step: int) -> LocalFolder:
        return LocalFolder(self._folders()[step])

    def token(self, step: int) -> str | None:
        try:
            return str(self._final(step).stat().st_ino)
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        self.root.mkdir(parents=True, exist_ok=True)
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

    def clean(self) -> None:
        for path in list(self.root.iterdir()):
            hidden = _HIDDEN.match(path.name)
            if hidden is None:
                continue
            final = self._final(int(hidden.group(1)))
            if hidden.group(2) == "old" and not final.exists():
                os.rename(path, final)
            else:
                shutil.rmtree(path)

    def draft(self, step: int, attempt: str = "") -> LocalDraft:
        suffix = f"{attempt}.tmp" if attempt else "tmp"
        return LocalDraft(step, self._hidden(step, suffix))

    def commit(self, draft: Draft, index: bytes) -> None:
        assert isinstance(draft, LocalDraft)
        write_atomic(draft.path / INDEX_NAME, index)
        fsync_dir(draft.path)
        final, aside = self._final(draft.step), self._hidden(draft.step, "old")
        if final.exists():
            os.rename(final, aside)
        os.rename(draft.path, final)
        fsync_dir(self.root)
        if aside.exists():
            shutil.rmtree(aside)

    def remove(self, step: int) -> None:
        dying = self._hidden(step, "tmp")
        os.rename(self._final(step), dying)
        shutil.rmtree(dying)

    def forget(self, step: int) -> None:
        for file in self._final(step).iterdir():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.root).free

    def _final(self, step: int) -> Path:
        return self.root / f"step-{step:08d}"

    def _hidden(self, step: int, suffix: str) -> Path:
        return self.root / f".step-{step:08d}.{suffix}"

    def _folders(self) -> dict[int, Path]:
        """Step -> directory. A replaced one counts while its successor is not in place."""
        folders: dict[int, Path] = {}
        if not self.root.is_dir():
            return folders
        for path in self.root.iterdir():
            final, hidden = _STEP.match(path.name), _HIDDEN.match(path.name)
            if final:
                folders[int(final.group(1))] = path
            elif hidden and hidden.group(2) == "old":
                folders.setdefault(int(hidden.group(1)), path)
        return folders


def _indexed(path: Path) -> bool:
    return (path / INDEX_NAME).is_file()
