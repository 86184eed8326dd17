"""Files of indexes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError
from shoal.core.extras import import_extra
from shoal.core.files import write_atomic
from shoal.fields.retrieve.index.protocols import Metric


def save_vectors(directory: Path, vectors: np.ndarray, metric: Metric, **more: np.ndarray) -> str:
    """Write ``index.safetensors``; its name.

    Args:
        directory: where.
        vectors: float32 [N, d].
        metric: goes into the file's metadata.
        more: other arrays.
    """
    numpy: Any = import_extra("safetensors.numpy", extra="run", purpose="a file of an index")
    arrays = {"vectors": vectors, **more}
    text = numpy.save(
        {name: np.ascontiguousarray(one) for name, one in arrays.items()}, {"metric": metric}
    )
    write_atomic(directory / "index.safetensors", text)
    return "index.safetensors"


def load_vectors(directory: Path) -> np.ndarray:
    """The vectors of ``index.safetensors``, float32 [N, d].

    Raises:
        DataError: the file is missing or damaged.
    """
    safe: Any = import_extra("safetensors", extra="run", purpose="a file of an index")
    path = directory / "index.safetensors"
    try:
        with safe.safe_open(path, "np") as file:
            vectors: np.ndarray = file.get_tensor("vectors")
    except (OSError, KeyError, ValueError, safe.SafetensorError) as cause:
        raise DataError(f"{path}: cannot be read ({cause}); build the index again") from cause
    if vectors.dtype != np.float32 or vectors.ndim != 2:
        raise DataError(f"{path}: {vectors.dtype} {list(vectors.shape)}; expected float32 [N, d]")
    return vectors
