"""Is this a safetensors file, and is it as long as it claims?

The check itself lies on the ground floor, because checkpoints need it too; this is the
name under which model files are checked. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path

from shoal.core import safetensors_header
from shoal.core.errors import ShoalError
from shoal.core.safetensors_header import StoredTensor as Stored

__all__ = ["Stored", "read_header"]


def read_header(path: Path, *, error: type[ShoalError]) -> dict[str, Stored]:
    """The tensors of a safetensors file, after every claim of its header was checked.

    Args:
        path: the file.
        error: class of the error to raise.

    Raises:
        ShoalError: of class ``error``; the message names file, tensor and fix.
    """
    return safetensors_header.read_header(path, error=error).tensors
