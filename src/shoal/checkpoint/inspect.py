"""What lies in a checkpoint or a model directory: listing, verifying, converting.

Understood are one checkpoint (``step-00000100``), a run or store that holds several, here or at an
address such as ``s3://bucket/run``, a Hugging Face model directory, GGUF files, and the
directories of :mod:`shoal.checkpoint.formats`. No weights are loaded to list them.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.checkpoint.formats import FORMATS
from shoal.checkpoint.index import INDEX_NAME
from shoal.checkpoint.remote import is_address
from shoal.checkpoint.saved import Saved
from shoal.checkpoint.store import MODEL, Store
from shoal.core.config import Value, parse
from shoal.core.errors import CheckpointError, ModelError, ShoalError, require
from shoal.core.safetensors_header import ITEM_BYTES, read_header

if TYPE_CHECKING:
    import torch

    from shoal.checkpoint.formats.protocols import Contents
    from shoal.model.transformer import Transformer

__all__ = [
    "DTYPES",
    "FOREIGN",
    "Place",
    "Row",
    "Verification",
    "convert",
    "export",
    "find",
    "listing",
    "require_new",
    "verify",
    "written",
]

# Formats that are neither ours nor Hugging Face's.
FOREIGN = ("universal", "dcp", "deepspeed", "megatron")

# What weights can be converted to: the product's spelling -> torch's.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_JSON_BYTES = 2**28
_STEP = re.compile(r"step-(\d{8,})(?:\.|$)")


class Row(Value):
    """One tensor as stored.

    Args:
        name: its name.
        dtype: the file format's name, such as ``BF16``.
        shape: its whole shape.
        bytes: of the whole tensor.
        file: where it lies; the first of several files and how many more.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str


class Place(Value):
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
        path: what was verified.
        kind: its kind.
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


def find(path: Path | str) -> Place:
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
        return Place(kind="run", path=address, steps=steps)
    path = Path(path)
    if path.suffix == ".gguf" and path.is_file():
        tokenizer = path.with_name("tokenizer.json")
        return Place(kind="gguf", path=path, tokenizer=tokenizer if tokenizer.exists() else None)
    if not path.is_dir():
        raise ModelError(f"{path}: no such directory; give a checkpoint, a run or a model")
    for store in (path, path / "checkpoints"):
        steps = Store(store).steps()
        if steps:
            beside = store.parent / "tokenizer.json"
            return Place(
                kind="run",
                path=store,
                steps=steps,
                tokenizer=beside if beside.exists() else None,
            )
    beside = path / "tokenizer.json"
    if (path / INDEX_NAME).exists() and path.name.lstrip(".").startswith("step-"):
        beside = path.parent.parent / "tokenizer.json"
        kind = "checkpoint"
    elif (path / _WEIGHTS).exists() or (path / _WEIGHTS_INDEX).exists():
        kind = "huggingface"
    elif (foreign := _foreign(path)) is not None:
        kind = foreign
    else:
        pickles = sorted(p.name for pattern in _PICKLES for p in path.glob(pattern))
        raise ModelError(
            f"{path}: "
            + (
                f"holds {pickles[0]}, a pickle, which can run code when it is read; "
                "convert it to safetensors where you trust it"
                if pickles
                else f"neither a checkpoint, nor a run, nor a model; expected {INDEX_NAME}, "
                f"step-* directories, or {_WEIGHTS}"
            )
        )
    return Place.model_validate(
        {"kind": kind, "path": path, "tokenizer": beside if beside.exists() else None}
    )


def _foreign(path: Path) -> str | None:
    """The format of a directory that is neither ours nor Hugging Face's."""
    return next((name for name in FOREIGN if FORMATS.build(name).holds(path)), None)


def listing(path: Path | str) -> list[Row]:
    """The tensors of ``path``; of a run, those of its newest step.

    What several ranks dumped is put together first, beside them.

    Raises:
        ModelError: no weights, or files that do not agree with their index.
        CheckpointError: a checkpoint whose index or headers are damaged.
    """
    place = find(path)
    here = Path(place.path)
    if place.kind == "huggingface":
        return _huggingface_rows(here)
    if place.kind == "gguf":
        return _gguf_rows(here)
    if place.kind in FOREIGN:
        return _contents_rows(FORMATS.build(place.kind).open(here))
    saved = _saved(place, None, verify=False)
    return [_checkpoint_row(saved, name) for name in saved.names()]


