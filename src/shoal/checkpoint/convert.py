"""The weights of a checkpoint or a model directory, written in another format or dtype."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shoal.checkpoint.common import model_entry
from shoal.checkpoint.inspect import find, opened
from shoal.checkpoint.pieces import DTYPES
from shoal.checkpoint.remote import is_address
from shoal.checkpoint.store import MODEL, Store
from shoal.core.config import parse
from shoal.core.errors import CheckpointError, ModelError, ShoalError, require

if TYPE_CHECKING:
    import torch

    from shoal.checkpoint.saved_checkpoint import SavedCheckpoint
    from shoal.ir import Architecture
    from shoal.model.transformer import Transformer


def convert(
    path: Path | str,
    out: Path | str,
    *,
    to: Literal["huggingface", "checkpoint"] = "huggingface",
    dtype: str | None = None,
    step: int | None = None,
    tokenizer: Path | None = None,
    architecture: Architecture | None = None,
) -> Path | str:
    """Write the weights of ``path`` in another format, dtype or architecture.

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
        architecture: what the model becomes; weights that it has not are drawn.

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
    remade = architecture is not None and bool(architecture.name)
    if to == "checkpoint" and place.kind in ("checkpoint", "run") and not remade:
        return _rewrite(opened(place, step), out, cast)

    from shoal.model import huggingface
    from shoal.model.architecture import rebuilt

    if place.kind in ("huggingface", "gguf"):
        model = huggingface.read(Path(place.path), cast, packed=False)
    else:
        model = load_model(opened(place, step))
        if cast is not None:
            model = model.to(cast)
    if architecture is not None and remade:
        model = rebuilt(model, architecture, meant=True)
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


def export(saved: SavedCheckpoint, out: Path, *, tokenizer: Path | None = None) -> None:
    """Write the model of a checkpoint, wherever it lies, for Hugging Face.

    Raises:
        CheckpointError: it holds no model, or is damaged.
    """
    from shoal.model import huggingface

    huggingface.write(out, load_model(saved), tokenizer)


def load_model(saved: SavedCheckpoint) -> Transformer:
    """The model that a checkpoint holds, each weight in its stored dtype.

    Raises:
        CheckpointError: it names no model, or its weights are not those of that model.
        CorruptError: a tensor differs from what was written.
    """
    import torch

    from shoal.model.config import ModelConfig
    from shoal.model.initialise import empty

    raw = model_entry(saved.path, saved.meta)
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


def _rewrite(saved: SavedCheckpoint, out: Path | str, cast: torch.dtype | None) -> Path | str:
    tensors = {name: saved.tensor(name) for name in saved.names()}
    if cast is not None:
        tensors = {
            name: tensor.to(cast) if name.startswith(MODEL) else tensor
            for name, tensor in tensors.items()
        }
    Store(out).save(saved.step, tensors, saved.meta)
    return written(out, saved.step)
