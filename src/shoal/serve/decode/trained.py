"""A trained drafter's files, and whether they are for the model that is served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import ModelError
from shoal.ir import ServeJob, ServeWork

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.model.drafters.files import DrafterConfig

__all__ = ["config_of", "of_kind", "stored"]


def config_of(name: str, directory: Path) -> DrafterConfig:
    """What a drafter's directory says of it; needs no torch.

    Raises:
        ModelError: there is none, or it is of another kind.
    """
    from shoal.model.drafters import files

    return _of_kind(files.read_config(directory), name, directory)


def of_kind(name: str, work: ServeWork) -> Iterator[str]:
    """The directories among a plan's drafters that hold one of this kind.

    Raises:
        ModelError: a file of one of them is damaged.
    """
    from shoal.model.drafters import files

    if not work.one_rank:
        return
    for directory in work.drafters:
        path = Path(directory)
        if (path / files.CONFIG).is_file() and files.read_config(path).name == name:
            yield directory


def stored(name: str, directory: Path, job: ServeJob) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """What lies in a drafter's directory.

    Raises:
        ModelError: it is of another kind, or for another model or tokenizer than the job's.
    """
    from shoal.model.drafters import files

    result = files.read(directory)
    _of_kind(result.config, name, directory)
    model = Path(job.model)
    files.check_target(
        result.config,
        target=files.fingerprint(model),
        tokenizer=files.tokenizer_hash(model),
        where=str(directory),
    )
    return result.config, result.state


def _of_kind(config: DrafterConfig, name: str, directory: Path) -> DrafterConfig:
    if config.name != name:
        raise ModelError(
            f"{directory}: a drafter of kind {config.name}, and speculative is {name}; give "
            f"speculative: {{name: {config.name}, path: {directory}}}"
        )
    return config
