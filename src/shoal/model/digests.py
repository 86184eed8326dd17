"""Digests of stored weights, which differ when the weights differ in a single bit.

Every byte of every tensor is read once. What was computed for a file is kept under
``$SHOAL_HOME/digests`` and holds as long as the file is the same one: by device, inode, size and
the times of its last write and last change. Files of weights carry no digests of their own that
would change with them, so none are believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shoal.core.errors import ModelError, ShoalError
from shoal.core.files import shoal_home, write_json
from shoal.core.safetensors_header import read_header

# hashlib lets other threads run while it works; a disk has no use for more readers.
_THREADS = 4
_CHUNK = 2**24
# A file changed again within one tick of the file system's clock would look the same.
_SETTLED_NS = 2_000_000_000


def tensor_digests(path: Path) -> dict[str, str]:
    """SHA-256 of the type, shape and bytes of each tensor of a safetensors file, in hex.

    Raises:
        ModelError: the file cannot be read, or changes while it is.
    """
    path = path.resolve()
    name = hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    kept = shoal_home() / "digests" / f"{name}.json"
    try:
        before = _identity(path)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            known = json.loads(kept.read_bytes())
            if known["file"] == before:
                return {str(key): str(value) for key, value in known["tensors"].items()}
        tensor_digests = dict(_computed(path))
        after = _identity(path)
    except (OSError, ValueError) as cause:
        raise ModelError(f"{path}: cannot be read ({cause}); fetch it again") from cause
    if after != before:
        raise ModelError(
            f"{path}: changed while it was read; wait until whatever writes it is done"
        )
    if time.time_ns() - before[-1] > _SETTLED_NS:
        # Where nothing can be kept, the file is read anew each time: slower, and as right.
        with contextlib.suppress(ShoalError, OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_json(kept, {"file": before, "tensors": tensor_digests})
    return tensor_digests


def _identity(path: Path) -> list[int]:
    result = path.stat()
    return [result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns, result.st_ctime_ns]


def _computed(path: Path) -> Iterator[tuple[str, str]]:
    header = read_header(path, error=ModelError)
    with path.open("rb") as file:

        def one(name: str) -> str:
            tensor = header.tensors[name]
            digest = hashlib.sha256(f"{tensor.dtype}{list(tensor.shape)}".encode())
            for at in range(tensor.start, tensor.stop, _CHUNK):
                want = min(_CHUNK, tensor.stop - at)
                data = os.pread(file.fileno(), want, at)
                if len(data) != want:
                    raise ModelError(f"{path}: cut while it was read; fetch it again")
                digest.update(data)
            return digest.hexdigest()

        names = sorted(header.tensors)
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            yield from zip(names, pool.map(one, names), strict=True)
