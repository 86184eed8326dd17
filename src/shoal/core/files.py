"""Files that are either whole or absent.

Everything is written beside its destination under a temporary name, flushed to
the disk and renamed, so that an interruption leaves the old file or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import yaml

from shoal.core.errors import ConfigError, ShoalError


def shoal_home() -> Path:
    """The directory of caches, machines and the score: ``$SHOAL_HOME`` or the XDG data home."""
    home = os.environ.get("SHOAL_HOME")
    if home:
        return expanded(home)
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return expanded(base) / "shoal"


def expanded(path: str | Path) -> Path:
    """A path that a user gave, with ``~`` written out.

    Raises:
        ConfigError: there is no such home, or no file system can have such a path.
    """
    text = str(path)
    if "\0" in text or any(len(part.encode()) > 255 for part in text.split("/")):
        raise ConfigError(f"{text[:80]!r}: longer than a name or a path can be; give another")
    try:
        return Path(path).expanduser()
    except RuntimeError as cause:
        raise ConfigError(f"{text}: unknown home directory; write the path in full") from cause


def fsync_dir(path: Path) -> None:
    """Make renames inside ``path`` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(
    path: Path,
    waiting: Callable[[], None],
    *,
    error: type[ShoalError] = ShoalError,
    limit_s: float = 6 * 3600.0,
) -> Iterator[None]:
    """Hold the lock of a file while the block runs; one process at a time does.

    The lock belongs to the open file: it ends with the process, however that ends. A process that
    blocks while it holds the lock is waited for no longer than the limit.

    Args:
        path: the file; it is made, with its directory, and stays.
        waiting: called now and then while another process holds the lock.
        error: class of what is raised.
        limit_s: most s to wait.

    Raises:
        ShoalError: of class ``error``, when the file cannot be written, or another process holds
            the lock for longer than the limit.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    except OSError as cause:
        raise error(
            f"{path.parent}: cannot be written ({cause.strerror}); set SHOAL_HOME to a directory "
            "that can"
        ) from cause
    with file:
        end = time.monotonic() + limit_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise error(
                        f"{path}: another process has held this lock for {limit_s:g} s; end it "
                        "(fuser names it)"
                    ) from None
                waiting()
                time.sleep(0.1)
        yield


@contextlib.contextmanager
def open_atomic(path: Path, *, error: type[ShoalError] = ShoalError) -> Iterator[IO[bytes]]:
    """A file to write to that becomes ``path`` when the block ends well, and is gone otherwise.

    A new file has the mode that the umask allows; one that is replaced keeps its own.

    Raises:
        ShoalError: of class ``error``, when the file system refuses (disk full,
            no permission); the destination is untouched then.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(path)
        # Not mkstemp: it makes files for their owner only, and the umask cannot be read
        # without changing it for all threads.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(fd, "wb") as file:
            if path.is_file():
                os.fchmod(fd, path.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(fd)
        # Who waits for this file may move its directory as soon as the file is there.
        directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.replace(temporary, path)
            temporary = None
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as cause:
        raise error(
            f"{path}: cannot be written ({cause.strerror or cause}); "
            "free some space or choose another place"
        ) from cause
    finally:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)


def write_atomic(path: Path, data: bytes | str, *, error: type[ShoalError] = ShoalError) -> None:
    """Write ``data`` to ``path`` so that no reader ever sees a part of it.

    Raises:
        ShoalError: of class ``error``, as :func:`open_atomic` does.
    """
    with open_atomic(path, error=error) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def reserve(path: Path, nbytes: int = 1 << 16) -> None:
    """Take room on the disk for :func:`use_reserved`; where there is none, none is taken."""
    with contextlib.suppress(OSError), path.open("wb") as file:
        file.write(b" " * nbytes)


def use_reserved(spare: Path, path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` though the disk may be full, into room that was reserved.

    What does not fit is cut off, and the rest of the room is spaces. Without a reserved file it is
    written as any other, if the disk has room.

    Args:
        spare: file of :func:`reserve` on the same file system; it becomes ``path``.
        path: where a reader looks.
        data: text.
    """
    with contextlib.suppress(OSError):
        if not spare.exists():
            reserve(spare, len(data))
        with spare.open("r+b") as file:
            room = os.fstat(file.fileno()).st_size
            file.write(data[:room].ljust(room))
            file.flush()
            os.fsync(file.fileno())
        os.replace(spare, path)


@contextlib.contextmanager
def write_dir_atomic(path: Path, *, error: type[ShoalError] = ShoalError) -> Iterator[Path]:
    """Fill a directory beside ``path`` and rename it to ``path`` when the block ends well.

    It has the mode that the umask allows.

    Raises:
        ShoalError: of class ``error``, when ``path`` exists or the file system
            refuses; nothing of the new directory is left then.
    """
    if path.exists():
        raise error(f"{path}: exists already; choose another name or remove it first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = _beside(path)
        temporary.mkdir()
    except OSError as cause:
        raise error(f"{path}: cannot be created ({cause.strerror or cause})") from cause
    try:
        yield temporary
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as handle:
                    os.fsync(handle.fileno())
        fsync_dir(temporary)
        os.rename(temporary, path)
        fsync_dir(path.parent)
    except OSError as cause:
        raise error(
            f"{path}: cannot be written ({cause.strerror or cause}); "
            "free some space or choose another place"
        ) from cause
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _beside(path: Path) -> Path:
    """A hidden name in the same directory that cannot be guessed."""
    if not path.name:  # "", "." and "/"
        raise IsADirectoryError(errno.EISDIR, "a directory, not a file's name")
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}")


def to_json(value: Any) -> str:
    """Plain values as indented JSON."""
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def write_json(path: Path, value: Any, *, error: type[ShoalError] = ShoalError) -> None:
    """Write ``value`` as indented JSON, atomically."""
    write_atomic(path, to_json(value), error=error)


# libyaml reads ten times as fast; a plan with the probes of its machine is 50 kB.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]
    """Safe YAML in which ``3e-4`` is a number and a repeated key is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int, float, bool)):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key!r} stands twice", key_node.start_mark
                    )
                seen.add(key)
        return dict(super().construct_mapping(node, deep=deep))


# YAML 1.1 wants a dot in a float; people write 3e-4.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML text; ``where`` names it in errors.

    Raises:
        ConfigError: the text is not YAML; the message has the line and column.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.YAMLError as cause:
        mark = getattr(cause, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(cause, "problem", None) or "not YAML"
        raise ConfigError(f"{where}{place}: {problem}") from cause


def read_yaml(path: Path) -> Any:
    """Read one YAML document.

    Raises:
        ConfigError: the file is missing, unreadable, too large or not YAML.
    """
    try:
        if path.stat().st_size > 16 * 2**20:
            raise ConfigError(f"{path}: larger than 16 MiB, too large for a configuration")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as cause:
        raise ConfigError(f"{path}: not text in UTF-8; give a YAML file") from cause
    except OSError as cause:
        raise ConfigError(f"{path}: cannot be read ({cause.strerror})") from cause
    return parse_yaml(text, str(path))


def to_yaml(value: Any, *, header: str = "") -> str:
    """Plain values as YAML in their given order, below comments."""
    lead = "".join(f"# {line}\n" for line in header.splitlines())
    return lead + str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100))


def write_yaml(path: Path, value: Any, *, header: str = "") -> None:
    """Write plain values as YAML in their given order, atomically."""
    write_atomic(path, to_yaml(value, header=header), error=ConfigError)
