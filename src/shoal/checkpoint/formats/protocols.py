"""What a checkpoint format promises: to recognise, open, check and write its directories."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.checkpoint.universal.convert import ReadableCheckpoint
from shoal.checkpoint.universal.protocols import RankLayout

if TYPE_CHECKING:
    from shoal.checkpoint.universal.spec import UniversalSpec


class Contents(ReadableCheckpoint, Protocol):
    """A checkpoint of whole tensors: weights as ``model.NAME``, state as ``optimizer.NAME.KEY``.

    Training reads it as it does a checkpoint of its own.
    """

    @property
    def meta(self) -> dict[str, Any]:
        """What is kept beside the tensors: ``model``, ``run``, ``job`` where it is our own."""

    def dtype(self, name: str) -> str:
        """Stored dtype of a tensor, as safetensors names it."""

    def where(self, name: str) -> str:
        """The file in which it lies, for listings."""


class CheckpointFormat(Protocol):
    """A part of kind ``checkpoint_format``."""

    def holds(self, path: Path) -> bool:
        """Whether ``path`` looks like this format; opens nothing large and never fails."""

    def open(self, path: Path, *, spec: UniversalSpec | None = None) -> Contents:
        """Open it.

        Args:
            path: the directory.
            spec: how the fragments of rank files combine, where the files do not say it.

        Raises:
            CheckpointError: it cannot be read; says why.
            CorruptError: it is damaged.
        """

    def problems(self, path: Path) -> Iterator[str]:
        """Everything that is wrong with its bytes, by file."""

    def write(self, out: Path, contents: Contents, *, mesh: RankLayout) -> None:
        """Write a checkpoint, whole or not at all.

        Args:
            out: directory to make.
            contents: what to write.
            mesh: the ranks for which it is cut, where the format has a file for each.

        Raises:
            ShoalError: it cannot be written so.
        """
