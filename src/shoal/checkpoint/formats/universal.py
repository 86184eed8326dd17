"""The universal form: one file for every tensor of every parameter, whole and in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.checkpoint.universal.atomic import MANIFEST, UniversalCheckpoint
from shoal.checkpoint.universal.convert import rewrite
from shoal.checkpoint.universal.protocols import RankLayout
from shoal.core.parts import part

if TYPE_CHECKING:
    from shoal.checkpoint.formats.protocols import Contents
    from shoal.checkpoint.universal.spec import UniversalSpec


@part
class UniversalFormat:
    """See :mod:`shoal.checkpoint.universal.atomic`."""

    def holds(self, path: Path) -> bool:
        """Its manifest is there."""
        return (path / MANIFEST).is_file()

    def open(self, path: Path, *, spec: UniversalSpec | None = None) -> Contents:
        """Open it; blocks are verified when they are read."""
        return UniversalCheckpoint(path)

    def problems(self, path: Path) -> Iterator[str]:
        """Every file that has changed since it was written."""
        yield from UniversalCheckpoint(path).problems()

    def write(self, out: Path, contents: Contents, *, mesh: RankLayout) -> None:
        """Whole tensors need no mesh."""
        rewrite(contents, out)