def verify(path: Path | str) -> Verification:
    """Look for damage in ``path``; of a run, in every step.

    A damaged file is a finding here and not an error.

    Raises:
        ModelError: ``path`` holds no weights at all.
    """
    place = find(path)
    here = Path(place.path)
    rows: list[Row] = []
    problems: list[str] = []
    if place.kind == "huggingface":
        checked = "headers, sizes, shards and names (the format has no checksums)"
        try:
            rows = _huggingface_rows(here)
            _read_json(here / "config.json")
        except ShoalError as cause:
            problems.append(str(cause))
    elif place.kind == "gguf":
        checked = "header, sizes and places (the format has no checksums)"
        try:
            rows = _gguf_rows(here)
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
                rows = _contents_rows(form.open(here))
        except ShoalError as cause:
            problems.append(str(cause))
    else:
        checked = "the checksums of every tensor, header and index"
        store = Store(place.path)
        for step in place.steps or (None,):
            try:
                saved = Saved(here) if step is None else store.open(step, verify=False)
            except CheckpointError as cause:
                problems.append(str(cause))
                continue
            rows += [_checkpoint_row(saved, name) for name in saved.names()]
            problems += saved.problems()
    return Verification(
        path=place.path,
        kind=place.kind,
        checked=checked,
        tensors=len(rows),
        bytes=sum(row.bytes for row in rows),
        problems=tuple(problems),
    )


def convert(
    path: Path | str,
    out: Path | str,
    *,
    to: Literal["huggingface", "checkpoint"] = "huggingface",
    dtype: str | None = None,
    step: int | None = None,
    tokenizer: Path | None = None,
) -> Path | str:
    """Write the weights of ``path`` in another format or dtype.

    A checkpoint that is converted to a checkpoint becomes one file and keeps its
    optimizer state and meta; a model directory becomes a checkpoint of step 0.

    Args:
        path: a checkpoint, a run (its newest step is taken), a Hugging Face directory, whose
            weights of few bits become plain ones, or a GGUF file; or the address of a store.
        out: directory to create; a store of checkpoints for ``to="checkpoint"``, which may be an
            address.
        to: format to write.
        dtype: cast weights to fp32, bf16 or fp16; as stored if not given.
        step: which step of a run.
        tokenizer: ``tokenizer.json`` to put beside a model; the source's if not given.

    Returns:
        The directory, or the store elsewhere, that was written.

    Raises:
        ModelError: ``path`` cannot be read as a model, or ``out`` exists.
        CheckpointError: the checkpoint is damaged or does not hold the model it names.
    """
    import torch

    require(to in ("huggingface", "checkpoint"), "to", to, expected="huggingface or checkpoint")
    require(
        dtype is None or dtype in DTYPES, "dtype", dtype, expected=f"one of {', '.join(DTYPES)}"
    )
    place = find(path)
    require_new(out, elsewhere=to == "checkpoint")
    cast: torch.dtype | None = getattr(torch, DTYPES[dtype]) if dtype else None
    if to == "checkpoint" and place.kind in ("checkpoint", "run"):
        return _rewrite(_saved(place, step), out, cast)

    from shoal.model import huggingface

    if place.kind in ("huggingface", "gguf"):
        model = huggingface.read(Path(place.path), cast, packed=False)
    else:
        model = load_model(_saved(place, step))
        if cast is not None:
            model = model.to(cast)
    if to == "checkpoint":
        weights: dict[str, Any] = {MODEL + name: p for name, p in model.named_parameters()}
        store = Store(out)
        store.save(0, weights, {"model": model.config.model_dump(mode="json")})
        return written(out, 0)
    out = Path(out)
    if out.exists():
        out.rmdir()  # it is empty, and the writer wants to create it
    huggingface.write(out, model, tokenizer or place.tokenizer)
    return out


def require_new(out: Path | str, *, elsewhere: bool, error: type[ShoalError] = ModelError) -> None:
    """Refuse to write where something lies already.

    Args:
        out: directory or address.
        elsewhere: what is written can lie behind an address.
        error: what to raise.

    Raises:
        ShoalError: there is something, or it cannot lie there.
    """
    if is_address(out):
        if not elsewhere:
            raise error(f"{out}: only checkpoints lie at addresses; give a directory")
        if Store(out).steps():
            raise error(f"{out}: holds checkpoints already; choose another address")
        return
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise error(f"{out}: exists already; choose another name or remove it first")


def written(out: Path | str, step: int) -> Path | str:
    """Where a step that was saved in a new store lies."""
    return str(out) if is_address(out) else Path(out) / f"step-{step:08d}"


def export(saved: Saved, out: Path, *, tokenizer: Path | None = None) -> None:
    """Write the model of a checkpoint, wherever it lies, for Hugging Face.

    Args:
        saved: the checkpoint.
        out: directory to create.
        tokenizer: ``tokenizer.json`` to put beside the model.

    Raises:
        CheckpointError: it holds no model, or is damaged.
    """
    from shoal.model import huggingface

    huggingface.write(out, load_model(saved), tokenizer)


