"""What formats share in which every rank wrote its own part: they are opened through universal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.formats import pickles
from shoal.checkpoint.universal.atomic import UniversalCheckpoint
from shoal.checkpoint.universal.convert import consolidate
from shoal.checkpoint.universal.protocols import Fragment, RankDumps, Scalar
from shoal.checkpoint.universal.spec import UniversalSpec
from shoal.core.errors import CheckpointError, CorruptError

__all__ = ["FileOf", "archive_problems", "dump_problems", "open_consolidated"]


@dataclass(frozen=True)
class FileOf:
    """See :class:`~shoal.checkpoint.universal.protocols.RankFile`.

    Args:
        path: where it lies.
        read: gives its contents.
    """

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


def open_consolidated(dumps: RankDumps, spec: UniversalSpec | None) -> UniversalCheckpoint:
    """Rank files as whole tensors: put together now, or found beside them."""
    return UniversalCheckpoint(consolidate(dumps, spec=spec))


def dump_problems(dumps: RankDumps, paths: Sequence[Path]) -> Iterator[str]:
    """Missing files of ranks, and files that differ from their checksums."""
    yield from archive_problems(paths)
    try:
        dumps.files()
    except CheckpointError as cause:
        yield str(cause)


def archive_problems(files: Sequence[Path]) -> Iterator[str]:
    """What is wrong with files of ``torch.save``."""
    for file in files:
        yield from pickles.problems(file)
