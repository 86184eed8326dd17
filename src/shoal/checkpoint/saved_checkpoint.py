"""One saved checkpoint: any box of any tensor, checked against its checksum.

Files are memory-mapped where they lie on this host, so only what is asked for is read. A file's
shard of the index, its size and its header are checked the first time the file is used, and a piece
is compared with its checksum the first time any part of it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.common import box_of, no_tensor, require_model
from shoal.checkpoint.index import CheckpointIndex, IndexedTensor, read_index
from shoal.checkpoint.pieces import TORCH_NAMES
from shoal.checkpoint.readback import unlike
from shoal.checkpoint.shards import StoredPiece, file_name
from shoal.checkpoint.storage import Folder, LocalFolder
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError, CorruptError

if TYPE_CHECKING:
    import torch


class SavedCheckpoint:
    """A checkpoint that was opened; its index is checked already.

    Args:
        path: the directory of the step, on this host or wherever it lies.
        advise: advice about damage, such as another step to use.

    Raises:
        CheckpointError: there is no checkpoint, or it is of a newer format.
        CorruptError: the index has changed since it was written; of versions 1 to 3 also a header
            or the size of a file.
    """

    def __init__(self, path: Path | Folder, *, advise: Callable[[], str] = lambda: "") -> None:
        self.folder: Folder = LocalFolder(path) if isinstance(path, Path) else path
        self.path: Path | str = path if isinstance(path, Path) else self.folder.where()
        self._advise = advise
        self._verified: set[tuple[str, str]] = set()
        if not self.folder.exists():
            raise CheckpointError(f"{self.path}: no such checkpoint; give the directory of a step")
        with self._advising():
            self.index: CheckpointIndex = read_index(self.folder)

    @property
    def step(self) -> int:
        """The step after which this was saved."""
        return self.index.step

    @property
    def meta(self) -> dict[str, Any]:
        """What was kept beside the tensors."""
        return self.index.meta

    def names(self) -> tuple[str, ...]:
        return tuple(self.index.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def blank(self, name: str) -> torch.Tensor:
        """A new tensor of the shape and dtype of a stored one, with anything in it."""
        import torch

        entry = self._entry(name)
        return torch.empty(entry.shape, dtype=getattr(torch, TORCH_NAMES[entry.dtype]))

    def tensor(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A box of a tensor, assembled from the pieces that hold it.

        Args:
            name: which tensor.
            offset: where the box begins; the origin if not given.
            shape: size of the box; up to the end of the tensor if not given.

        Returns:
            A new tensor in host memory, of shape ``shape`` and the stored dtype.

        Raises:
            CheckpointError: no such tensor, or the box is not inside it.
            CorruptError: a piece differs from what was written.
        """
        import torch

        entry = self._entry(name)
        box = box_of(self.path, name, entry.shape, offset, shape)
        out = torch.empty(box.shape, dtype=getattr(torch, TORCH_NAMES[entry.dtype]))
        self._fill(name, entry, box, out)
        return out

    def read_into(
        self, name: str, out: torch.Tensor, offset: tuple[int, ...] | None = None
    ) -> None:
        """Fill ``out`` with the box of its own shape at ``offset``, cast to its dtype.

        Raises:
            CheckpointError: no such tensor, or the box is not inside it.
            CorruptError: a piece differs from what was written.
        """
        entry = self._entry(name)
        box = box_of(self.path, name, entry.shape, offset, tuple(out.shape))
        self._fill(name, entry, box, out)

    def verify(self) -> None:
        """Hash every piece now.

        Raises:
            CorruptError: the first piece that has changed since it was written, by tensor and file.
        """
        for problem in self.problems():
            raise CorruptError(f"{problem}{self._advice()}")

    def read_back(self) -> None:
        """Compare every piece with what the disk has now, past copies in memory.

        Raises:
            CorruptError: a piece that has changed since it was written, by tensor and file.
        """
        if not isinstance(self.path, Path):
            return self.verify()
        self.check_files()
        for file in self.index.files:
            pieces = [
                (start, start + piece.bytes, name, piece)
                for name, piece, start in self.index.shard(file).pieces()
            ]
            for name, piece in unlike(self.path / file, pieces):
                raise self.damage(name, piece)
        return None

    def check_files(self) -> None:
        """Hold every file against the index: that it is there, its size, its header and its shard.

        Raises:
            CheckpointError: a file cannot be read.
            CorruptError: it has changed since it was written; names the file.
        """
        with self._advising():
            for file in self.index.files:
                self.index.check_file(file)

    def problems(self) -> Iterator[str]:
        """Every file and every piece that has changed since it was written, by tensor and file."""
        for file in self.index.files:
            try:
                shard = self.index.check_file(file)
            except CorruptError as cause:
                yield str(cause)
                continue
            for name, piece, start in shard.pieces():
                if not self._intact(name, piece, start):
                    yield self.described(name, piece)

    def pieces(self, name: str) -> tuple[StoredPiece, ...]:
        """All pieces of a tensor, by file.

        Raises:
            CheckpointError: no such tensor, or a file cannot be read.
            CorruptError: a file or its shard has changed since it was written.
        """
        self._entry(name)
        with self._advising():
            return self.index.pieces(name)

    def place(self, name: str, piece: StoredPiece) -> int:
        """Where a piece of a tensor begins in its file."""
        with self._advising():
            return self.index.stored(name, piece.file, piece.box)[2]

    def intact(self, name: str, piece: StoredPiece, start: int | None = None) -> bool:
        """Whether a piece is what was written; it is read once to know.

        Args:
            name: of the tensor.
            piece: it.
            start: its first byte in the file; looked up if not given.
        """
        place = self.place(name, piece) if start is None else start
        return self._intact(name, piece, place)

    def trust(self, name: str, piece: StoredPiece) -> None:
        """A piece was compared with its checksum elsewhere, and is what was written."""
        self._verified.add((piece.key or name, piece.file))

    def damage(self, name: str, piece: StoredPiece) -> CorruptError:
        """What to raise for a piece that has changed since it was written."""
        return self.damaged(self.described(name, piece))

    def damaged(self, words: str) -> CorruptError:
        """What to raise for damage that was described; it says which other step to use."""
        return CorruptError(f"{words}{self._advice()}")

    def require_model(self, expected: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another model than ``expected``.

        Raises:
            CheckpointError: ``meta["model"]`` differs; names the fields.
        """
        require_model(self.path, self.meta, expected)

    def _entry(self, name: str) -> IndexedTensor:
        entry = self.index.tensors.get(name)
        if entry is None:
            raise CheckpointError(no_tensor(self.path, name, self.index.tensors))
        return entry

    def _fill(self, name: str, entry: IndexedTensor, box: Box, out: torch.Tensor) -> None:
        import torch

        dtype = getattr(torch, TORCH_NAMES[entry.dtype])
        filled = 0
        for owner, part in entry.runs.overlapping(box):
            with self._advising():
                piece, _, start = self.index.stored(name, file_name(owner), part)
            common = part.intersect(box)
            assert common is not None
            if not self._intact(name, piece, start):
                raise self.damage(name, piece)
            raw = self.folder.read(piece.file, start, start + piece.bytes)
            stored = torch.from_numpy(raw).view(dtype).view(piece.shape)
            with torch.no_grad():
                out[common.slices(box)].copy_(stored[common.slices(part)])
            filled += common.volume
            if common.volume == box.volume:
                break  # the rest can only be copies of the same elements
        # The index was checked to cover the tensor, so every element was filled.
        assert filled >= box.volume

    def _intact(self, name: str, piece: StoredPiece, start: int) -> bool:
        key = (piece.key or name, piece.file)
        if key not in self._verified:
            if not piece.holds(self.folder.read(piece.file, start, start + piece.bytes)):
                return False
            self._verified.add(key)
        return True

    @contextlib.contextmanager
    def _advising(self) -> Iterator[None]:
        """Damage is reported with what to do about it."""
        try:
            yield
        except CorruptError as cause:
            raise CorruptError(f"{cause}{self._advice()}") from cause

    def described(self, name: str, piece: StoredPiece) -> str:
        """What is wrong with a piece that has changed since it was written."""
        return (
            f"tensor {name!r} in {self.folder.where(piece.file)}: its contents have changed since "
            f"it was written ({piece.checksum} differs)"
        )

    def _advice(self) -> str:
        advice = self._advise()
        return f"; {advice}" if advice else ""
