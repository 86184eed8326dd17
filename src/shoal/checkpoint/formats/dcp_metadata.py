"""The ``.metadata`` of a torch.distributed checkpoint, which is a pickle, read without running it.

A pickle names functions and calls them. The reader here knows a fixed list of names, all of them
of the metadata itself, and answers each with an inert record of our own: no class or function of
torch, of the standard library or of another package is ever looked up, let alone called. A pickle
that names anything else is refused at that name.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from shoal.checkpoint.pieces import DTYPE_NAMES
from shoal.core.boxes import Box, uncovered
from shoal.core.errors import CheckpointError, CorruptError
from shoal.core.safetensors_header import ITEM_BYTES

METADATA = ".metadata"
_MAX_BYTES = 2**28


class _Record:
    """Whatever object the pickle describes: its arguments and its state, and no behaviour."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field of the object."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Tensor(_Record):
    """TensorStorageMetadata."""


class _Bytes(_Record):
    """BytesStorageMetadata."""


class _Root(_Record):
    """Metadata."""


def _sizes(values: Any = ()) -> tuple[int, ...]:
    return tuple(values)


_DCP = "torch.distributed.checkpoint.metadata"
# Everything that may be named, and what stands in for it.
_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    (_DCP, "Metadata"): _Root,
    (_DCP, "TensorStorageMetadata"): _Tensor,
    (_DCP, "BytesStorageMetadata"): _Bytes,
    (_DCP, "TensorProperties"): _Record,
    (_DCP, "ChunkStorageMetadata"): _Record,
    (_DCP, "MetadataIndex"): _Record,
    (_DCP, "StorageMeta"): _Record,
    (_DCP, "_MEM_FORMAT_ENCODING"): _Record,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch.serialization", "_get_layout"): _Record,
    ("torch", "Size"): _sizes,
    ("pathlib", "Path"): _Record,
    ("pathlib", "PosixPath"): _Record,
    ("pathlib", "WindowsPath"): _Record,
    ("pathlib._local", "PosixPath"): _Record,
    ("collections", "OrderedDict"): dict,
}


class _Restricted(pickle.Unpickler):
    """Knows the names above and dtypes; imports no name."""

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPE_NAMES:
            return name
        try:
            return _KNOWN[module, name]
        except KeyError:
            raise CheckpointError(
                f"{self._path}: names {module}.{name}, which no metadata of a torch.distributed "
                "checkpoint has and which could run code; refused and not executed"
            ) from None

    def persistent_load(self, pid: Any) -> NoReturn:
        raise CheckpointError(f"{self._path}: refers to an object outside of itself; refused")


class DcpLocation(NamedTuple):
    """Where a stored piece lies.

    Args:
        offset: bytes before it.
    """

    file: str
    offset: int
    length: int


class DcpTensor(NamedTuple):
    """One tensor.

    Args:
        dtype: as safetensors names it.
        shape: whole.
        pieces: boxes of it and where they lie.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, DcpLocation], ...]


class DcpIndex(NamedTuple):
    """What is in a torch.distributed checkpoint.

    Args:
        tensors: by name.
        others: objects that are no tensors, by name, and where they lie.
    """

    tensors: dict[str, DcpTensor]
    others: dict[str, DcpLocation]


def read_metadata(path: Path) -> DcpIndex:
    """Read the ``.metadata`` of a directory.

    Raises:
        CheckpointError: it is missing, names what no metadata has, or stores in a way that is not
            read here.
        CorruptError: it is damaged, or what it says cannot be.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CorruptError(f"{path}: larger than {_MAX_BYTES} bytes, too large for metadata")
        data = path.read_bytes()
    except OSError as cause:
        raise CheckpointError(f"{path}: cannot be read ({cause.strerror or cause})") from cause
    try:
        root = _Restricted(data, path).load()
        return _index(root, path)
    except (CheckpointError, CorruptError):
        raise
    except Exception as cause:  # whatever an unpickler raises on arbitrary bytes
        raise CorruptError(
            f"{path}: no metadata of a torch.distributed checkpoint ({type(cause).__name__}); it "
            f"is truncated or damaged; copy it again"
        ) from None


def _index(root: Any, path: Path) -> DcpIndex:
    if not isinstance(root, _Root):
        raise CorruptError(f"{path}: no metadata of a torch.distributed checkpoint")
    places: dict[str, dict[tuple[int, ...] | None, DcpLocation]] = {}
    for index, info in root.get("storage_data").items():
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{path}: {index.get('fqn')} is stored with a transform, such as compression, "
                "which is not read here; save it without"
            )
        offset = index.get("offset")
        place = DcpLocation(
            str(info.get("relative_path")), int(info.get("offset")), int(info.get("length"))
        )
        if Path(place.file).name != place.file or place.offset < 0 or place.length < 0:
            raise CorruptError(f"{path}: {place.file!r} is no file of this directory")
        places.setdefault(str(index.get("fqn")), {})[None if offset is None else tuple(offset)] = (
            place
        )
    tensors: dict[str, DcpTensor] = {}
    others: dict[str, DcpLocation] = {}
    for name, entry in root.get("state_dict_metadata").items():
        if isinstance(entry, _Tensor):
            tensors[name] = _tensor(name, entry, places.get(name, {}), path)
        elif name in places:
            others[name] = next(iter(places[name].values()))
    return DcpIndex(tensors, others)


def _tensor(
    name: str, entry: _Tensor, places: dict[tuple[int, ...] | None, DcpLocation], path: Path
) -> DcpTensor:
    properties = entry.get("properties")
    # Its state is a tuple that begins with the dtype, or a mapping in other versions.
    state = properties.state
    dtype = state.get("dtype") if isinstance(state, dict) else state[0]
    shape = _shape(entry.get("size"))
    pieces = []
    for chunk in entry.get("chunks"):
        box = Box(_shape(chunk.get("offsets")), _shape(chunk.get("sizes")))
        place = places.get(box.offset)
        if place is None or not box.inside(shape):
            raise CorruptError(f"{path}: tensor {name!r}: the piece {box} lies in no file")
        pieces.append((box, place))
    if dtype not in DTYPE_NAMES or DTYPE_NAMES[dtype] not in ITEM_BYTES:
        raise CheckpointError(f"{path}: tensor {name!r} is of the dtype {dtype}, not read here")
    missing = uncovered(Box.whole(shape), (box for box, _ in pieces))
    if missing:
        raise CorruptError(f"{path}: tensor {name!r}: no rank has the elements {missing[0]}")
    return DcpTensor(DTYPE_NAMES[dtype], shape, tuple(pieces))


def _shape(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(type(size) is int and 0 <= size < 2**63 for size in sizes):
        raise ValueError("no shape")
    return sizes
