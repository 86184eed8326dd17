"""Extract: the fragments of every parameter, out of the flat buffers of the rank files.

One file at a time (for each worker): it is mapped, its fragments are written as fp32 behind each
other into a file beside, and it is let go. So a state of any size passes through the memory of
one file, and what follows can read any fragment by itself.

Source: Lian et al., Universal Checkpointing, 2024, section 4.2 (Extract).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.checkpoint.universal.protocols import Coord, Fragment, RankFile, Scalar, Shape
from shoal.core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

# Half the elements that are cast to fp32 at a time.
_CHUNK = 2**20


class FragmentFile(NamedTuple):
    """A fragment in a file of fragments.

    Args:
        at: the rank that held it.
        shape: of the local tensor of which it is a run.
        start: its first element in there, or None.
        numel: elements.
        file: where it lies.
        offset: bytes before it.
    """

    at: Coord
    shape: Shape
    start: int | None
    numel: int
    file: Path
    offset: int

    def read(self) -> Tensor:
        """The elements, fp32."""
        import numpy as np
        import torch

        values = np.fromfile(self.file, dtype="<f4", count=self.numel, offset=self.offset)
        return torch.from_numpy(values)


@dataclass
class ExtractedFragments:
    """Every fragment of a step.

    Args:
        fragments: parameter -> tensor of it -> its fragments.
        scalars: parameter -> name -> number.
    """

    fragments: dict[str, dict[str, list[FragmentFile]]] = field(default_factory=dict)
    scalars: dict[str, dict[str, float]] = field(default_factory=dict)


def extract(files: Sequence[RankFile], folder: Path, *, workers: int = 1) -> ExtractedFragments:
    """Take the rank files apart.

    Args:
        files: of all ranks.
        folder: where files of fragments are made; as large as the rank files together.
        workers: files at a time.

    Raises:
        CorruptError: a file is cut or damaged.
        CheckpointError: a file holds more than plain data, or two ranks state other numbers.
    """
    extracted_fragments = ExtractedFragments()
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        numbered = [(file, folder / f"{number:05d}.f32") for number, file in enumerate(files)]
        for fragments, scalars in pool.map(lambda one: _one(*one), numbered):
            for name, key, spilled in fragments:
                extracted_fragments.fragments.setdefault(name, {}).setdefault(key, []).append(
                    spilled
                )
            for name, key, value in scalars:
                known = extracted_fragments.scalars.setdefault(name, {}).setdefault(key, value)
                if known != value:
                    raise CheckpointError(
                        f"{name}: one rank says {key} = {known:g} and another {value:g}; the "
                        "files are of different steps"
                    )
    return extracted_fragments


def _one(file: RankFile, target: Path) -> tuple[list[tuple[str, str, FragmentFile]], list[Scalar]]:
    fragments: list[tuple[str, str, FragmentFile]] = []
    scalars: list[Scalar] = []
    offset = 0
    with target.open("wb") as out:
        for entry in file.contents():
            if isinstance(entry, Scalar):
                scalars.append(entry)
                continue
            _check(file, entry)
            flat = entry.tensor.detach().reshape(-1)
            for start in range(0, flat.numel(), _CHUNK):
                out.write(flat[start : start + _CHUNK].float().contiguous().numpy().data)
            spilled = FragmentFile(entry.at, entry.shape, entry.start, flat.numel(), target, offset)
            fragments.append((entry.name, entry.key, spilled))
            offset += 4 * flat.numel()
    return fragments, scalars


def _check(file: RankFile, entry: Fragment) -> None:
    """Refuse what fp32 cannot hold, and runs that are longer than their tensor."""
    import torch

    dtype = entry.tensor.dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"{file.path}: {entry.key} of {entry.name} is of {str(dtype).removeprefix('torch.')}, "
            "and a universal checkpoint holds fp32; cast it to fp32, bf16 or fp16 first"
        )
    if (entry.start or 0) + entry.tensor.numel() > math.prod(entry.shape):
        raise CheckpointError(
            f"{file.path}: {entry.key} of {entry.name} has elements beyond its shape "
            f"{list(entry.shape)}; its offset table is of another model"
        )
