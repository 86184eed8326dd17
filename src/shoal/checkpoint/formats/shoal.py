"""Our own checkpoints: a file for each rank and one index; see :mod:`shoal.checkpoint.store`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.index import INDEX_NAME
from shoal.checkpoint.saved import Saved
from shoal.checkpoint.store import Store
from shoal.checkpoint.universal.protocols import Layout
from shoal.core.errors import CheckpointError
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.formats.protocols import Contents
    from shoal.checkpoint.universal.spec import UniversalSpec

__all__ = ["ShoalContents", "ShoalFormat"]


class ShoalContents:
    """A saved step as contents of a format.

    Args:
        saved: the step.

    Attributes:
        saved: the same, for who loads much at once.
    """

    def __init__(self, saved: Saved) -> None:
        self.saved = saved
        self.path: Path | str = saved.path
        self.step = saved.step
        self.names = saved.names
        self.shape = saved.shape

    @property
    def meta(self) -> dict[str, Any]:
        """What was kept beside the tensors."""
        return self.saved.meta

    def dtype(self, name: str) -> str:
        """As stored."""
        self.saved.shape(name)
        return self.saved.index.tensors[name].dtype

    def where(self, name: str) -> str:
        """The first of its files."""
        files = sorted({piece.file for piece in self.saved.index.tensors[name].pieces})
        return files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else "")

    def tensor(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """A box of a tensor."""
        return self.saved.tensor(name, offset, shape)


@part
class ShoalFormat:
    """A step, or a run of which the newest step is taken."""

    def holds(self, path: Path) -> bool:
        """A step's index, or steps."""
        if (path / INDEX_NAME).is_file() and path.name.lstrip(".").startswith("step-"):
            return True
        return any(Store(place).steps() for place in (path, path / "checkpoints"))

    def open(self, path: Path, *, spec: UniversalSpec | None = None) -> Contents:
        """Open a step; each piece is verified when it is read."""
        return ShoalContents(Saved(_step(path)))

    def problems(self, path: Path) -> Iterator[str]:
        """Every piece that is not what was written."""
        yield from Saved(_step(path)).problems()

    def write(self, out: Path, contents: Contents, *, mesh: Layout) -> None:
        """A store with this one step, in one file."""
        tensors = {name: contents.tensor(name) for name in contents.names()}
        Store(out).save(contents.step, tensors, dict(contents.meta))


def _step(path: Path) -> Path:
    for place in (path, path / "checkpoints"):
        steps = Store(place).steps()
        if steps:
            return Store(place).folder(steps[-1])
    if not (path / INDEX_NAME).is_file():
        raise CheckpointError(f"{path}: no checkpoint; give a run or the directory of a step")
    return path
