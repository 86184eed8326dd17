"""The tensors of a directory as rows of a list, format by format; no weights are loaded for it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.checkpoint.common import places
from shoal.core.config import Value
from shoal.core.errors import ModelError
from shoal.core.safetensors_header import ITEM_BYTES, read_header

if TYPE_CHECKING:
    from shoal.checkpoint.formats.protocols import Contents
    from shoal.checkpoint.saved_checkpoint import SavedCheckpoint

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
_MAX_JSON_BYTES = 2**28


class TensorRow(Value):
    """One tensor as stored.

    Args:
        dtype: the file format's name, such as ``BF16``.
        file: where it lies; the first of several files and how many more.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str


def contents_rows(contents: Contents) -> list[TensorRow]:
    """Rows of a checkpoint of any format."""
    contents_rows = []
    for name in contents.names():
        dtype, shape = contents.dtype(name), contents.shape(name)
        size = ITEM_BYTES[dtype] * math.prod(shape)
        row = {"name": name, "dtype": dtype, "shape": shape, "bytes": size}
        contents_rows.append(TensorRow.model_validate({**row, "file": contents.where(name)}))
    return contents_rows


def gguf_rows(path: Path) -> list[TensorRow]:
    """Of a GGUF file."""
    from shoal.model.gguf_header import read_header as read_gguf

    return [
        TensorRow(
            name=tensor.name,
            dtype=tensor.kind,
            shape=tensor.shape,
            bytes=tensor.stop - tensor.start,
            file=path.name,
        )
        for tensor in read_gguf(path).tensors.values()
    ]


def checkpoint_row(saved: SavedCheckpoint, name: str) -> TensorRow:
    """Of one of our own checkpoints, one tensor."""
    tensor = saved.index.tensors[name]
    return TensorRow(
        name=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        bytes=tensor.bytes,
        file=places(tensor.files),
    )


def huggingface_rows(path: Path) -> list[TensorRow]:
    """Of a Hugging Face directory.

    Raises:
        ModelError: a shard is missing, or index and shards disagree.
    """
    index = path / WEIGHTS_INDEX
    owners: dict[str, str] | None = None
    files = [WEIGHTS]
    if index.exists():
        owners = _weight_map(index)
        files = sorted(set(owners.values()))
    rows: list[TensorRow] = []
    for file in files:
        if not (path / file).exists():
            raise ModelError(f"{path / file}: a missing shard, which {index.name} names; fetch it")
        header = read_header(path / file)
        rows += [
            TensorRow(name=t.name, dtype=t.dtype, shape=t.shape, bytes=t.num_bytes, file=file)
            for t in header.tensors.values()
        ]
    if owners is not None:
        held = {row.name: row.file for row in rows}
        for name in sorted(held.keys() | owners.keys()):
            if held.get(name) != owners.get(name):
                raise ModelError(
                    f"{index}: says that tensor {name!r} is in {owners.get(name, 'no file')}, and "
                    f"it is in {held.get(name, 'no file')}; fetch index and shards again"
                )
    return rows


def _weight_map(index: Path) -> dict[str, str]:
    value = read_json(index).get("weight_map")
    if not isinstance(value, dict) or not value:
        raise ModelError(f"{index}: has no weight_map; fetch it again")
    for name, file in value.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(
                f"{index}: tensor {name!r} is said to be in {file!r}, which is no file name"
            )
    return value


def read_json(path: Path) -> dict[str, Any]:
    """A mapping in a JSON file.

    Raises:
        ModelError: it is something else, or cannot be read.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(
                f"{path}: larger than {_MAX_JSON_BYTES} bytes, too large for a JSON index"
            )
        data = json.loads(path.read_bytes())
    except OSError as cause:
        raise ModelError(f"{path}: cannot be read ({cause.strerror or cause})") from cause
    except (ValueError, RecursionError) as cause:
        raise ModelError(f"{path}: not JSON ({type(cause).__name__}); fetch it again") from cause
    if not isinstance(data, dict):
        raise ModelError(f"{path}: expected a mapping, found {type(data).__name__}")
    return data
