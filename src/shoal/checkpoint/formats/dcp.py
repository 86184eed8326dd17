"""Checkpoints of ``torch.distributed.checkpoint``: imported and exported.

Its index is a pickle, which :mod:`~shoal.checkpoint.formats.dcp_metadata` reads without running
anything; its tensors are files of ``torch.save``, opened by torch's restricted reader. What is
written is written by torch itself, so every version of it reads its own form.
"""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.common import box_of, no_tensor, places
from shoal.checkpoint.formats import pickles
from shoal.checkpoint.formats.dcp_metadata import (
    METADATA,
    DcpLocation,
    DcpTensor,
    read_metadata,
)
from shoal.checkpoint.store import MODEL, OPTIMIZER
from shoal.checkpoint.universal.protocols import RankLayout
from shoal.core.boxes import Box
from shoal.core.errors import CheckpointError, CorruptError
from shoal.core.files import write_dir_atomic
from shoal.core.parts import part

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.checkpoint.formats.protocols import Contents
    from shoal.checkpoint.universal.spec import UniversalSpec

_STATE = "optimizer.state."
_META = "shoal"


class DcpContents:
    """A torch.distributed checkpoint of whole tensors, read box by box.

    Names are those of torch's own state dicts: ``model.NAME`` and ``optimizer.state.NAME.KEY``;
    tensors that lie beside them are taken for weights.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        index = read_metadata(path / METADATA)
        self._tensors = {_ours(name): tensor for name, tensor in index.tensors.items()}
        self._others = index.others
        self.meta: dict[str, Any] = {}
        if _META in index.others:
            self.meta = pickles.own_description(self._object(_META, index.others[_META]), path)
        self._last: tuple[DcpLocation, Tensor] | None = None

    @property
    def step(self) -> int:
        """As our own meta says it; 0 where there is none."""
        return int(self.meta.get("step", 0))

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def dtype(self, name: str) -> str:
        """As stored."""
        return self._entry(name).dtype

    def where(self, name: str) -> str:
        """The first of its files."""
        return places(sorted({place.file for _, place in self._entry(name).pieces}))

    def tensor(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        import torch

        from shoal.checkpoint.pieces import TORCH_NAMES

        entry = self._entry(name)
        box = box_of(self.path, name, entry.shape, offset, shape)
        out = torch.empty(box.shape, dtype=getattr(torch, TORCH_NAMES[entry.dtype]))
        for piece, place in entry.pieces:
            common = piece.intersect(box)
            if common is not None:
                out[common.slices(box)] = self._piece(name, piece, place)[common.slices(piece)]
        return out

    def problems(self) -> Iterator[str]:
        """Pieces whose bytes are not what was written."""
        for name, entry in self._tensors.items():
            for piece, place in entry.pieces:
                try:
                    with zipfile.ZipFile(self._bytes(name, place)) as archive:
                        bad = archive.testzip()
                    if bad is not None:
                        yield (
                            f"{self.path / place.file}: {name} has changed since it was written "
                            f"(CRC-32 of "
                            f"{bad} differs)"
                        )
                        continue
                    self._piece(name, piece, place)
                except (CheckpointError, zipfile.BadZipFile) as cause:
                    yield f"{self.path / place.file}: {name}: {cause}"

    def _entry(self, name: str) -> DcpTensor:
        if name not in self._tensors:
            raise CheckpointError(no_tensor(self.path, name, self._tensors))
        return self._tensors[name]

    def _bytes(self, name: str, place: DcpLocation) -> io.BytesIO:
        file = self.path / place.file
        try:
            with file.open("rb") as source:
                source.seek(place.offset)
                data = source.read(place.length)
        except OSError as cause:
            raise CorruptError(f"{file}: {name} cannot be read ({cause.strerror})") from cause
        if len(data) != place.length:
            raise CorruptError(
                f"{file}: truncated: {name} lies beyond its end; copy the checkpoint again"
            )
        return io.BytesIO(data)

    def _object(self, name: str, place: DcpLocation) -> Any:
        return pickles.read(self._bytes(name, place), f"{self.path / place.file}: {name}")

    def _piece(self, name: str, box: Box, place: DcpLocation) -> Tensor:
        import torch

        if self._last is None or self._last[0] != place:
            result = self._object(name, place)
            if not isinstance(result, torch.Tensor) or tuple(result.shape) != box.shape:
                raise CorruptError(
                    f"{self.path / place.file}: {name} is no tensor of the shape "
                    f"{list(box.shape)}, as the metadata says; it is damaged"
                )
            self._last = (place, result.detach())
        return self._last[1]


@part
class DcpFormat:
    """A directory of ``torch.distributed.checkpoint``, of any number of ranks."""

    def holds(self, path: Path) -> bool:
        """Its metadata is there."""
        return (path / METADATA).is_file()

    def open(self, path: Path, *, spec: UniversalSpec | None = None) -> Contents:
        """Open it; reads the metadata; tensors are loaded lazily."""
        return DcpContents(path)

    def problems(self, path: Path) -> Iterator[str]:
        """Every tensor's archive has a CRC-32."""
        yield from DcpContents(path).problems()

    def write(self, out: Path, contents: Contents, *, mesh: RankLayout) -> None:
        """One file, written by torch; it loads into any mesh by itself."""
        from torch.distributed.checkpoint.state_dict_saver import save

        state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}}}
        for name in contents.names():
            if name.startswith(OPTIMIZER):
                own, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
                state["optimizer"]["state"].setdefault(own, {})[key] = contents.tensor(name)
            else:
                state["model"][name.removeprefix(MODEL)] = contents.tensor(name)
        state[_META] = json.dumps({**contents.meta, "step": contents.step})
        with write_dir_atomic(out, error=CheckpointError) as place, warnings.catch_warnings():
            # It says that there is one process, which is what is meant.
            warnings.simplefilter("ignore", UserWarning)
            save(state, checkpoint_id=place, no_dist=True)


def _ours(name: str) -> str:
    if name.startswith(_STATE):
        return OPTIMIZER + name.removeprefix(_STATE)
    return name if name.startswith((MODEL, OPTIMIZER)) else MODEL + name
