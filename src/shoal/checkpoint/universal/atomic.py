"""The universal form: a directory with one file for every tensor of every parameter.

::

    DIR/universal.json                      names, shapes, hashes, tied names
    DIR/job.json                            step, data, seed, schedule, the layout that saved it
    DIR/zero/<parameter>/fp32.safetensors   the weight, whole and without padding, in fp32
    DIR/zero/<parameter>/exp_avg.safetensors ...

Each tensor is complete, so a rank of any split maps the file and reads its own ranges. Hashes are
of blocks, so that what is read is verified and what is not read costs nothing.

Source: Lian et al., Universal Checkpointing, 2024, section 3 (atomic checkpoints).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from shoal.checkpoint.common import box_of, no_tensor, require_model
from shoal.checkpoint.index import digest
from shoal.checkpoint.store import MODEL, OPTIMIZER
from shoal.checkpoint.universal.protocols import FP32
from shoal.core.boxes import Box
from shoal.core.config import Value, parse
from shoal.core.errors import CheckpointError, CorruptError
from shoal.core.files import write_json
from shoal.core.safetensors_header import encode_header

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

MANIFEST = "universal.json"
JOB = "job.json"
FOLDER = "zero"
VERSION = 1

_MAX_BYTES = 2**28
# What a name may be, since it becomes a directory.
_NAME = re.compile(r"^(?!\.)[A-Za-z0-9_.\-]{1,200}$")


class AtomicTensor(Value):
    """One file.

    Args:
        header: bytes before the elements.
        blocks: SHA-256 of the file's blocks, one after the other.
    """

    bytes: NonNegativeInt
    header: NonNegativeInt
    blocks: tuple[str, ...]


class AtomicParameter(Value):
    """One parameter.

    Args:
        shape: whole, without padding.
        tensors: ``fp32``, ``exp_avg`` ... -> its file.
        scalars: numbers of the optimizer, such as its step.
    """

    shape: tuple[NonNegativeInt, ...]
    tensors: dict[str, AtomicTensor]
    scalars: dict[str, float] = {}


class Manifest(Value):
    """What is in a universal checkpoint.

    Args:
        block: bytes of a hashed block.
        parameters: name -> parameter.
        tied: name -> name of the parameter that it is the same as.
        job: SHA-256 of the job file.
        source: what it was made of: files with their sizes and times, and the spec.
    """

    format: Literal["shoal-universal"] = "shoal-universal"
    version: Literal[1] = 1
    step: NonNegativeInt
    block: PositiveInt = 2**22
    parameters: dict[str, AtomicParameter]
    tied: dict[str, str] = {}
    job: str
    source: dict[str, Any] = {}


class UniversalWriter:
    """Fills a directory that is renamed when it is whole; several threads may add.

    Args:
        place: the directory, which is not there under its name yet.
        block: bytes of a hashed block.
    """

    def __init__(self, place: Path, block: int = 2**22) -> None:
        self.place = place
        self.block = block
        self._lock = threading.Lock()
        self._parameters: dict[str, dict[str, Any]] = {}
        (place / FOLDER).mkdir()

    def add(self, name: str, key: str, tensor: Tensor) -> None:
        """Write one whole tensor of a parameter, as fp32.

        Raises:
            CheckpointError: a name that can be no file, or another shape than its weight's.
        """
        for word in (name, key):
            if not _NAME.match(word):
                raise CheckpointError(
                    f"tensor {word[:80]!r}: expected a name of letters, digits, dots, dashes and "
                    "underscores, which becomes a directory; rename it"
                )
        shape = tuple(tensor.shape)
        with self._lock:
            entry = self._parameters.setdefault(
                name, {"shape": shape, "tensors": {}, "scalars": {}}
            )
        if entry["shape"] != shape:
            raise CheckpointError(
                f"{name}: {key} has the shape {list(shape)} and the parameter "
                f"{list(entry['shape'])}; a universal checkpoint holds tensors of the parameter's "
                "own shape"
            )
        folder = self.place / FOLDER / name
        folder.mkdir(exist_ok=True)
        header = encode_header({key: ("F32", shape)})
        values = tensor.detach().float().contiguous().reshape(-1).numpy().data.cast("B")
        hashes, pending = [], bytes(header)
        with (folder / f"{key}.safetensors").open("wb") as out:
            out.write(header)
            out.write(values)
        # Blocks of the file: the first one begins with the header.
        first = max(0, self.block - len(pending))
        hashes.append(hashlib.sha256(pending + bytes(values[:first])).hexdigest())
        for start in range(first, len(values), self.block):
            hashes.append(hashlib.sha256(values[start : start + self.block]).hexdigest())
        stored = {"bytes": len(header) + len(values), "header": len(header), "blocks": hashes}
        with self._lock:
            entry["tensors"][key] = stored

    def scalar(self, name: str, key: str, value: float) -> None:
        """Keep one number of a parameter's optimizer state."""
        with self._lock:
            self._parameters[name]["scalars"][key] = float(value)

    def finish(
        self,
        step: int,
        meta: Mapping[str, Any],
        *,
        tied: Mapping[str, str] | None = None,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the job file and the manifest; nothing may be added afterwards."""
        write_json(self.place / JOB, dict(meta))
        manifest = Manifest.model_validate(
            {
                "step": step,
                "block": self.block,
                "parameters": dict(sorted(self._parameters.items())),
                "tied": dict(tied or {}),
                "job": hashlib.sha256((self.place / JOB).read_bytes()).hexdigest(),
                "source": dict(source or {}),
            }
        )
        table = manifest.model_dump(mode="json")
        write_json(self.place / MANIFEST, {"sha256": digest(table), **table})


class UniversalCheckpoint:
    """A universal checkpoint, opened: what training reads, box by box.

    Raises:
        CheckpointError: there is none, or it is of a newer version.
        CorruptError: manifest or job file are damaged, or a file is truncated or missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        table = _read(self.path / MANIFEST)
        if table.get("format") != "shoal-universal":
            raise CheckpointError(f"{self.path / MANIFEST}: not a universal checkpoint of Shoal")
        if isinstance(table.get("version"), int) and table["version"] > VERSION:
            raise CheckpointError(
                f"{self.path}: written in version {table['version']} of the format; this Shoal "
                f"reads up to {VERSION}; install a newer one"
            )
        if table.pop("sha256", None) != digest(table):
            raise CorruptError(
                f"{self.path / MANIFEST}: its contents have changed since it was written (SHA-256 "
                "differs); convert the source again"
            )
        self.manifest = parse(Manifest, table, where=str(self.path / MANIFEST))
        job = self.path / JOB
        self.meta: dict[str, Any] = _read(job)
        if hashlib.sha256(job.read_bytes()).hexdigest() != self.manifest.job:
            raise CorruptError(
                f"{job}: its contents have changed since it was written (SHA-256 differs); "
                f"convert the "
                "source again"
            )
        self._verified: set[tuple[str, str, int]] = set()
        self._maps: dict[tuple[str, str], np.ndarray] = {}
        for name, parameter in self.manifest.parameters.items():
            for key, stored in parameter.tensors.items():
                self._check_size(name, key, parameter, stored)

    @property
    def step(self) -> int:
        """Steps done when it was saved."""
        return self.manifest.step

    def names(self) -> list[str]:
        """``model.NAME`` of every weight, and ``optimizer.NAME.KEY`` of its state."""
        names = []
        for name in [*self.manifest.parameters, *self.manifest.tied]:
            parameter = self.manifest.parameters[self._kept(name)]
            names.append(MODEL + name)
            others = [key for key in parameter.tensors if key != FP32]
            names += [f"{OPTIMIZER}{name}.{key}" for key in [*others, *parameter.scalars]]
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        parameter, key = self._find(name)
        return () if key in parameter.scalars else parameter.shape

    def dtype(self, name: str) -> str:
        """Everything is fp32."""
        self._find(name)
        return "F32"

    def where(self, name: str) -> str:
        """The file of a tensor."""
        parameter, key = self._find(name)
        if key in parameter.scalars:
            return MANIFEST
        return f"{FOLDER}/{self._kept(_split(name)[0])}/{key}.safetensors"

    def tensor(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """A box of a tensor, a new one; all of it if no box is given.

        Raises:
            CheckpointError: no such tensor, or the box is not inside it.
            CorruptError: bytes that are not those that were written.
        """
        import torch

        parameter, key = self._find(name)
        if key in parameter.scalars:
            return torch.tensor(parameter.scalars[key], dtype=torch.float32)
        whole = parameter.shape
        box = box_of(self.path, name, whole, offset, shape)
        kept = self._kept(_split(name)[0])
        stored = parameter.tensors[key]
        self._verify_box(kept, key, stored, whole, box)
        elements = self._map(kept, key)[stored.header :].view("<f4").reshape(whole)
        return torch.from_numpy(elements[box.slices(Box.whole(whole))].copy())

    def problems(self) -> Iterator[str]:
        """Every file that has changed since it was written."""
        for name, parameter in self.manifest.parameters.items():
            for key, stored in parameter.tensors.items():
                try:
                    self._verify(name, key, stored, 0, stored.bytes)
                except CorruptError as cause:
                    yield str(cause)

    def verify(self) -> None:
        """Hash every file now.

        Raises:
            CorruptError: the first that has changed since it was written.
        """
        for problem in self.problems():
            raise CorruptError(problem)

    def require_model(self, expected: Mapping[str, Any]) -> None:
        """Refuse a checkpoint of another model than ``expected``.

        Raises:
            CheckpointError: names the fields that differ.
        """
        require_model(self.path, self.meta, expected)

    def _kept(self, name: str) -> str:
        return self.manifest.tied.get(name, name)

    def _find(self, name: str) -> tuple[AtomicParameter, str]:
        own, key = _split(name)
        parameter = self.manifest.parameters.get(self._kept(own))
        if parameter is None or not (key in parameter.tensors or key in parameter.scalars):
            raise CheckpointError(no_tensor(self.path, name, self.names()))
        return parameter, key

    def _file(self, name: str, key: str) -> Path:
        return self.path / FOLDER / name / f"{key}.safetensors"

    def _check_size(
        self, name: str, key: str, parameter: AtomicParameter, stored: AtomicTensor
    ) -> None:
        file = self._file(name, key)
        try:
            size = file.stat().st_size
        except OSError as cause:
            raise CorruptError(f"{file}: {key} of {name} is missing ({cause.strerror})") from cause
        elements = 4 * math.prod(parameter.shape)
        if size != stored.bytes or stored.header + elements != stored.bytes:
            raise CorruptError(
                f"{file}: truncated: {size} bytes where {stored.bytes} were written of {key} of "
                f"{name}; convert the source again"
            )

    def _map(self, name: str, key: str) -> np.ndarray:
        import numpy as np

        if (name, key) not in self._maps:
            self._maps[name, key] = np.memmap(self._file(name, key), dtype=np.uint8, mode="r")
        return self._maps[name, key]

    def _verify_box(
        self, name: str, key: str, stored: AtomicTensor, whole: tuple[int, ...], box: Box
    ) -> None:
        """Hash the blocks between the first and the last element of a box."""
        first = last = 0
        for size, low, extent in zip(whole, box.offset, box.shape, strict=True):
            first = first * size + low
            last = last * size + low + max(extent, 1) - 1
        begin = stored.header + 4 * first
        self._verify(name, key, stored, begin, stored.header + 4 * (last + 1))

    def _verify(self, name: str, key: str, stored: AtomicTensor, begin: int, end: int) -> None:
        block = self.manifest.block
        raw = self._map(name, key)
        for number in range(begin // block, -(-min(end, stored.bytes) // block)):
            if (name, key, number) in self._verified:
                continue
            result = hashlib.sha256(raw[number * block : (number + 1) * block].data).hexdigest()
            if number >= len(stored.blocks) or result != stored.blocks[number]:
                raise CorruptError(
                    f"{self._file(name, key)}: {key} of {name} has changed since it was written "
                    f"(SHA-256 "
                    "differs); convert the source again"
                )
            self._verified.add((name, key, number))


def _split(name: str) -> tuple[str, str]:
    """Parameter and key of a tensor's name."""
    if name.startswith(OPTIMIZER):
        own, _, key = name.removeprefix(OPTIMIZER).rpartition(".")
        return own, key
    return name.removeprefix(MODEL), FP32


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CorruptError(f"{path}: larger than {_MAX_BYTES} bytes, too large for an index")
        data = json.loads(path.read_bytes())
    except FileNotFoundError as cause:
        raise CheckpointError(
            f"{path}: missing; this is no universal checkpoint; make one with shoal model convert "
            "SOURCE DIR --to universal"
        ) from cause
    except OSError as cause:
        raise CheckpointError(f"{path}: cannot be read ({cause.strerror or cause})") from cause
    except (ValueError, RecursionError) as cause:
        raise CorruptError(f"{path}: not JSON ({type(cause).__name__}); it is damaged") from cause
    if not isinstance(data, dict):
        raise CorruptError(f"{path}: expected a mapping, found {type(data).__name__}")
    return data
