"""Cache of expensive results of a claim for its next run; never a time.

An outcome that is the same each time is known by a digest of all that it depends on: what was
given, the sources of the code and the versions of libraries. Where one differs, it is made again.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from shoal.core.errors import StoreError, require
from shoal.core.files import write_json
from shoal.core.version import PACKAGE
from shoal.machine.fingerprint import versions


class CachedResult(NamedTuple):
    """A result that is computed once.

    Args:
        value: as JSON has it.
        at: when it was begun.
        seconds: it took.
        of: digest of what it depends on.
    """

    value: Any
    at: str
    seconds: float
    of: str

    def details(self) -> dict[str, JsonValue]:
        """When and how long, for a record's details."""
        return {"at": self.at, "seconds": self.seconds}


def cached(
    path: Path | None,
    key: str,
    make: Callable[[], JsonValue],
    given: JsonValue,
    code: Sequence[str],
) -> CachedResult:
    """What the file has under ``key``, if it depends on the same; else ``make()``, and it is kept.

    Args:
        path: the file; None, if nothing is to be kept.
        key: what it is.
        make: makes it.
        given: all that the outcome depends on beside code and libraries.
        code: files and directories of the package that it depends on.

    Raises:
        StoreError: the file is damaged.
        ConfigError: there is no such code.
    """
    text = json.dumps([given, _digest_of(code), versions()], sort_keys=True)
    of = hashlib.sha256(text.encode()).hexdigest()
    result = {} if path is None or not path.exists() else _read(path)
    if key in result and result[key]["of"] == of:
        return CachedResult(**result[key])
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    begin = time.monotonic()
    value = json.loads(json.dumps(make()))
    made = CachedResult(value, at, round(time.monotonic() - begin, 3), of)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result | {key: made._asdict()})
    return made


def _digest_of(code: Sequence[str]) -> str:
    """Sixteen digits that change with the sources of these files and directories of the package."""
    root, digest = PACKAGE, hashlib.sha256()
    for part in code:
        place = root / part
        require(place.exists(), "code", part, expected="a file or directory in the package")
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(f"{path.relative_to(root)} {path.stat().st_size} ".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _read(path: Path) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(path.read_text())
        return data
    except ValueError as error:
        raise StoreError(f"{path}: {error}; delete it to create it again") from None


@contextlib.contextmanager
def own_home(folder: Path) -> Iterator[None]:
    """Caches and scores of these runs are not the user's."""
    before = os.environ.get("SHOAL_HOME")
    os.environ["SHOAL_HOME"] = str(folder / "home")
    try:
        yield
    finally:
        if before is None:
            del os.environ["SHOAL_HOME"]
        else:
            os.environ["SHOAL_HOME"] = before
