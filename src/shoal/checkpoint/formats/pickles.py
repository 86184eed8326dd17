"""Files of ``torch.save``, opened without running anything in them.

A pickle is a program. Torch's own restricted reader takes tensors and plain data and refuses all
else; a few classes that foreign checkpoints hold are given to it as inert stand-ins. Before that
the archive is held against its own directory, so a cut file says so.
"""

from __future__ import annotations

import io
import json
import pickle
import re
import threading
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.errors import CheckpointError, CorruptError

# Torch keeps its list of allowed classes for the whole process.
_LOCK = threading.Lock()


class Address(NamedTuple):
    """Where a parameter lies in a flat buffer: DeepSpeed's ``fragment_address``."""

    start: int = 0
    numel: int = 0


class Namespace:
    """Arguments of a foreign run: attributes, and nothing else."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def load(path: Path) -> Any:
    """What is in a file of ``torch.save``; its tensors are mapped, not read.

    Raises:
        CorruptError: it is missing, cut or damaged.
        CheckpointError: it holds more than tensors and plain data, which is refused unread.
    """
    _archive(path)
    return read(path, str(path), mmap=True)


def read(source: Path | io.BytesIO, where: str, *, mmap: bool = False) -> Any:
    """The same of an archive that may lie in memory.

    Args:
        source: the archive.
        where: names it in errors.
        mmap: map its tensors.
    """
    import torch

    allowed: list[Any] = [
        (Address, "deepspeed.utils.tensor_fragment.fragment_address"),
        (Namespace, "argparse.Namespace"),
    ]
    try:
        with _LOCK, warnings.catch_warnings(), torch.serialization.safe_globals(allowed):
            # It warns of pickles that torch did not write, and goes on to refuse them.
            warnings.simplefilter("ignore")
            return torch.load(source, map_location="cpu", mmap=mmap or None, weights_only=True)
    except pickle.UnpicklingError as cause:
        raise CheckpointError(
            f"{where}: holds {_named(cause)}, which is neither a tensor nor plain data and could "
            f"run code; it was not executed; save the file again without such objects"
        ) from None
    except (
        RuntimeError,
        EOFError,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        OSError,
    ) as cause:
        raise CorruptError(
            f"{where}: cannot be read ({(str(cause) or type(cause).__name__).splitlines()[0][:120]}"
            "); it is truncated or damaged; copy it again"
        ) from None


def own_description(text: Any, path: Path) -> dict[str, Any]:
    """What we keep of a checkpoint, as JSON, in files of another format; empty where there is none.

    Raises:
        CorruptError: it is not JSON.
    """
    try:
        data = json.loads(text) if isinstance(text, str) else {}
    except ValueError:
        raise CorruptError(f"{path}: its own description is not JSON; it is damaged") from None
    return dict(data) if isinstance(data, dict) else {}


def problems(path: Path) -> Iterator[str]:
    """What is wrong with the bytes of an archive: every entry has a CRC-32."""
    try:
        _archive(path)
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        if bad is not None:
            yield f"{path}: {bad} has changed since it was written (CRC-32 differs)"
    except CorruptError as cause:
        yield str(cause)
    except (zipfile.BadZipFile, OSError, EOFError) as cause:
        yield f"{path}: cannot be read ({cause}); copy it again"


def _archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [
                e.filename for e in archive.infolist() if e.compress_type != zipfile.ZIP_STORED
            ]
    except FileNotFoundError:
        raise CorruptError(f"{path}: missing; copy it again") from None
    except (zipfile.BadZipFile, OSError) as cause:
        raise CorruptError(
            f"{path}: truncated, or no file of torch.save ({cause}); copy it again"
        ) from None
    if packed:
        raise CorruptError(
            f"{path}: {packed[0]} is compressed, which torch.save never does; it may have been "
            f"manipulated; copy it again from its source"
        )


def _named(cause: Exception) -> str:
    """The class that was refused."""
    match = re.search(r"(?:GLOBAL|global) ([\w.]+)", str(cause))
    return match.group(1) if match else "an object of an unknown class"
