"""What lies in a checkpoint or a model directory: listing and verifying.

Understood are one checkpoint (``step-00000100``), a run or store that holds several, here or at an
address such as ``s3://bucket/run``, a Hugging Face model directory, GGUF files, and the
directories of :mod:`shoal.checkpoint.formats`. No weights are loaded to list them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from shoal.checkpoint.branches import branches, place_of
from shoal.checkpoint.formats import FORMATS
from shoal.checkpoint.index import INDEX_NAME
from shoal.checkpoint.remote import is_address
from shoal.checkpoint.rows import (
    WEIGHTS,
    WEIGHTS_INDEX,
    TensorRow,
    checkpoint_row,
    contents_rows,
    gguf_rows,
    huggingface_rows,
    read_json,
)
from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
from shoal.checkpoint.store import Store
from shoal.core.config import Value
from shoal.core.errors import CheckpointError, ModelError, ShoalError

# Formats that are neither ours nor Hugging Face's.
FOREIGN = ("universal", "dcp", "deepspeed", "megatron")

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_STEP = re.compile(r"step-(\d{8,})(?:\.|$)")


class WeightsLocation(Value):
    """A directory or file that holds weights.

    Args:
        kind: what it is.
        path: where the weights are: a step, a store of steps, a model directory or file; of a
            store that lies elsewhere its address.
        steps: saved steps of a store, oldest first.
        tokenizer: the tokenizer that belongs to it, if there is one beside.
    """

    kind: Literal[
        "checkpoint", "run", "huggingface", "gguf", "universal", "dcp", "deepspeed", "megatron"
    ]
    path: Path | str
    steps: tuple[int, ...] = ()
    tokenizer: Path | None = None


class Verification(Value):
    """What a verification found.

    Args:
        checked: what was compared with what.
        tensors: tensors looked at.
        bytes: their size.
        problems: everything that is wrong, by file and tensor.
    """

    path: Path | str
    kind: str
    checked: str
    tensors: int
    bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def find(path: Path | str) -> WeightsLocation:
    """Say what kind of directory ``path`` is.

    Args:
        path: a directory, a file, or the address of a store or of one of its steps, such as
            ``s3://bucket/run`` and ``s3://bucket/run/step-00000100``.

    Raises:
        ModelError: it holds no weights in a format that is read.
    """
    if is_address(path):
        root, _, last = str(path).rstrip("/").rpartition("/")
        named = _STEP.match(last)
        address = root if named else str(path)
        steps = Store(address).steps()
        if named:
            steps = tuple(one for one in steps if one == int(named[1]))
        if not steps:
            raise ModelError(f"{path}: holds no checkpoint; give the address of a run's store")
        return WeightsLocation(kind="run", path=address, steps=steps)
    path = Path(path)
    if path.suffix == ".gguf" and path.is_file():
        tokenizer = path.with_name("tokenizer.json")
        return WeightsLocation(
            kind="gguf", path=path, tokenizer=tokenizer if tokenizer.exists() else None
        )
    if not path.is_dir():
        raise ModelError(f"{path}: no such directory; give a checkpoint, a run or a model")
    branch = branches(path)[-1].number
    for store in (path, Path(place_of(path / "checkpoints", branch))):
        steps = Store(store).steps()
        if steps:
            beside = path / "tokenizer.json"
            if store == path and not beside.exists():
                beside = path.parent / "tokenizer.json"
            return WeightsLocation(
                kind="run",
                path=store,
                steps=steps,
                tokenizer=beside if beside.exists() else None,
            )
    beside = path / "tokenizer.json"
    if (path / INDEX_NAME).exists() and path.name.lstrip(".").startswith("step-"):
        beside = path.parent.parent / "tokenizer.json"
        kind = "checkpoint"
    elif (path / WEIGHTS).exists() or (path / WEIGHTS_INDEX).exists():
        kind = "huggingface"
    elif (foreign := _foreign(path)) is not None:
        kind = foreign
    else:
        pickles = sorted(p.name for pattern in _PICKLES for p in path.glob(pattern))
        raise ModelError(
            f"{path}: "
            + (
                f"holds {pickles[0]}, a pickle, which can run code when it is loaded; convert it "
                f"to safetensors if you trust it"
                if pickles
                else f"neither a checkpoint, nor a run, nor a model; expected {INDEX_NAME}, "
                f"step-* directories, or {WEIGHTS}"
            )
        )
    return WeightsLocation.model_validate(
        {"kind": kind, "path": path, "tokenizer": beside if beside.exists() else None}
    )


def _foreign(path: Path) -> str | None:
    """The format of a directory that is neither ours nor Hugging Face's."""
    return next((name for name in FOREIGN if FORMATS.build(name).holds(path)), None)


def listing(path: Path | str) -> list[TensorRow]:
    """The tensors of ``path``; of a run, those of its newest step.

    What several ranks dumped is put together first, beside them.

    Raises:
        ModelError: no weights, or files that do not agree with their index.
        CheckpointError: a checkpoint whose index or headers are damaged.
    """
    place = find(path)
    here = Path(place.path)
    if place.kind == "huggingface":
        return huggingface_rows(here)
    if place.kind == "gguf":
        return gguf_rows(here)
    if place.kind in FOREIGN:
        return contents_rows(FORMATS.build(place.kind).open(here))
    saved = opened(place, None, verify=False)
    return [checkpoint_row(saved, name) for name in saved.names()]


