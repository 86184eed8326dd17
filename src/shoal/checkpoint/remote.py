"""Checkpoints in an object store, or in whatever else fsspec reaches.

Layout::

    ADDRESS/step-00000100.ATTEMPT/rank-00000.safetensors ... index.json

Objects cannot be renamed together, so the index is the commit: it is written last, and a folder
without one is no checkpoint. Files go up in parts while they are made. A small object says who is
writing, and is renewed as long as he lives.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.index import INDEX_NAME
from shoal.core.errors import CheckpointError, ConfigError, MissingExtraError
from shoal.core.extras import import_extra

if TYPE_CHECKING:
    import numpy as np

    from shoal.checkpoint.storage import Draft

_FOLDER = re.compile(r"^step-(\d{8,})\.([0-9a-z-]+)$")
_WRITER = ".writer.json"
# S3 takes parts of at least 5 MiB, and 10,000 of them: files of up to 320 GB.
_PART_BYTES = 2**25
# A save that fails is reported soon, and the next one tries again: two clients on top of each other
# would otherwise try for minutes.
_TRIES = 2
# A server that has said nothing for so long has stopped.
_SILENCE_S = 20.0
# A writer on another host that has not said anything for so long is gone.
_LEASE_S = 60.0


def is_address(place: object) -> bool:
    """Whether this names a place that fsspec reaches, such as ``s3://bucket/run``."""
    return "://" in str(place)


def path_or_address(words: str) -> Path | str:
    """An address as it is, anything else as a path."""
    return words if is_address(words) else Path(words)


@contextlib.contextmanager
def _asking(what: str) -> Iterator[None]:
    """Clients raise what they like; here it is an error of a file system."""
    try:
        yield
    except (OSError, CheckpointError, MissingExtraError):
        raise
    except Exception as cause:
        raise OSError(errno.EIO, f"{type(cause).__name__}: {cause}", what) from cause


class RemoteFolder:
    """See :class:`~shoal.checkpoint.storage.Folder`."""

    def __init__(self, fs: Any, path: str, where: str) -> None:
        self._fs, self._path, self._where = fs, path, where

    def where(self, name: str = "") -> str:
        return f"{self._where}/{name}" if name else self._where

    def exists(self) -> bool:
        with _asking(self._where):
            return bool(self._fs.exists(f"{self._path}/{INDEX_NAME}"))

    def size(self, name: str) -> int:
        with _asking(self.where(name)):
            return int(self._fs.info(f"{self._path}/{name}")["size"])

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        import numpy as np

        if start == stop:
            return np.empty(0, dtype=np.uint8)
        with _asking(self.where(name)):
            data = self._fs.cat_file(f"{self._path}/{name}", start=start, end=stop)
        return np.frombuffer(bytearray(data), dtype=np.uint8)


class RemoteSink:
    """See :class:`~shoal.checkpoint.storage.FileSink`; parts go up as they are full."""

    def __init__(self, fs: Any, path: str, size: int) -> None:
        self._fs, self._path, self._size = fs, path, size
        with _asking(path):
            self._file = fs.open(path, "wb", block_size=_PART_BYTES)

    def write(self, at: int, data: np.ndarray) -> None:
        with _asking(self._path):
            self._file.write(data.data)

    def finish(self) -> None:
        with _asking(self._path):
            self._file.close()
            self._fs.invalidate_cache()
            arrived = int(self._fs.info(self._path)["size"])
        if arrived != self._size:
            raise OSError(
                errno.EIO,
                f"of {self._size} bytes {arrived} arrived; the upload stopped",
                self._path,
            )

    def abandon(self) -> None:
        with contextlib.suppress(Exception):  # it failed already, and that is reported
            self._file.discard()
        # Closing would finish the upload of what there is.
        with contextlib.suppress(AttributeError):
            self._file.closed = True


class RemoteDraft:
    """See :class:`~shoal.checkpoint.storage.Draft`.

    Args:
        attempt: distinguishes it from other saves of the same step.
    """

    def __init__(self, fs: Any, root: str, step: int, attempt: str) -> None:
        self.step = step
        self.name = f"step-{step:08d}.{attempt}"
        self.path = f"{root}/{self.name}"
        self._fs = fs

    def prepare(self) -> None:
        """See :class:`~shoal.checkpoint.storage.Draft`; folders are not made but written into."""

    def replace(self) -> None:
        """Make room where a checkpoint of the same name lies: it ceases to be one."""
        with _asking(self.path):
            if self._fs.exists(f"{self.path}/{INDEX_NAME}"):
                self._fs.rm_file(f"{self.path}/{INDEX_NAME}")

    def ready(self) -> bool:
        return True

    def create(self, name: str, size: int) -> RemoteSink:
        return RemoteSink(self._fs, f"{self.path}/{name}", size)

    def put(self, name: str, data: bytes) -> None:
        with _asking(f"{self.path}/{name}"):
            self._fs.pipe_file(f"{self.path}/{name}", data)

    def get(self, name: str) -> bytes | None:
        try:
            with _asking(f"{self.path}/{name}"):
                self._fs.invalidate_cache()
                return bytes(self._fs.cat_file(f"{self.path}/{name}"))
        except FileNotFoundError:
            return None

    def names(self) -> set[str]:
        try:
            with _asking(self.path):
                self._fs.invalidate_cache()
                return {str(path).rpartition("/")[2] for path in self._fs.find(self.path)}
        except FileNotFoundError:
            return set()

    def token(self) -> str:
        return self.name

    def discard(self) -> None:
        with contextlib.suppress(Exception):  # what is left is removed by the next run
            self._fs.rm(self.path, recursive=True)


