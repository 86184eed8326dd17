"""Our own checkpoints: a file for each rank and one index; see :mod:`shoal.checkpoint.store`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.branches import branches, place_of
from shoal.checkpoint.common import places
from shoal.checkpoint.index import INDEX_NAME
from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
from shoal.checkpoint.store import Store
from shoal.checkpoint.universal.protocols import RankLayout
from shoal.core.errors import CheckpointError
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.formats.protocols import Contents
    from shoal.checkpoint.universal.spec import UniversalSpec


class ShoalContents:
    """A saved step as contents of a format.

    Attributes:
        saved: the same, for loading much at once.
    """

    def __init__(self, saved: SavedCheckpoint) -> None:
        self.saved = saved
        self.path: Path | str = saved.path
        self.step = saved.step
        self.names = saved.names
        self.shape = saved.shape

    @property
    def meta(self) -> dict[str, Any]:
        return self.saved.meta

    def dtype(self, name: str) -> str:
        self.saved.shape(name)
        return self.saved.index.tensors[name].dtype

    def where(self, name: str) -> str:
        return places(self.saved.index.tensors[name].files)

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
    """A checkpoint of one step, or a run, whose latest step is read."""

    def holds(self, path: Path) -> bool:
        """A step's index, or steps."""
        if (path / INDEX_NAME).is_file() and path.name.lstrip(".").startswith("step-"):
            return True
        return any(Store(place).steps() for place, _ in _places(path))

    def open(self, path: Path, *, spec: UniversalSpec | None = None) -> Contents:
        """Open a step; each piece is verified when it is read."""
        return ShoalContents(SavedCheckpoint(_step(path)))

    def problems(self, path: Path) -> Iterator[str]:
        """Every piece that has changed since it was written."""
        yield from SavedCheckpoint(_step(path)).problems()

    def write(self, out: Path, contents: Contents, *, mesh: RankLayout) -> None:
        """A store with this one step, in one file."""
        tensors = {name: contents.tensor(name) for name in contents.names()}
        Store(out).save(contents.step, tensors, dict(contents.meta))


def _places(path: Path) -> list[tuple[Path, int | None]]:
    """A store, or a run's newest branch and then the step where that begins."""
    branch = branches(path)[-1]
    store = path / "checkpoints"
    places: list[tuple[Path, int | None]] = [(path, None)]
    places.append((Path(place_of(store, branch.number)), None))
    if branch.step is not None:
        places.append((Path(place_of(store, branch.of)), branch.step))
    return places


def _step(path: Path) -> Path:
    for place, newest in _places(path):
        steps = [step for step in Store(place).steps() if newest is None or step == newest]
        if steps:
            return Store(place).folder(steps[-1])
    if not (path / INDEX_NAME).is_file():
        raise CheckpointError(f"{path}: no checkpoint; give a run or the directory of a step")
    return path
