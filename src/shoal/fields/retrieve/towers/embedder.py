"""The embedder ``tower``: a tower that ``train_towers`` has trained."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shoal.core.errors import ModelError
from shoal.core.files import expanded
from shoal.core.parts import part
from shoal.fields.retrieve.search.protocols import SearchError
from shoal.fields.retrieve.towers.protocols import TowerError

if TYPE_CHECKING:
    from shoal.fields.retrieve.towers.tower import TextTower


@part
class TowerEmbedder:
    """Encode queries and documents with the towers of a directory.

    Args:
        directory: towers of a run of ``train_towers``.
    """

    directory: str = "towers"

    def embed(self, texts: Sequence[str], *, query: bool = False) -> np.ndarray:
        """Vectors of length 1, of the query tower or of the document tower."""
        side = "query" if query else "document"
        try:
            vectors: np.ndarray = _read(expanded(self.directory) / side).encode(texts)
        except (TowerError, ModelError) as cause:
            raise SearchError(str(cause)) from cause
        return vectors

    def dim_of(self, job_dim: int) -> int:
        """As many as the towers say; as the job does, where none are trained yet."""
        place = expanded(self.directory) / "document" / "tower.json"
        try:
            return int(json.loads(place.read_text("utf-8"))["dim"])
        except FileNotFoundError:
            return job_dim
        except (OSError, ValueError, LookupError, TypeError) as cause:
            raise SearchError(
                f"embedder tower: directory = {self.directory!r}: damaged ({cause}); give "
                "the directory towers of a run of train_towers"
            ) from cause


@functools.lru_cache(maxsize=4)
def _read(place: Path) -> TextTower:
    from shoal.fields.retrieve.towers.tower import TextTower

    return TextTower.read(place)