def load_model(saved: Saved) -> Transformer:
    """The model that a checkpoint holds, each weight in its stored dtype.

    Raises:
        CheckpointError: it names no model, or its weights are not those of that model.
        CorruptError: a tensor differs from what was written.
    """
    import torch

    from shoal.model.config import ModelConfig
    from shoal.model.initialise import empty

    raw = saved.meta.get("model")
    if not isinstance(raw, dict):
        raise CheckpointError(
            f"{saved.path}: does not say which model it is of; it was not saved by training"
        )
    config = parse(ModelConfig, raw, where=f"{saved.path}: model")
    model = empty(config)  # names and shapes are compared before anything is allocated
    expected = {MODEL + name: p for name, p in model.named_parameters()}
    stored = {name for name in saved.names() if name.startswith(MODEL)}
    strange = sorted(stored ^ set(expected))
    if strange:
        raise CheckpointError(
            f"{saved.path}: tensor {strange[0]!r} is "
            + ("not of the model" if strange[0] in stored else "missing")
            + " that its meta describes; it was saved by another version"
        )
    for name, parameter in expected.items():
        if saved.shape(name) != tuple(parameter.shape):
            raise CheckpointError(
                f"{saved.path}: tensor {name!r} has shape {list(saved.shape(name))} and the model "
                f"that its meta describes needs {list(parameter.shape)}"
            )
    for name in expected:
        owner, _, leaf = name.removeprefix(MODEL).rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(saved.tensor(name)))
    return model


def _contents_rows(contents: Contents) -> list[Row]:
    found = []
    for name in contents.names():
        dtype, shape = contents.dtype(name), contents.shape(name)
        size = ITEM_BYTES[dtype] * math.prod(shape)
        row = {"name": name, "dtype": dtype, "shape": shape, "bytes": size}
        found.append(Row.model_validate({**row, "file": contents.where(name)}))
    return found


def _saved(place: Place, step: int | None, *, verify: bool = True) -> Saved:
    if place.kind == "run":
        chosen = place.steps[-1] if step is None else step
        return Store(place.path).open(chosen, verify=verify)
    saved = Saved(Path(place.path))
    if step not in (None, saved.step):
        raise CheckpointError(f"{place.path}: holds step {saved.step}, not {step}")
    if verify:
        saved.verify()
    return saved


def _rewrite(saved: Saved, out: Path | str, cast: torch.dtype | None) -> Path | str:
    tensors = {name: saved.tensor(name) for name in saved.names()}
    if cast is not None:
        tensors = {
            name: tensor.to(cast) if name.startswith(MODEL) else tensor
            for name, tensor in tensors.items()
        }
    Store(out).save(saved.step, tensors, saved.meta)
    return written(out, saved.step)


def _gguf_rows(path: Path) -> list[Row]:
    from shoal.model.gguf_header import read_header as read_gguf

    return [
        Row(
            name=tensor.name,
            dtype=tensor.kind,
            shape=tensor.shape,
            bytes=tensor.stop - tensor.start,
            file=path.name,
        )
        for tensor in read_gguf(path).tensors.values()
    ]


def _checkpoint_row(saved: Saved, name: str) -> Row:
    tensor = saved.index.tensors[name]
    files = sorted({piece.file for piece in tensor.pieces})
    size = ITEM_BYTES[tensor.dtype]
    for extent in tensor.shape:
        size *= extent
    return Row(
        name=name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        bytes=size,
        file=files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else ""),
    )


def _huggingface_rows(path: Path) -> list[Row]:
    index = path / _WEIGHTS_INDEX
    owners: dict[str, str] | None = None
    files = [_WEIGHTS]
    if index.exists():
        owners = _weight_map(index)
        files = sorted(set(owners.values()))
    rows: list[Row] = []
    for file in files:
        if not (path / file).exists():
            raise ModelError(f"{path / file}: a missing shard, which {index.name} names; fetch it")
        header = read_header(path / file)
        rows += [
            Row(name=t.name, dtype=t.dtype, shape=t.shape, bytes=t.num_bytes, file=file)
            for t in header.tensors.values()
        ]
    if owners is not None:
        held = {row.name: row.file for row in rows}
        for name in sorted(held.keys() | owners.keys()):
            if held.get(name) != owners.get(name):
                raise ModelError(
                    f"{index}: says that tensor {name!r} is in {owners.get(name, 'no file')}, and "
                    f"it is in {held.get(name, 'no file')}; fetch index and shards again"
                )
    return rows


def _weight_map(index: Path) -> dict[str, str]:
    found = _read_json(index).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelError(f"{index}: has no weight_map; fetch it again")
    for name, file in found.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(
                f"{index}: tensor {name!r} is said to be in {file!r}, which is no file name"
            )
    return found


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelError(f"{path}: larger than {_MAX_JSON_BYTES} bytes; that is no JSON index")
        found = json.loads(path.read_bytes())
    except OSError as cause:
        raise ModelError(f"{path}: cannot be read ({cause.strerror or cause})") from cause
    except (ValueError, RecursionError) as cause:
        raise ModelError(f"{path}: not JSON ({type(cause).__name__}); fetch it again") from cause
    if not isinstance(found, dict):
        raise ModelError(f"{path}: expected a mapping, found {type(found).__name__}")
    return found
