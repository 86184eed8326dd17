"""What lies in a checkpoint or a model directory: listing, verifying, converting.

Three kinds of directory are understood: one checkpoint (``step-00000100``), a run or
store that holds several, and a Hugging Face model directory; and one kind of file, GGUF. No
weights are loaded to list them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.checkpoint.index import INDEX_NAME
from shoal.checkpoint.saved import Saved
from shoal.checkpoint.store import MODEL, Store
from shoal.core.config import Value, parse
from shoal.core.errors import CheckpointError, ModelError, ShoalError, require
from shoal.core.safetensors_header import ITEM_BYTES, read_header

if TYPE_CHECKING:
    import torch

    from shoal.model.transformer import Transformer

__all__ = ["DTYPES", "Place", "Row", "Verification", "convert", "find", "listing", "verify"]

# What weights can be converted to: the product's spelling -> torch's.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_MAX_JSON_BYTES = 2**28


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
        path: where the weights are: a step, a store of steps, a model directory or file.
        steps: saved steps of a store, oldest first.
        tokenizer: the tokenizer that belongs to it, if there is one beside.
    """

    kind: Literal["checkpoint", "run", "huggingface", "gguf"]
    path: Path
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

    path: Path
    kind: str
    checked: str
    tensors: int
    bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def find(path: Path) -> Place:
    """Say what kind of directory ``path`` is.

    Raises:
        ModelError: it holds no weights in a format that is read.
    """
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


def listing(path: Path) -> list[Row]:
    """The tensors of ``path``; of a run, those of its newest step.

    Raises:
        ModelError: no weights, or files that do not agree with their index.
        CheckpointError: a checkpoint whose index or headers are damaged.
    """
    place = find(path)
    if place.kind == "huggingface":
        return _huggingface_rows(place.path)
    if place.kind == "gguf":
        return _gguf_rows(place.path)
    saved = _saved(place, None, verify=False)
    return [_checkpoint_row(saved, name) for name in saved.names()]


def verify(path: Path) -> Verification:
    """Look for damage in ``path``; of a run, in every step.

    A damaged file is a finding here and not an error.

    Raises:
        ModelError: ``path`` holds no weights at all.
    """
    place = find(path)
    rows: list[Row] = []
    problems: list[str] = []
    if place.kind == "huggingface":
        checked = "headers, sizes, shards and names (the format has no checksums)"
        try:
            rows = _huggingface_rows(place.path)
            _read_json(place.path / "config.json")
        except ShoalError as cause:
            problems.append(str(cause))
    elif place.kind == "gguf":
        checked = "header, sizes and places (the format has no checksums)"
        try:
            rows = _gguf_rows(place.path)
        except ShoalError as cause:
            problems.append(str(cause))
    else:
        checked = "the checksums of every tensor, header and index"
        store = Store(place.path)
        folders = [store.folder(step) for step in place.steps] or [place.path]
        for folder in folders:
            try:
                saved = Saved(folder)
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
    path: Path,
    out: Path,
    *,
    to: Literal["huggingface", "checkpoint"] = "huggingface",
    dtype: str | None = None,
    step: int | None = None,
    tokenizer: Path | None = None,
) -> Path:
    """Write the weights of ``path`` in another format or dtype.

    A checkpoint that is converted to a checkpoint becomes one file and keeps its
    optimizer state and meta; a model directory becomes a checkpoint of step 0.

    Args:
        path: a checkpoint, a run (its newest step is taken), a Hugging Face directory, whose
            weights of few bits become plain ones, or a GGUF file.
        out: directory to create; a store of checkpoints for ``to="checkpoint"``.
        to: format to write.
        dtype: cast weights to fp32, bf16 or fp16; as stored if not given.
        step: which step of a run.
        tokenizer: ``tokenizer.json`` to put beside a model; the source's if not given.

    Returns:
        The directory that was written.

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
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out}: exists already; choose another name or remove it first")
    cast: torch.dtype | None = getattr(torch, DTYPES[dtype]) if dtype else None
    if to == "checkpoint" and place.kind in ("checkpoint", "run"):
        return _rewrite(_saved(place, step), out, cast)

    from shoal.model import huggingface

    if place.kind in ("huggingface", "gguf"):
        model = huggingface.read(place.path, cast, packed=False)
    else:
        model = load_model(_saved(place, step))
        if cast is not None:
            model = model.to(cast)
    if to == "checkpoint":
        weights: dict[str, Any] = {MODEL + name: p for name, p in model.named_parameters()}
        store = Store(out)
        store.save(0, weights, {"model": model.config.model_dump(mode="json")})
        return out / "step-00000000"
    if out.exists():
        out.rmdir()  # it is empty, and the writer wants to create it
    huggingface.write(out, model, tokenizer or place.tokenizer)
    return out


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


def _saved(place: Place, step: int | None, *, verify: bool = True) -> Saved:
    if place.kind == "run":
        chosen = place.steps[-1] if step is None else step
        return Store(place.path).open(chosen, verify=verify)
    saved = Saved(place.path)
    if step not in (None, saved.step):
        raise CheckpointError(f"{place.path}: holds step {saved.step}, not {step}")
    if verify:
        saved.verify()
    return saved


def _rewrite(saved: Saved, out: Path, cast: torch.dtype | None) -> Path:
    tensors = {name: saved.tensor(name) for name in saved.names()}
    if cast is not None:
        tensors = {
            name: tensor.to(cast) if name.startswith(MODEL) else tensor
            for name, tensor in tensors.items()
        }
    Store(out).save(saved.step, tensors, saved.meta)
    return out / f"step-{saved.step:08d}"


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
