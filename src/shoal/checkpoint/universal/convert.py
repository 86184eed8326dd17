"""From what ranks dumped, or from any readable checkpoint, to the universal form.

Nothing of this happens while saving: it is done when another split is asked for, once, and
kept beside the source. What is made appears by a rename; a second conversion of the same files
with the same spec finds it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shoal.checkpoint.store import MODEL, OPTIMIZER
from shoal.checkpoint.universal.atomic import MANIFEST, UniversalCheckpoint, UniversalWriter
from shoal.checkpoint.universal.extract import ExtractedFragments, extract
from shoal.checkpoint.universal.protocols import FP32, RankDumps
from shoal.checkpoint.universal.spec import UniversalSpec
from shoal.checkpoint.universal.union import union
from shoal.core.errors import CheckpointError, ShoalError
from shoal.core.files import write_dir_atomic

if TYPE_CHECKING:
    from torch import Tensor


class ReadableCheckpoint(Protocol):
    """A checkpoint of whole tensors, of any format."""

    @property
    def path(self) -> Path | str:
        """Where it lies."""

    @property
    def meta(self) -> Mapping[str, Any]:
        """What is kept beside the tensors."""

    @property
    def step(self) -> int:
        """Steps done when it was saved."""

    def names(self) -> Collection[str]:
        """``model.NAME`` and ``optimizer.NAME.KEY``."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Whole shape of a tensor."""

    def tensor(
        self,
        name: str,
        offset: tuple[int, ...] | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """A box of a tensor; all of it if no box is given."""


def beside(path: Path) -> Path:
    """Where the universal form of a source is kept."""
    return path.with_name(f"{path.name}.universal")


def consolidate(
    source: RankDumps,
    out: Path | None = None,
    *,
    spec: UniversalSpec | None = None,
    workers: int = 0,
) -> Path:
    """Put together what ranks dumped.

    Args:
        source: the rank files.
        out: directory to make; beside the source if not given, where an earlier result serves
            again while the files are the same.
        spec: how fragments combine; the source's own if not given.
        workers: files, and then parameters, at a time; as many as there are cores up to four.

    Returns:
        The directory.

    Raises:
        CheckpointError: a rank file is missing, a name has no pattern, or fragments do not fit.
        CorruptError: a rank file is damaged.
    """
    chosen = spec or source.spec()
    if chosen is None:
        raise CheckpointError(
            f"{source.path}: does not say how its fragments combine; give a spec, a YAML file of "
            "patterns, with --spec"
        )
    place = out or beside(source.path)
    made_of = _fingerprint(source, chosen)
    if place.exists():
        if _made_of(place) == made_of:
            return place
        if out is not None:
            raise CheckpointError(f"{out}: exists already; choose another name or remove it first")
        shutil.rmtree(place)
    try:
        return _make(source, place, chosen, made_of, workers)
    except CheckpointError:
        # Another process has put together the same files in the meantime.
        if place.exists() and _made_of(place) == made_of:
            return place
        raise


def _make(
    source: RankDumps, place: Path, chosen: UniversalSpec, made_of: dict[str, Any], workers: int
) -> Path:
    """Extract, union, and the manifest."""
    number = workers or min(4, os.cpu_count() or 1)
    with write_dir_atomic(place, error=CheckpointError) as folder:
        fragments = folder / "fragments"
        fragments.mkdir()
        result = extract(source.files(), fragments, workers=number)
        chosen.check(result.fragments)
        writer = UniversalWriter(folder)
        with ThreadPoolExecutor(max_workers=number) as pool:
            list(
                pool.map(
                    lambda name: _whole(writer, source, chosen, result, name),
                    [name for name in result.fragments if name not in chosen.tied],
                )
            )
        for second in [name for name in chosen.tied if name in result.fragments]:
            _same(source, chosen, result, second)
        shutil.rmtree(fragments)
        meta = {**source.meta, "layout": source.layout.model_dump()}
        writer.finish(int(source.meta.get("step", 0)), meta, tied=chosen.tied, source=made_of)
    return place


def rewrite(source: ReadableCheckpoint, out: Path) -> Path:
    """The universal form of a checkpoint whose tensors can be read whole.

    Raises:
        CheckpointError: ``out`` exists, or a tensor cannot be held.
        CorruptError: the source is damaged.
    """
    names = list(source.names())
    weights = [name.removeprefix(MODEL) for name in names if name.startswith(MODEL)]
    with write_dir_atomic(out, error=CheckpointError) as folder:
        writer = UniversalWriter(folder)
        for name in weights:
            writer.add(name, FP32, _fp32(source, MODEL + name))
        for entry in names:
            if not entry.startswith(OPTIMIZER):
                continue
            name, _, key = entry.removeprefix(OPTIMIZER).rpartition(".")
            if name not in weights:
                raise CheckpointError(
                    f"{source.path}: {entry} is optimizer state of no parameter; a universal "
                    "checkpoint holds what belongs to one"
                )
            if source.shape(entry) == ():
                writer.scalar(name, key, float(source.tensor(entry)))
            else:
                writer.add(name, key, _fp32(source, entry))
        writer.finish(source.step, dict(source.meta))
    return out


def _fp32(source: ReadableCheckpoint, name: str) -> Tensor:
    import torch

    tensor = source.tensor(name)
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(
            f"{source.path}: {name} is of {str(tensor.dtype).removeprefix('torch.')}, and a "
            "universal checkpoint holds fp32; convert it to fp32, bf16 or fp16 first"
        )
    return tensor


def _whole(
    writer: UniversalWriter,
    source: RankDumps,
    spec: UniversalSpec,
    found: ExtractedFragments,
    name: str,
) -> None:
    """Every tensor of one parameter."""
    pattern = spec.pattern(name)
    tensors = found.fragments[name]
    if FP32 not in tensors:
        raise CheckpointError(
            f"{source.path}: there is {', '.join(tensors)} of {name} and no weight; its rank files "
            "are incomplete"
        )
    for key in sorted(tensors, key=lambda key: key != FP32):  # the weight first: its shape counts
        writer.add(name, key, union(name, key, tensors[key], pattern, source.layout))
    for key, value in found.scalars.get(name, {}).items():
        writer.scalar(name, key, value)


def _same(source: RankDumps, spec: UniversalSpec, found: ExtractedFragments, second: str) -> None:
    """Compare what is tied, of which the first is kept.

    Raises:
        CheckpointError: they differ.
    """
    first = spec.tied[second]
    pattern = spec.pattern(first)
    for key, fragments in found.fragments[second].items():
        one = union(first, key, found.fragments[first][key], pattern, source.layout)
        two = union(second, key, fragments, pattern, source.layout)
        if one.shape != two.shape or not bool((one == two).all()):
            apart = float((one - two).abs().max()) if one.shape == two.shape else float("inf")
            raise CheckpointError(
                f"tied({first}, {second}): {key} differs by up to {apart:.3g}, so they are not the "
                "same tensor; remove the tie, or the ranks are of different steps"
            )


def _fingerprint(source: RankDumps, spec: UniversalSpec) -> dict[str, Any]:
    files = {}
    for file in source.files():
        state = file.path.stat()
        name = str(file.path.relative_to(source.path))
        files[name] = [state.st_size, state.st_mtime_ns]
    return {
        "files": files,
        "layout": source.layout.model_dump(),
        "spec": hashlib.sha256(spec.text().encode()).hexdigest(),
    }


def _made_of(place: Path) -> dict[str, Any] | None:
    """What an earlier result was made of; None if it is no whole one."""
    if not (place / MANIFEST).is_file():
        return None
    try:
        return UniversalCheckpoint(place).manifest.source
    except ShoalError:
        return None
