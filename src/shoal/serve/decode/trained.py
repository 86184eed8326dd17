"""A trained drafter's files, and whether they are for the model that is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import ModelError
from shoal.ir import ServeJob

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.drafters.files import DrafterConfig

__all__ = ["config_of", "stored"]


def config_of(name: str, directory: Path) -> DrafterConfig:
    """What a drafter's directory says of it; needs no torch.

    Raises:
        ModelError: there is none, or it is of another kind.
    """
    from shoal.core.config import parse
    from shoal.core.errors import ConfigError
    from shoal.model.drafters import files

    path = directory / files.CONFIG
    try:
        config = parse(files.DrafterConfig, json.loads(path.read_bytes()), where=str(path))
    except FileNotFoundError:
        raise ModelError(
            f"{path}: missing; give the directory of a drafter: shoal train writes it for a job "
            "with job: drafter"
        ) from None
    except (OSError, ValueError, RecursionError, ConfigError) as cause:
        raise ModelError(f"{path}: cannot be read ({cause}); train it again") from cause
    return _of_kind(config, name, directory)


def stored(name: str, directory: Path, job: ServeJob) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """What lies in a drafter's directory.

    Raises:
        ModelError: it is of another kind, or for another model or tokenizer than the job's.
    """
    from shoal.model.drafters import files

    found = files.read(directory)
    _of_kind(found.config, name, directory)
    model = Path(job.model)
    files.check_target(
        found.config,
        target=files.fingerprint(model),
        tokenizer=files.tokenizer_hash(model),
        where=str(directory),
    )
    return found.config, found.state


def _of_kind(config: DrafterConfig, name: str, directory: Path) -> DrafterConfig:
    if config.name != name:
        raise ModelError(
            f"{directory}: a drafter of kind {config.name}, and speculative is {name}; give "
            f"speculative: {{name: {config.name}, path: {directory}}}"
        )
    return config