def verify(path: Path | str) -> Verification:
    """Look for damage in ``path``; of a run, in every step.

    A damaged file is a finding here and not an error.

    Raises:
        ModelError: ``path`` holds no weights at all.
    """
    place = find(path)
    here = Path(place.path)
    rows: list[TensorRow] = []
    problems: list[str] = []
    if place.kind == "huggingface":
        checked = "headers, sizes, shards and names (the format has no checksums)"
        try:
            rows = huggingface_rows(here)
            read_json(here / "config.json")
        except ShoalError as cause:
            problems.append(str(cause))
    elif place.kind == "gguf":
        checked = "header, sizes and places (the format has no checksums)"
        try:
            rows = gguf_rows(here)
        except ShoalError as cause:
            problems.append(str(cause))
    elif place.kind in FOREIGN:
        own = place.kind == "universal"
        checked = (
            "SHA-256 of every block"
            if own
            else "CRC-32 of every tensor, and that no file is missing"
        )
        form = FORMATS.build(place.kind)
        try:
            problems += form.problems(here)
            if not problems:
                rows = contents_rows(form.open(here))
        except ShoalError as cause:
            problems.append(str(cause))
    else:
        checked = "the checksums of every tensor, header and index"
        store = Store(place.path)
        for step in place.steps or (None,):
            try:
                saved = SavedCheckpoint(here) if step is None else store.open(step, verify=False)
            except CheckpointError as cause:
                problems.append(str(cause))
                continue
            rows += [checkpoint_row(saved, name) for name in saved.names()]
            problems += saved.problems()
    return Verification(
        path=place.path,
        kind=place.kind,
        checked=checked,
        tensors=len(rows),
        bytes=sum(row.bytes for row in rows),
        problems=tuple(problems),
    )


def opened(place: WeightsLocation, step: int | None, *, verify: bool = True) -> SavedCheckpoint:
    """One of our own checkpoints; of a run a step, or its newest.

    Raises:
        CheckpointError: there is no such step, or it is damaged.
    """
    if place.kind == "run":
        chosen = place.steps[-1] if step is None else step
        return Store(place.path).open(chosen, verify=verify)
    saved = SavedCheckpoint(Path(place.path))
    if step not in (None, saved.step):
        raise CheckpointError(f"{place.path}: holds step {saved.step}, not {step}")
    if verify:
        saved.verify()
    return saved


class FilePart(Value):
    """What a file holds.

    Args:
        bytes: of its tensors; of one of our own checkpoints, of the whole file.
        pieces: tensors, or boxes of tensors, in it.
    """

    name: str
    bytes: int
    pieces: int


class DirectorySummary(Value):
    """What a directory holds, at a glance.

    Args:
        path: of the weights.
        steps: saved steps of a run.
        step: which one the rest is about.
        world: ranks that saved it.
        version: of the format of our own checkpoints.
        groups: first part of the names (model, optimizer, ...) -> tensors and bytes.
        meta: what was kept beside the tensors.
    """

    path: Path | str
    kind: str
    steps: tuple[int, ...] = ()
    step: int | None = None
    world: int | None = None
    version: int | None = None
    groups: dict[str, tuple[int, int]]
    files: tuple[FilePart, ...]
    meta: dict[str, Any] = {}

    @property
    def balance(self) -> float | None:
        """Bytes of the largest file over those of the smallest; None for one file."""
        sizes = [file.bytes for file in self.files]
        return max(sizes) / max(1, min(sizes)) if len(sizes) > 1 else None


def summary(path: Path | str, step: int | None = None) -> DirectorySummary:
    """What ``path`` holds; of a run its newest step, or a given one. No weights are loaded.

    Raises:
        ModelError: no weights.
        CheckpointError: there is no such step, or index or headers are damaged.
    """
    place = find(path)
    if place.kind not in ("checkpoint", "run"):
        if step is not None:
            raise CheckpointError(f"{path}: is no run, so it has no steps; leave --step out")
        rows = listing(path)
        files: dict[str, tuple[int, int]] = {}
        for row in rows:
            count, size = files.get(row.file, (0, 0))
            files[row.file] = count + 1, size + row.bytes
        return DirectorySummary(
            path=place.path,
            kind=place.kind,
            groups={"weights": (len(rows), sum(row.bytes for row in rows))},
            files=tuple(
                FilePart(name=name, bytes=size, pieces=count)
                for name, (count, size) in files.items()
            ),
        )
    saved = opened(place, step, verify=False)
    groups: dict[str, tuple[int, int]] = {}
    for name, tensor in saved.index.tensors.items():
        group = name.partition(".")[0]
        count, size = groups.get(group, (0, 0))
        groups[group] = count + 1, size + tensor.bytes
    return DirectorySummary(
        path=saved.path,
        kind=place.kind,
        steps=place.steps,
        step=saved.step,
        world=saved.index.world,
        version=saved.index.version,
        groups=groups,
        files=tuple(
            FilePart(name=name, bytes=file.bytes, pieces=saved.index.count(name))
            for name, file in saved.index.files.items()
        ),
        meta=saved.meta,
    )
