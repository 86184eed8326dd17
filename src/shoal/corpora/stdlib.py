"""The source of the Python standard library: real text that is on every machine."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from shoal.core.errors import DataError
from shoal.core.parts import part
from shoal.corpora.protocols import Document, Split, data_time, split_of
from shoal.ir.estimate import Estimate
from shoal.ir.machine import Machine
from shoal.ir.plan import Work

# Third-party packages live inside the standard library's directory.
_FOREIGN = frozenset({"site-packages", "dist-packages"})


@part
class Stdlib:
    """Every ``*.py`` of the running interpreter's standard library, one document per file.

    Held out: ``sha256(relative path) % 20 == 0``, with ``/`` between directories. The few files
    with invalid encodings, which are tests of Python itself, are decoded with replacement
    characters.
    """

    def documents(self, split: Split | None = None) -> Iterator[Document]:
        """The documents of one split, or of both, by relative path.

        Raises:
            DataError: the interpreter has no readable source.
        """
        for name, path in self.files():
            place = split_of(name)
            if split in (None, place):
                yield Document(name, _read(path).decode("utf-8", "replace"), place)

    def fingerprint(self) -> str:
        """Digest of all paths and contents.

        Raises:
            DataError: the interpreter has no readable source.
        """
        digest = hashlib.sha256()
        for name, path in self.files():
            data = _read(path)
            digest.update(f"{name}\0{len(data)}\0".encode())
            digest.update(data)
        return digest.hexdigest()

    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for _, path in self.files())

    def estimate(self, work: Work, machine: Machine) -> Estimate:
        """Tokens come from memory-mapped shards, 2 bytes each once they are cached."""
        return data_time(work, machine, bytes_per_token=2)

    def files(self) -> list[tuple[str, Path]]:
        """(relative path, file) of each, by relative path.

        Raises:
            DataError: the interpreter has no readable source.
        """
        root = Path(sysconfig.get_path("stdlib"))
        results = [(path.relative_to(root), path) for path in root.rglob("*.py")]
        files = sorted(
            (name.as_posix(), path)
            for name, path in results
            if not _FOREIGN.intersection(name.parts) and path.is_file()
        )
        if not files:
            raise DataError(
                f"data = stdlib: no *.py file below {root}; this Python has no source, "
                "so give your own text with data: {name: text, path: ...}"
            )
        return files


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as cause:
        raise DataError(f"{path}: cannot be read ({cause.strerror})") from cause