class RemoteStorage:
    """See :class:`~shoal.checkpoint.storage.Storage`.

    Args:
        address: such as ``s3://bucket/run``; credentials and endpoint are the client's own
            settings (for S3 ``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID`` and so on).

    Raises:
        ConfigError: no part can reach it.
        MissingExtraError: the package that does is not installed.
    """

    reads_back = False

    def __init__(self, address: str) -> None:
        fsspec = import_extra("fsspec", extra="run", purpose="checkpoints elsewhere")
        self._address = address.rstrip("/")
        try:
            scheme = self._address.partition("://")[0]
            options: dict[str, Any] = {}
            if scheme == "s3":
                options["use_listings_cache"] = False
                options["config_kwargs"] = {
                    "retries": {"max_attempts": _TRIES, "mode": "standard"},
                    "connect_timeout": _SILENCE_S,
                    "read_timeout": _SILENCE_S,
                }
            self._fs, root = fsspec.core.url_to_fs(self._address, **options)
            if options:
                self._fs.retries = _TRIES
        except ImportError as cause:
            raise MissingExtraError(
                f"the client for {scheme}://", "s3", "checkpoints there"
            ) from cause
        except ValueError as cause:
            raise ConfigError(
                f"checkpoint.path = {address!r}: {cause}; give a directory or an address such as "
                "s3://bucket/run"
            ) from cause
        self._root = str(root).rstrip("/")

    def where(self) -> str:
        return self._address

    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(self._committed()))

    def unfinished(self) -> tuple[int, ...]:
        return ()

    def folder(self, step: int) -> RemoteFolder:
        name = self._committed()[step]
        return RemoteFolder(self._fs, f"{self._root}/{name}", f"{self._address}/{name}")

    def token(self, step: int) -> str | None:
        return self._committed().get(step)

    def draft(self, step: int, attempt: str = "") -> RemoteDraft:
        return RemoteDraft(self._fs, self._root, step, attempt or "0")

    def commit(self, draft: Draft, index: bytes) -> None:
        assert isinstance(draft, RemoteDraft)
        draft.put(INDEX_NAME, index)
        for name, committed in self._names().items():
            match = _FOLDER.match(name)
            if match and int(match.group(1)) == draft.step and name != draft.name and committed:
                self._remove(name)

    def remove(self, step: int) -> None:
        self._remove(self._committed()[step])

    def clean(self) -> None:
        for name, committed in self._names().items():
            if not committed:
                self._remove(name)

    def forget(self, step: int) -> None:
        """See :class:`~shoal.checkpoint.storage.Storage`; nothing is kept here."""

    def free_bytes(self) -> None:
        """See :class:`~shoal.checkpoint.storage.Storage`."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        me = {"id": secrets.token_hex(8), "host": socket.gethostname(), "pid": os.getpid()}
        path = f"{self._root}/{_WRITER}"

        def say() -> None:
            with _asking(f"{self._address}/{_WRITER}"):
                self._fs.pipe_file(path, json.dumps({**me, "at": time.time()}).encode())

        other = self._writer(path)
        if other is not None and self._alive(path, other):
            raise CheckpointError(
                f"{self._address}: another process is saving here (pid {other.get('pid')} on "
                f"{other.get('host')}); give each run its own address"
            )
        say()
        # Of two that began together, the one that wrote last has it.
        if (self._writer(path) or me)["id"] != me["id"]:
            raise CheckpointError(
                f"{self._address}: another process began to save here at the same moment; give "
                "each run its own address"
            )
        over = threading.Event()

        def renew() -> None:
            while not over.wait(_LEASE_S / 4):
                with contextlib.suppress(OSError):  # the next save reports what is wrong
                    say()

        renewer = threading.Thread(target=renew, name="checkpoint-lease", daemon=True)
        renewer.start()
        try:
            yield
        finally:
            over.set()
            renewer.join()
            with contextlib.suppress(OSError), _asking(path):
                self._fs.rm_file(path)

    def _writer(self, path: str) -> dict[str, Any] | None:
        try:
            with _asking(f"{self._address}/{_WRITER}"):
                data = json.loads(self._fs.cat_file(path))
        except FileNotFoundError:
            return None
        return data if isinstance(data, dict) else None

    def _alive(self, path: str, writer: dict[str, Any]) -> bool:
        """Whether the holder of a lease still runs."""
        if writer.get("host") == socket.gethostname():
            try:
                os.kill(int(writer["pid"]), 0)
            except ProcessLookupError:
                return False
            except PermissionError:
                return True
            return True
        # Clocks of two hosts may differ, and be set: only a renewal shows that it runs.
        begin = time.monotonic()
        while time.monotonic() - begin < _LEASE_S:
            time.sleep(_LEASE_S / 60)
            now = self._writer(path)
            if now != writer:
                return now is not None
        return False

    def _names(self) -> dict[str, bool]:
        """Name of each folder of a step -> whether it is a checkpoint."""
        with _asking(self._address):
            self._fs.invalidate_cache()
            try:
                files = self._fs.find(self._root)
            except FileNotFoundError:
                return {}
        names: dict[str, bool] = {}
        for path in files:
            *_, name, file = str(path).split("/")
            if _FOLDER.match(name):
                names[name] = names.get(name, False) or file == INDEX_NAME
        return names

    def _committed(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for name, committed in sorted(self._names().items()):
            matched = _FOLDER.match(name)
            if matched and committed:
                names[int(matched.group(1))] = name
        return names

    def _remove(self, name: str) -> None:
        with _asking(f"{self._address}/{name}"):
            path = f"{self._root}/{name}"
            # Without its index it is no checkpoint, however far the rest of this comes.
            if self._fs.exists(f"{path}/{INDEX_NAME}"):
                self._fs.rm_file(f"{path}/{INDEX_NAME}")
            self._fs.rm(path, recursive=True)
