"""What formats share in which every rank wrote its own part: they are opened through universal."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.checkpoint.formats import pickles
from shoal.checkpoint.universal.atomic import UniversalCheckpoint
from shoal.checkpoint.universal.convert import consolidate
from shoal.checkpoint.universal.protocols import Fragment, RankDumps, Scalar
from shoal.checkpoint.universal.spec import UniversalSpec
from shoal.core.errors import CheckpointError, CorruptError

if TYPE_CHECKING:
    from shoal.checkpoint.formats.protocols import Contents


@dataclass(frozen=True)
class FileOf:
    """See :class:`~shoal.checkpoint.universal.protocols.RankFile`."""

    path: Path
    read: Callable[[Path], Iterator[Fragment | Scalar]]

    def contents(self) -> Iterator[Fragment | Scalar]:
        """What is in it, once its checksums were compared.

        Raises:
            CorruptError: they differ, or it is cut.
        """
        for problem in pickles.problems(self.path):
            raise CorruptError(problem)
        try:
            yield from self.read(self.path)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as cause:
            raise CorruptError(
                f"{self.path}: what it holds is not laid out as its format says "
                f"({type(cause).__name__}: {cause}); it is damaged or of another version"
            ) from None


class RankFormat:
    """Base of the formats in which every rank wrote its own part; they are opened as universal."""

    @abstractmethod
    def dumps(self, path: Path) -> RankDumps:
        """The rank files, as they lie."""

    @abstractmethod
    def marked(self, path: Path) -> bool:
        """Whether rank files lie in a directory, or in the one that it names.

        Raises:
            CheckpointError: there is no such directory.
        """

    def holds(self, path: Path) -> bool:
        """Rank files, or the name of a directory of them."""
        try:
            return self.marked(path)
        except CheckpointError:
            return False

    def open(self, path: Path, *, spec: UniversalSpec | None = None) -> Contents:
        """Whole tensors: put together now and kept beside the files, or found there."""
        return UniversalCheckpoint(consolidate(self.dumps(path), spec=spec))

    def problems(self, path: Path) -> Iterator[str]:
        """Missing files, and files that differ from their checksums."""
        dumps = self.dumps(path)
        for file in dumps.paths():
            yield from pickles.problems(file)
        try:
            dumps.files()
        except CheckpointError as cause:
            yield str(cause)
