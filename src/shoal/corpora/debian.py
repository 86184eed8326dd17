"""The package index of this machine: what Debian and its relatives know of each package.

Read from the lists that ``apt-get update`` has fetched; without them from the status of the
packages that are installed. Nothing is fetched.
"""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import io
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from shoal.core.errors import DataError
from shoal.core.extras import import_extra

_LISTS, _STATUS = Path("/var/lib/apt/lists"), Path("/var/lib/dpkg/status")
_LISTED = ("Depends", "Pre-Depends")
_RELATED = (*_LISTED, "Recommends", "Suggests")
# Fields of which more than the first line is read.
_LONG = (*_RELATED, "Tag")
# Fewer are said to be few.
_MANY = 10_000


class DebianPackage(NamedTuple):
    """One package.

    Args:
        name: of the package.
        section: such as ``python`` or ``libs``.
        maintainer: name and address.
        size_bytes: to download; 0 where the index does not say.
        installed_bytes: on the disk.
        description: its first line.
        depends: names that it depends on, ascending; of alternatives the first.
        related: names that it depends on, recommends or suggests, all alternatives, ascending.
        tags: of debtags, such as ``role::program``, ascending; none where the index has none.
    """

    name: str
    section: str
    maintainer: str
    size_bytes: int
    installed_bytes: int
    description: str
    depends: tuple[str, ...]
    related: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class PackageIndex:
    """Packages and where they come from.

    Args:
        rows: a package each, by name; of several versions the first.
        sources: files that were read.
        note: what a reader should know, such as that there are few; empty if nothing.
    """

    rows: tuple[DebianPackage, ...]
    sources: tuple[str, ...]
    note: str


def debian_packages(root: Path = Path("/")) -> PackageIndex:
    """The packages that this machine's index names.

    Args:
        root: of the system.

    Raises:
        DataError: there is no index, or it cannot be read.
    """
    return _read(root)


@functools.lru_cache(maxsize=2)
def _read(root: Path) -> PackageIndex:
    lists = root / _LISTS.relative_to("/")
    files = sorted(path for path in lists.glob("*_Packages*") if path.is_file())
    note = ""
    if not files:
        files = [path for path in (root / _STATUS.relative_to("/"),) if path.is_file()]
        note = "only installed packages: there are no lists of apt-get update; "
    if not files:
        raise DataError(
            f"{root}: no index of packages (var/lib/apt/lists, var/lib/dpkg/status); it is "
            "there on Debian and Ubuntu"
        )
    packages: dict[str, DebianPackage] = {}
    for path in files:
        for fields in _stanzas(path):
            if "Package" in fields:
                packages.setdefault(fields["Package"], _package(fields))
    if len(packages) < _MANY:
        note += f"{len(packages):,} packages are few; apt-get update fetches the others"
    rows = tuple(packages[name] for name in sorted(packages))
    return PackageIndex(rows, tuple(map(str, files)), note.removesuffix("; "))


def _package(fields: dict[str, str]) -> DebianPackage:
    depends, related = set(), set()
    for field in _RELATED:
        for one in fields.get(field, "").split(","):
            names = [_name(choice) for choice in one.split("|")]
            depends.update(names[: field in _LISTED])
            related.update(names)
    return DebianPackage(
        name=fields["Package"],
        section=fields.get("Section", ""),
        maintainer=fields.get("Maintainer", ""),
        size_bytes=_number(fields.get("Size", "0")),
        installed_bytes=1024 * _number(fields.get("Installed-Size", "0")),
        description=fields.get("Description", ""),
        depends=tuple(sorted(depends - {""})),
        related=tuple(sorted(related - {""})),
        tags=tuple(
            sorted({tag for one in fields.get("Tag", "").split(",") if (tag := one.strip())})
        ),
    )


def _name(choice: str) -> str:
    """A package of a dependency, without its version and architecture."""
    return choice.partition("(")[0].strip().partition(":")[0]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _stanzas(path: Path) -> Iterator[dict[str, str]]:
    """Fields of each paragraph; of all but lists of packages and of tags the first line."""
    fields: dict[str, str] = {}
    name = ""
    try:
        with _opened(path) as stream, io.TextIOWrapper(stream, "utf-8", "replace") as text:
            for line in text:
                if line.startswith((" ", "\t")):
                    if name in _LONG:
                        fields[name] += line.strip()
                    continue  # more of a description
                name, separator, value = line.partition(":")
                if separator:
                    fields[name] = value.strip()
                elif fields:
                    yield fields
                    fields = {}
        if fields:
            yield fields
    except (OSError, EOFError, lzma.LZMAError, ValueError) as cause:
        raise DataError(
            f"{path}: cannot be read ({cause}); apt-get update writes it again"
        ) from cause


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    if path.suffix == ".lz4":
        arrow: Any = import_extra("pyarrow", extra="fields", purpose="reading lists of packages")
        with arrow.CompressedInputStream(str(path), "lz4") as stream:
            yield io.BufferedReader(stream, 1 << 20)
        return
    with openers.get(path.suffix, open)(path, "rb") as stream:
        yield stream
