"""One copy of a frozen base for all fine-tuning jobs of a host.

The first job writes an *image* of the model's weights, as training keeps them, beside the other
caches. Every job maps that file: its pages are in memory once, however many processes read them,
and are evicted when memory is short. The mapping is copied on writing, page by page, so a job that
changes a weight after all changes its own copy, and the file stays what it was.

Source: Han et al., Parameter-Efficient Fine-Tuning for Large Models: A Comprehensive Survey, 2024,
section 5 (one backbone for many jobs).
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.core.errors import ModelError, StoreError
from shoal.core.files import locked, shoal_home, write_dir_atomic
from shoal.core.safetensors_header import encode_header, read_header
from shoal.model import huggingface
from shoal.model.initialise import empty

if TYPE_CHECKING:
    from shoal.model.config import ModelConfig
    from shoal.model.transformer import Transformer

# Goes up when an image is written in another way.
_VERSION = 1
# s that writing an image, by another process, may take.
_LOCK_S = 3600.0
_FILE = "model.safetensors"


class SharedWeights:
    """The fp32 weights of a Hugging Face directory, in memory that other jobs have too.

    Raises:
        ModelError: it cannot be read.
        StoreError: the image cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self.config: ModelConfig = huggingface.read_config(directory)
        self.image = image_of(directory)

    def model(self) -> Transformer:
        """The whole model, ready to train."""
        model = empty(self.config)
        for name, tensor in _mapped(self.image).items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))
        return model.train()

    def whole(self, name: str) -> Tensor:
        """One whole parameter."""
        return _mapped(self.image)[name]


def _mapped(path: Path, *, writes: bool = False) -> dict[str, Tensor]:
    """The tensors of an image; what is written to them reaches the file only if it says so."""
    header = read_header(path)
    file = os.open(path, os.O_RDWR if writes else os.O_RDONLY)
    try:
        memory = mmap.mmap(file, 0, access=mmap.ACCESS_WRITE if writes else mmap.ACCESS_COPY)
    finally:
        os.close(file)
    result = {}
    for name, stored in header.tensors.items():
        flat = torch.frombuffer(
            memory, dtype=torch.float32, count=stored.num_bytes // 4, offset=stored.start
        )
        result[name] = flat.view(stored.shape)
    return result


def image_of(directory: Path) -> Path:
    """The image of a model directory, written if there is none of its files as they are.

    Raises:
        ModelError: the directory cannot be read.
        StoreError: the image cannot be written.
    """
    place = shoal_home() / "bases"
    whose = hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:8]
    files = sorted(path for path in directory.iterdir() if path.suffix in (".json", ".safetensors"))
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    state = hashlib.sha256(json.dumps([_VERSION, stats]).encode()).hexdigest()[:16]
    path = place / f"{directory.name}-{whose}-{state}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        lock = place / f"{directory.name}-{whose}.lock"
        with locked(lock, lambda: None, error=StoreError, limit_s=_LOCK_S):
            if not path.is_dir():
                with write_dir_atomic(path, error=StoreError) as begun:
                    _write(begun / _FILE, directory)
                # Who maps an older image keeps its pages until it ends.
                for older in place.glob(f"{directory.name}-{whose}-*"):
                    if older != path:
                        shutil.rmtree(older)
    except (OSError, StoreError) as cause:
        raise StoreError(
            f"the image of the base: {cause}; give base = own, or set SHOAL_HOME to a directory "
            "with room for four bytes a parameter"
        ) from cause
    return path / _FILE


def _write(path: Path, directory: Path) -> None:
    """Read the weights straight into the file: this process needs no memory for them."""
    config = huggingface.read_config(directory)
    shapes = {name: tuple(p.shape) for name, p in empty(config).named_parameters()}
    header = encode_header({name: ("F32", shape) for name, shape in shapes.items()})
    size = len(header) + 4 * sum(math.prod(shape) for shape in shapes.values())
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(file, header)
        # Room that was promised: a full disk must not be met while pages are written.
        os.posix_fallocate(file, 0, size)
    finally:
        os.close(file)
    room = _mapped(path, writes=True)
    made = huggingface.read(directory, torch.float32, packed=False, room=room)
    odd = room.keys() ^ dict(made.named_parameters()).keys()
    if odd:
        raise ModelError(f"{directory}: {min(odd)} is no weight that can be shared")
    path.chmod(path.stat().st_mode & 0o444)  # read only, for whom the umask lets read
