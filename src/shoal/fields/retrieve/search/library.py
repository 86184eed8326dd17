"""The collections of a server: directories in a directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from pathlib import Path

from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError, StoreError
from shoal.core.files import fsync_dir, write_json
from shoal.fields.retrieve.collections import Collection
from shoal.fields.retrieve.index.protocols import Metric
from shoal.fields.retrieve.search.protocols import SearchError, TextEmbedder
from shoal.fields.retrieve.search.served import ServedCollection

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
# Directories that are being made or removed.
_UNFINISHED = ".unfinished-"
_SETTINGS, _POINTS = "served.json", "points"
_MOST = 1000
DIMS = 65_536
"""Most numbers of a vector."""


class CollectionSettings(Value):
    """What a served collection says beside its points.

    Args:
        text: attribute that BM25 reads.
    """

    text: str = "text"


class Library:
    """The collections in a directory, all of them open.

    Args:
        directory: made where there is none.
        embedder: makes vectors of texts; None refuses texts without vectors.

    Raises:
        StoreError: it cannot be made, a collection is damaged, or another process has it open.
    """

    def __init__(self, directory: Path | str, embedder: TextEmbedder | None = None) -> None:
        self.directory = Path(directory)
        self._embedder = embedder
        self._lock = threading.Lock()
        self._open: dict[str, ServedCollection] = {}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            places = sorted(self.directory.iterdir())
        except OSError as cause:
            raise StoreError(f"{self.directory}: cannot be used: {cause}") from cause
        try:
            for place in places:
                if place.name.startswith(_UNFINISHED):
                    shutil.rmtree(place, ignore_errors=True)
                elif (place / _SETTINGS).exists():
                    self._open[place.name] = self._opened(place)
        except BaseException:
            self.close()
            raise

    def _opened(self, place: Path) -> ServedCollection:
        try:
            raw = json.loads((place / _SETTINGS).read_text("utf-8"))
            settings = parse(CollectionSettings, raw, where=_SETTINGS)
        except (OSError, ValueError, ConfigError) as cause:
            raise StoreError(f"{place / _SETTINGS}: damaged: {cause}") from cause
        return ServedCollection(place / _POINTS, settings.text, self._embedder)

    def close(self) -> None:
        """Let all files go."""
        for one in self._open.values():
            one.close()

    def names(self) -> list[str]:
        """Names of the collections, sorted."""
        # No lock: making a collection takes it for long.
        return sorted(self._open.copy())

    def get(self, name: str) -> ServedCollection:
        """The collection of that name.

        Raises:
            SearchError: there is none.
        """
        made = self._open.get(name)
        if made is None:
            raise SearchError(f"Not found: Collection `{name[:80]}` doesn't exist!", status=404)
        return made

    def create(
        self, name: str, dim: int, *, metric: Metric = "cosine", text: str = "text"
    ) -> ServedCollection:
        """Make an empty collection; after a crash it is there, or it is not.

        Args:
            name: letters, digits, ``_``, ``-`` and ``.``, not first.
            dim: numbers of a vector.
            metric: ``cosine``, ``ip`` or ``l2``.
            text: attribute that BM25 reads.

        Raises:
            SearchError: a name that cannot be used, or that is there; too many collections.
            StoreError: the disk is full.
        """
        if not _NAME.fullmatch(name):
            raise SearchError(
                f"collection name {name[:80]!r}: expected 1 to 128 letters, digits, '_', '-' and "
                "'.', which is not the first"
            )
        if not 1 <= dim <= DIMS:
            raise SearchError(f"vectors.size = {dim}: expected 1 to {DIMS}")
        with self._lock:
            if name in self._open:
                raise SearchError(f"Wrong input: Collection `{name}` already exists!", status=409)
            if len(self._open) >= _MOST:
                raise SearchError(f"{_MOST} collections are there; delete one", status=409)
            unfinished, place = self._unfinished(name), self.directory / name
            try:
                shutil.rmtree(unfinished, ignore_errors=True)
                Collection.create(unfinished / _POINTS, dim, metric=metric).close()
                settings = CollectionSettings(text=text).model_dump(mode="json")
                write_json(unfinished / _SETTINGS, settings, error=StoreError)
                os.rename(unfinished, place)
                fsync_dir(self.directory)
            except OSError as cause:
                raise StoreError(f"{place}: cannot be made: {cause}") from cause
            made = self._open[name] = self._opened(place)
            return made

    def drop(self, name: str) -> bool:
        """Remove a collection; whether it was there.

        Raises:
            StoreError: its files cannot be removed.
        """
        with self._lock:
            gone = self._open.pop(name, None)
            if gone is None:
                return False
            gone.close()
            unfinished = self._unfinished(name)
            try:
                os.rename(self.directory / name, unfinished)
                fsync_dir(self.directory)
            except OSError as cause:
                raise StoreError(f"{self.directory / name}: cannot be removed: {cause}") from cause
        shutil.rmtree(unfinished, ignore_errors=True)
        return True

    def _unfinished(self, name: str) -> Path:
        return self.directory / f"{_UNFINISHED}{name}"
