"""The directory of a drafter: what it is, whom it drafts for, and what was learned.

::

    DRAFTER/
    ├── drafter.json          kind, options, target, tokenizer, sizes, calibration
    └── drafter.safetensors   the net's tensors

A drafter guesses what one model says with one tokenizer; beside another it is of no use, and it
is refused. Nothing in a directory is ever run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PositiveInt

from shoal.core.config import Value, parse
from shoal.core.errors import ConfigError, ModelError
from shoal.core.files import write_atomic, write_dir_atomic, write_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "drafter.json"
WEIGHTS = "drafter.safetensors"

_MAX_CONFIG = 2**24
# How fingerprints of all bytes begin; older ones looked at 256 rounded values of each tensor.
_WHOLE = "sha256-"
# What a tokenizer makes of a text follows from these keys of its file.
_TELLING = ("model", "added_tokens", "normalizer", "pre_tokenizer")

_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class DrafterConfig(Value):
    """What ``drafter.json`` holds.

    Args:
        name: the kind of drafter, a part of kind ``drafter``.
        target: fingerprint of the target's weights.
        tokenizer: hash of the target's tokenizer; empty where its directory has none.
        calibration: [k][i] = acceptance rate of candidate i of level k on held-out text; level 0 is
            the first draft token.
    """

    name: str
    options: dict[str, Any] = {}
    target: str
    tokenizer: str = ""
    vocab_size: PositiveInt
    hidden: PositiveInt
    calibration: tuple[tuple[_Share, ...], ...] = ()


@dataclass(frozen=True)
class StoredDrafter:
    """A drafter as it lies in a directory.

    Args:
        config: what it is, and whom it is for.
        state: the net's tensors.
    """

    config: DrafterConfig
    state: dict[str, Tensor] = field(repr=False)


def fingerprint(target: Path) -> str:
    """Return what identifies a target: a digest of all bytes of all its tensors.

    How tensors are spread over files, and what a model does not read, is no part of it.

    Raises:
        ModelError: the directory holds no model, or its weights cannot be read.
    """
    from shoal.model import huggingface
    from shoal.model.digests import tensor_digests

    tied = huggingface.read_config(target).tied
    files = huggingface.find_weights(target)
    known = {file: tensor_digests(file) for file in sorted(set(files.values()))}
    digest = hashlib.sha256()
    for name, file in sorted(files.items()):
        if name.endswith("inv_freq") or (tied and name == "lm_head.weight"):
            continue
        if name not in known[file]:
            raise ModelError(f"{file}: {name} is missing, which its index names; fetch it again")
        digest.update(f"{name}\0{known[file][name]}\n".encode())
    return _WHOLE + digest.hexdigest()[:32]


def tokenizer_hash(path: Path) -> str:
    """What identifies a tokenizer; empty where there is none.

    Args:
        path: a ``tokenizer.json``, or a directory that may have one.

    Raises:
        ModelError: the file is no tokenizer.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        return ""
    try:
        raw = json.loads(file.read_bytes())
        text = json.dumps([raw.get(key) for key in _TELLING], sort_keys=True)
    except (OSError, ValueError, AttributeError, RecursionError) as cause:
        raise ModelError(f"{file}: no tokenizer ({cause}); fetch it again") from cause
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write(directory: Path, config: DrafterConfig, state: Mapping[str, Tensor]) -> None:
    """Write a drafter's directory, whole or not at all.

    Raises:
        ModelError: it exists already, or cannot be written.
    """
    from safetensors.torch import save

    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    with write_dir_atomic(directory, error=ModelError) as place:
        write_json(place / CONFIG, config.model_dump(mode="json"), error=ModelError)
        write_atomic(place / WEIGHTS, save(tensors, metadata={"format": "pt"}), error=ModelError)


def read(directory: Path) -> StoredDrafter:
    """What lies in a drafter's directory.

    Raises:
        ModelError: it is none, it is damaged, or a weight is NaN or infinite.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    from shoal.model.finite import check_finite

    config = read_config(directory)
    try:
        state = load((directory / WEIGHTS).read_bytes())
    except FileNotFoundError as cause:
        raise _missing(cause) from None
    except (OSError, SafetensorError) as cause:
        raise ModelError(f"{directory}: cannot be read ({cause}); train it again") from cause
    for name, value in state.items():
        check_finite(value, f"{directory}: {name}")
    return StoredDrafter(config, state)


def read_config(directory: Path) -> DrafterConfig:
    """What a drafter is; needs no torch.

    Raises:
        ModelError: the directory is none of a drafter, or it is damaged.
    """
    path = directory / CONFIG
    try:
        if path.stat().st_size > _MAX_CONFIG:
            raise ModelError(
                f"{path}: larger than {_MAX_CONFIG >> 20} MiB, too large for a configuration"
            )
        return parse(DrafterConfig, json.loads(path.read_bytes()), where=str(path))
    except FileNotFoundError as cause:
        raise _missing(cause) from None
    except (OSError, ValueError, RecursionError) as cause:
        raise ModelError(f"{directory}: cannot be read ({cause}); train it again") from cause
    except ConfigError as cause:
        raise ModelError(f"{cause}; train the drafter again") from cause


def _missing(cause: FileNotFoundError) -> ModelError:
    return ModelError(
        f"{cause.filename}: missing; give the directory of a drafter, with {CONFIG} and "
        f"{WEIGHTS}: shoal train writes it for a job with job: drafter"
    )


def check_target(config: DrafterConfig, *, target: str, tokenizer: str, where: str) -> None:
    """Refuse a drafter that was trained for another target or another tokenizer.

    Args:
        config: of the drafter.
        target: fingerprint of the model that it is to draft for.
        tokenizer: hash of that model's tokenizer.
        where: names the drafter in the error.

    Raises:
        ModelError: names both hashes, or the drafter's says too little.
    """
    if target.startswith(_WHOLE) and not config.target.startswith(_WHOLE):
        raise ModelError(
            f"{where}: trained with an earlier version, whose fingerprint {config.target} covers "
            f"only some values of the target; train it again, or, if you know that {config.name} "
            f'was trained for these weights, set "target": "{target}" in {where}/{CONFIG}'
        )
    for what, made, here in (
        ("target", config.target, target),
        ("tokenizer", config.tokenizer, tokenizer),
    ):
        if made != here:
            raise ModelError(
                f"{where}: trained for the {what} {made or 'none'}, and this model's is "
                f"{here or 'none'}; train one for this model with job: drafter"
            )
